"""How room is made in RAM, one step after the other: what is dearest to lose goes last.

Each part of the file system that can give something up takes its step when it is made; the tier,
which has this from its own beginning, climbs it when room is wanted. The last step is not here: a
file whose writers are held moves out (`filesystem.hold`), when nothing here helps. Does not know
what gives way. Used under the file system's lock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable


class Rung(enum.IntEnum):
    """In the order in which they give way."""

    COMING = 1
    """What is on its way to RAM: it is nobody's yet."""
    CLEAN = 2
    """What the backing directory has as well."""
    SPILL = 3
    """What is complete, and goes to the spill directory."""


class Ladder:
    """See above."""

    def __init__(self) -> None:
        self._at_once: dict[Rung, Callable[[int], int]] = {}
        self._later: dict[Rung, Callable[[], bool]] = {}

    def gives(self, rung: Rung, free: Callable[[int], int]) -> None:
        """A step that makes room at once: given the bytes that are wanted, it returns those that
        came free.
        """
        assert rung not in self._at_once
        self._at_once[rung] = free

    def begins(self, rung: Rung, begin: Callable[[], bool]) -> None:
        """A step that takes time: it begins, if it has not, and says whether room is about to
        come.
        """
        assert rung not in self._later
        self._later[rung] = begin

    def make_room(self, wanted: int) -> None:
        """Have so many bytes come free, or as many as can at once."""
        for rung in sorted(self._at_once):
            if wanted <= 0:
                return
            wanted -= self._at_once[rung](wanted)

    def is_coming(self) -> bool:
        """Nothing comes free at once any more: whether something is about to."""
        return any(begin() for _rung, begin in sorted(self._later.items()))
