"""What one generation's dialogue has brought so far, and how long those are waited for that have
not answered.

It decides nothing: `phases` does. A rank that writes to a slow storage is no rank that hangs: as
long as bytes move, it is waited for. Pure; time is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from acpfs.training.coordinator.limits import Limits
from acpfs.training.decision import Copied, Meeting
from acpfs.training.messages import Manifest, Save, Saved, Settled, Stopped

MOVES_BYTES = 1 << 16
"""More than a rank writes of its own, such as lines of a log, between two beats."""


@dataclass
class Round:
    """What one generation's dialogue has brought so far."""

    stopped: dict[int, Stopped]
    settled: dict[int, Settled]
    saved: dict[int, Saved]
    waiting: set[int] = field(default_factory=set)
    """Who has not answered yet: who is to park, to settle, or to write."""
    meeting: Meeting | None = None
    back: Copied | None = None
    """Where it is in copies that some steps ago were taken; None: where ranks are."""
    claim: bool | None = True
    """Whether this side may save; None: not known yet."""
    save: Save | None = None
    manifest: Manifest | None = None
    publisher: int | None = None

    @property
    def asked(self) -> frozenset[int]:
        """Who has to settle."""
        return self.meeting.there | self.meeting.coming if self.meeting else frozenset()


class Patience:
    """Of one coordinator, for the state that it is in."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.until = math.inf
        """When whoever has not answered is late."""
        self._longest = math.inf
        self._given_s = math.inf
        self._moved: dict[int, int] = {}

    def begin(self, now: float, given_s: float) -> None:
        """A state that may take so long."""
        self._given_s = given_s
        self._moved = {}
        self._from(now)

    def _from(self, now: float) -> None:
        self.until = now + self._given_s
        self._longest = self.until + self._limits.only_holder_s

    def moves(self, rank: int, moved: int, now: float) -> None:
        """How much this rank has written in all: time is counted anew when that is more."""
        if moved - self._moved.get(rank, 0) >= MOVES_BYTES:
            self._moved[rank] = moved
            self._from(now)

    def is_left(self, now: float) -> bool:
        """Whether ranks that nobody can stand in for are still waited for."""
        return now < self._longest

    def wait(self, now: float) -> None:
        """For a beat more."""
        self.until = now + self._limits.beat_s

    def end(self) -> None:
        """Nobody is waited for any more."""
        self.until = math.inf
