"""Where a job stands whose ranks are replaced, and which state may follow which.

GATHERING ──a process for each rank──► REBUILDING ──all run──► RUNNING ──all finished──► ENDING
    ▲                                      │                      │
    └──────────all parked────── PARKING ◄──┴──another fault───────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class CrewState(Enum):
    """Of the job."""

    STANDBY = "standby"
    """Another coordinator commands."""
    GATHERING = "gathering"
    """Ranks wait parked until each has a process."""
    REBUILDING = "rebuilding"
    """All were told to make their groups, and to take the state from whoever has it."""
    RUNNING = "running"
    PARKING = "parking"
    """After a fault: those who live leave their collectives."""
    ENDING = "ending"


class Berth(Enum):
    """Of one rank."""

    EMPTY = "empty"
    """No process."""
    CALLED = "called"
    """Told to stop, and not parked yet."""
    PARKED = "parked"
    ENTERED = "entered"
    """In the loop, before its first good step."""
    RUNNING = "running"
    FINISHED = "finished"
    """Its loop has ended; it waits for the others, since one of them may still need what it has."""


_FAULTY = frozenset({CrewState.PARKING, CrewState.ENDING, CrewState.STANDBY})
CREW_TRANSITIONS: Mapping[CrewState, frozenset[CrewState]] = {
    CrewState.STANDBY: frozenset(
        {CrewState.GATHERING, CrewState.RUNNING, CrewState.PARKING, CrewState.ENDING}
    ),
    CrewState.GATHERING: _FAULTY | {CrewState.REBUILDING},
    CrewState.REBUILDING: _FAULTY | {CrewState.RUNNING},
    CrewState.RUNNING: _FAULTY,
    CrewState.PARKING: _FAULTY | {CrewState.GATHERING},
    CrewState.ENDING: frozenset({CrewState.STANDBY}),
}
