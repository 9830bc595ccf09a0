"""How large a file that is about to be written will probably be: as large as the largest one with the same name pattern.

Checkpoints repeat: `iter_0001000/mp_rank_00/model.pt` will be as large as `iter_0000500/mp_rank_00/model.pt`. A pattern is the
path with each run of digits replaced by `#`. Kept in the state database. Used under the file system's lock.
"""

from __future__ import annotations

import re
from collections import Counter

from acpfs.ram.state import StateDatabase

PATTERNS_MAX = 10_000
"""More than this are no repeating checkpoints; the oldest go first."""
WORTH_LEARNING_BYTES = 1 << 20
"""Smaller files fit anyway."""
UNBOUNDED_BYTES = 1 << 60
"""Expected of a file that cannot be written in the passthrough lane."""

_DIGITS = re.compile(rb"\d+")
DDL = "CREATE TABLE IF NOT EXISTS expectation (pattern BLOB PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;"


def pattern_of(path: bytes) -> bytes:
    """What a file's path has in common with those of the same file in other checkpoints."""
    return _DIGITS.sub(b"#", path)


class Expectations:
    """Sizes by pattern."""

    def __init__(self, state: StateDatabase) -> None:
        """Load what earlier mounts learned."""
        self._state = state
        state.create(DDL)
        self._sizes: dict[bytes, int] = dict(state.rows("SELECT pattern, size FROM expectation"))
        self._learnt = 0
        """How many sizes."""
        self._largest = (-1, 0)
        """The largest save, as of so many sizes that were learnt."""

    def expect(self, path: bytes) -> int | None:
        """Bytes that a file will probably have; None: nothing like it was seen."""
        return self._sizes.get(pattern_of(path))

    def newest(self, count: int) -> list[tuple[bytes, int]]:
        """Patterns and sizes that were learnt last, the oldest first; not those that no file is expected to have."""
        return [(pattern, size) for pattern, size in self._sizes.items() if size < UNBOUNDED_BYTES][
            -count:
        ]

    def largest_save(self) -> int:
        """Bytes that the largest save takes: all files below one directory whose name has a number, or one file. Needs no lock.

        Files that differ in numbers only, such as those of ranks, count once, since nobody knows how many of them this node writes.
        """
        learnt = self._learnt
        if self._largest[0] != learnt:
            saves: Counter[bytes] = Counter()
            for pattern, size in list(self._sizes.items()):
                if size < UNBOUNDED_BYTES:
                    head, number, tail = pattern.partition(b"#")
                    saves[head + number + tail.partition(b"/")[0]] += size
            self._largest = learnt, max(saves.values(), default=0)
        return self._largest[1]

    def learn(self, path: bytes, size: int) -> None:
        """A file is complete and has that size."""
        pattern = pattern_of(path)
        if size < WORTH_LEARNING_BYTES or self._sizes.get(pattern, 0) >= size:
            return
        self._sizes[pattern] = size
        self._learnt += 1
        self._state.change("INSERT OR REPLACE INTO expectation VALUES (?, ?)", (pattern, size))
        if len(self._sizes) > PATTERNS_MAX:
            oldest = next(iter(self._sizes))
            del self._sizes[oldest]
            self._state.change("DELETE FROM expectation WHERE pattern = ?", (oldest,))
