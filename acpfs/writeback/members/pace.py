"""How often this node tells others how far it is, and looks at what they tell.

A pointer waits for the next record of the slowest node and for the look that finds it, so both are
as close together as the two records per heartbeat allow where a save is under way, and seldom where
nothing goes on. With many nodes all of them together read no more, while nothing waits, than a few
nodes do, and heartbeats are longer, or the records alone would keep the metadata server busy. Pure:
knows neither records nor files. Used by the tasks of one event loop.
"""

from __future__ import annotations

import math

from acpfs.runtime.given import Runtime

BETWEEN_WRITES = 0.5
"""Of a heartbeat: no two records come closer to each other, whoever wants them …"""
BETWEEN_WRITES_MAX = 0.75
"""… and none later."""
BETWEEN_LOOKS = 0.1
"""Of a heartbeat, while a pointer waits …"""
BETWEEN_CALM_LOOKS = 0.25
"""… and while only removals do, or what is withheld, which may be for days, or it waits for very
many.
"""
BETWEEN_READS_S = 1e-3
"""For each record that a look reads, looks are so far apart at least: a thousand are 30 ms of a
processor.
"""
LIVELY = 2.0
"""Heartbeats after something was closed, or not yet persisted: so long records come as often as may
be, for that save's pointer follows.
"""
SHARED_FROM = 64
"""More nodes than these share what so many would read and list while nothing waits."""
STRETCHED_FROM = 1024
"""With more nodes heartbeats are longer in proportion …"""
HEARTBEAT_S_MAX = 60.0
"""… up to here."""
READERS = 4
READERS_MANY = 16
"""Threads that read records at the same time: with few nodes, and with more than SHARED_FROM."""


class Pace:
    """Of one node."""

    def __init__(self, heartbeat_s: float, runtime: Runtime) -> None:
        """`heartbeat_s`: as set."""
        self._set_s = heartbeat_s
        self._monotonic = runtime.clock.now
        self._chance = runtime.chance.source
        self.nodes = 1
        """With this one."""
        self._written_at = -math.inf
        self._lively_at = -math.inf
        self._last_seq = -1

    @property
    def heartbeat_s(self) -> float:
        """With so many nodes."""
        return max(self._set_s, min(HEARTBEAT_S_MAX, self._set_s * self.nodes / STRETCHED_FROM))

    def look_s(self, *, pointers: bool, records: int = 0) -> float:
        """From one look to the next, while something waits.

        `pointers`: that others are to see. `records`: so many were read for it.
        """
        least_s = (BETWEEN_LOOKS if pointers else BETWEEN_CALM_LOOKS) * self.heartbeat_s
        # No longer than that: a pointer comes within a heartbeat, whatever it waits for.
        most_s = BETWEEN_CALM_LOOKS * self.heartbeat_s
        return max(least_s, min(most_s, records * BETWEEN_READS_S))

    @property
    def readers(self) -> int:
        """How many records are read at the same time."""
        return READERS if self.nodes <= SHARED_FROM else READERS_MANY

    @property
    def share(self) -> float:
        """Of what one of few nodes reads and lists while nothing waits."""
        return min(1.0, SHARED_FROM / self.nodes)

    def reads(self, most: int) -> int:
        """So many of `most` records to read now: on average this node's share."""
        return int(most * self.share + self._chance.random())

    def writes(self, last_seq: int, *, behind: bool) -> None:
        """A record is written from now on; `last_seq`: of the log; `behind`: not all is
        persisted.
        """
        self._written_at = self._monotonic()
        if behind or last_seq != self._last_seq:
            self._lively_at = self._written_at
        self._last_seq = last_seq

    def next_write(self) -> float:
        """Heartbeats from the last record to the next one: jittered where nobody is in a hurry, so
        that nodes do not write together.
        """
        lively = self._monotonic() - self._lively_at < LIVELY * self.heartbeat_s
        return (
            BETWEEN_WRITES if lively else self._chance.uniform(BETWEEN_WRITES, BETWEEN_WRITES_MAX)
        )

    def until_write_s(self, heartbeats: float = BETWEEN_WRITES) -> float:
        """Until so long after the last record."""
        return max(0.0, self._written_at + heartbeats * self.heartbeat_s - self._monotonic())
