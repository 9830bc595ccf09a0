"""How large a file that is about to be written will probably be: as large as the largest one with
the same name pattern.

Checkpoints repeat: `iter_0001000/mp_rank_00/model.pt` will be as large as
`iter_0000500/mp_rank_00/model.pt`. A pattern is the path with each run of digits replaced by `#`.
Kept in the state database. Used under the file system's lock.
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
_RANDOM = re.compile(
    rb"(?<=/)(?:(\.tmp)[A-Za-z0-9_]{6,8}|(tmp)[a-z0-9_]{8})(?=\.|$)"  # tempfile of Rust, of Python
    rb"|(?<![0-9A-Za-z])(?=[0-9a-f-]*[0-9])(?=[0-9a-f-]*[a-f])[0-9a-f]{8}[0-9a-f-]*(?![0-9A-Za-z])"
)
"""What programs put into names that nobody is to guess."""
DDL = """
CREATE TABLE IF NOT EXISTS expectation (
  pattern BLOB PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS only_written (pattern BLOB PRIMARY KEY) WITHOUT ROWID;
"""


def pattern_of(path: bytes) -> bytes:
    """What a file's path has in common with those of the same file in other checkpoints.

    A temporary name that was made at random says where the file is, and of which kind the name is.
    """
    return _DIGITS.sub(b"#", _RANDOM.sub(rb"\1\2*", b"/" + path)[1:])


class Expectations:
    """Sizes by pattern."""

    def __init__(self, state: StateDatabase) -> None:
        """Load what earlier mounts learned."""
        self._state = state
        state.create(DDL)
        self._sizes: dict[bytes, int] = dict(state.rows("SELECT pattern, size FROM expectation"))
        self._only_written: dict[bytes, None] = dict.fromkeys(
            pattern for (pattern,) in state.rows("SELECT pattern FROM only_written")
        )
        """Patterns of files that were opened to read and write, and neither read nor mapped."""
        self._learnt = 0
        """How many sizes."""
        self._largest = (-1, 0)
        """The largest save, as of so many sizes that were learnt."""

    def expect(self, path: bytes) -> int | None:
        """Bytes that a file will probably have; None: nothing like it was seen."""
        return self._sizes.get(pattern_of(path))

    def is_only_written(self, path: bytes) -> bool:
        """Whether the last file like it that was opened to read and write was only written."""
        return pattern_of(path) in self._only_written

    def learn_use(self, path: bytes, *, only_written: bool) -> None:
        """A file was opened to read and write, and is closed."""
        pattern = pattern_of(path)
        if only_written == (pattern in self._only_written):
            return
        if only_written:
            self._only_written[pattern] = None
            self._state.change("INSERT OR REPLACE INTO only_written VALUES (?)", (pattern,))
        if not only_written or len(self._only_written) > PATTERNS_MAX:
            gone = next(iter(self._only_written)) if only_written else pattern
            del self._only_written[gone]
            self._state.change("DELETE FROM only_written WHERE pattern = ?", (gone,))

    def newest(self, count: int) -> list[tuple[bytes, int]]:
        """Patterns and sizes that were learnt last, the oldest first; not those that no file is
        expected to have.
        """
        return [(pattern, size) for pattern, size in self._sizes.items() if size < UNBOUNDED_BYTES][
            -count:
        ]

    def largest_save(self) -> int:
        """Bytes that the largest save takes: all files below one directory whose name has a number,
        or one file. Needs no lock.

        Files that differ in numbers only, such as those of ranks, count once, since nobody knows
        how many of them this node writes.
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
