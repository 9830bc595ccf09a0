"""Ranges of a file's bytes, as a value: sorted, apart from each other, and never changed.

Knows numbers and nothing else; thread-safe, as nothing of it changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

END = 1 << 63
"""Behind the last byte that a file can have: a run to here goes on with the file, however long that
becomes.
"""


@dataclass(frozen=True, slots=True)
class Runs:
    """Some bytes of a file, as (start, end) pairs."""

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def first(cls, size: int) -> Runs:
        """The first bytes."""
        return cls(((0, size),)) if size else NOTHING

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.pairs)

    def covers(self, start: int, end: int) -> bool:
        return start >= end or any(first <= start and end <= last for first, last in self.pairs)

    def plus(self, start: int, end: int) -> Runs:
        """With one more range."""
        if start >= end:
            return self
        apart = [pair for pair in self.pairs if pair[1] < start or pair[0] > end]
        touched = [pair for pair in self.pairs if not (pair[1] < start or pair[0] > end)]
        whole = (
            min(start, *(first for first, _last in touched), END),
            max(end, *(last for _first, last in touched), 0),
        )
        return Runs(tuple(sorted([*apart, whole])))

    def minus(self, start: int, end: int) -> Runs:
        """Without a range."""
        left: list[tuple[int, int]] = []
        for first, last in self.pairs:
            left += [(first, min(last, start))] if first < start else []
            left += [(max(first, end), last)] if last > end else []
        return Runs(tuple(left)) if start < end else self

    def gaps(self) -> Runs:
        """All else, up to `END`."""
        gaps = ALL
        for start, end in self.pairs:
            gaps = gaps.minus(start, end)
        return gaps


NOTHING = Runs()
ALL = Runs(((0, END),))
