"""Names the ranks that hold everybody up when nothing moves: one sits in a data loader, a kernel, a
lock, and kills nothing. Pure.

Every BEAT has the marks and, for each group, the number of the last collective that this rank
began. Progress is any change of these in any rank. Where there is none for long, the ranks with the
lowest number in a group are *behind*: the others wait for them there. Before the first step, and
while a rank says that it does something long, nobody is watched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from acpfs.training.messages import Beat, Phase

STEPS_KEPT = 33
_ORDER = {Phase.COMPUTING: 0, Phase.READY: 1, Phase.UPDATING: 2}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long nothing may move: the longer of the two."""

    steps: float = 10.0
    """Median steps."""
    at_least_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing moves."""

    behind: tuple[int, ...]
    """Who holds the others up; all, where nobody is ahead of anybody."""
    group: str
    """The group in which they are behind; empty: by their marks."""
    waited_s: float


class Watchdog:
    """One per active coordinator."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._beats: dict[int, Beat] = {}
        self._moved: float | None = None
        self._newest = -1
        self._stepped: deque[float] = deque(maxlen=STEPS_KEPT)
        self._told = False

    def heard(self, rank: int, beat: Beat, now: float) -> None:
        """A rank says where it is."""
        before = self._beats.get(rank)
        self._beats[rank] = beat
        if before is None or before != beat:
            self._moved = now
            self._told = False
        if beat.done > self._newest >= 0:
            self._stepped.append(now)
        self._newest = max(self._newest, beat.done)

    def begin_anew(self) -> None:
        """The ranks were stopped: what came before says nothing."""
        self._beats.clear()
        self._moved = None

    @property
    def limit_s(self) -> float:
        """How long nothing may move now."""
        between = [after - before for before, after in pairwise(self._stepped)]
        return max(
            self._patience.at_least_s, self._patience.steps * median(between) if between else 0.0
        )

    def look(self, live: Iterable[int], now: float) -> Stall | None:
        """Whether the job hangs; told once, until something moves."""
        beats = {rank: self._beats[rank] for rank in live if rank in self._beats}
        if (
            self._told
            or self._moved is None
            or not self._stepped
            or any(beat.long_operation for beat in beats.values())
        ):
            return None
        waited = now - self._moved
        if waited <= self.limit_s or not beats:
            return None
        self._told = True
        ranks, group = behind(beats)
        return Stall(ranks, group, waited)


def behind(beats: Mapping[int, Beat]) -> tuple[tuple[int, ...], str]:
    """The ranks that the others wait for, and in which group.

    Of several groups the one with the fewest behind says most: in the others they are missing for
    the same reason.
    """
    found: list[tuple[int, str, tuple[int, ...]]] = []
    for group in sorted({group for beat in beats.values() for group in beat.clues}):
        numbers = {rank: beat.clues[group] for rank, beat in beats.items() if group in beat.clues}
        lowest = min(numbers.values())
        if lowest < max(numbers.values()):
            ranks = tuple(sorted(rank for rank, number in numbers.items() if number == lowest))
            found.append((len(ranks), group, ranks))
    if found:
        _, group, ranks = min(found)
        return ranks, group
    marks = {rank: (beat.done, beat.ready, _ORDER[beat.phase]) for rank, beat in beats.items()}
    return tuple(sorted(rank for rank, mark in marks.items() if mark == min(marks.values()))), ""
