"""How large a file that is about to be written will probably be: as large as the largest one with
the same name pattern.

Checkpoints repeat: `iter_0001000/mp_rank_00/model.pt` will be as large as
`iter_0000500/mp_rank_00/model.pt`. A pattern is the path with each run of digits replaced by `#`.
Kept in the state database. Used under the file system's lock.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from dataclasses import dataclass

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
CREATE TABLE IF NOT EXISTS read_back (pattern BLOB PRIMARY KEY) WITHOUT ROWID;
"""


class Use(enum.Enum):
    """What a file that was opened to read and write was used for, until it was closed."""

    ONLY_WRITTEN = "only_written"
    """Neither read nor mapped."""
    READ_BACK = "read_back"
    """Read or mapped, by one writer who synced it at its end at most, and closed it then."""
    OTHER = "other"
    """Anything else: what a database does, or a file that goes on through a mapping."""


@dataclass(frozen=True, slots=True)
class _Table:
    """Statements for the patterns of one use."""

    read: str
    add: str
    forget: str


_TABLES = {
    Use.ONLY_WRITTEN: _Table(
        "SELECT pattern FROM only_written",
        "INSERT OR REPLACE INTO only_written VALUES (?)",
        "DELETE FROM only_written WHERE pattern = ?",
    ),
    Use.READ_BACK: _Table(
        "SELECT pattern FROM read_back",
        "INSERT OR REPLACE INTO read_back VALUES (?)",
        "DELETE FROM read_back WHERE pattern = ?",
    ),
}
"""What else there is, is not kept."""


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
        self._uses: dict[Use, dict[bytes, None]] = {
            use: dict.fromkeys(pattern for (pattern,) in state.rows(table.read))
            for use, table in _TABLES.items()
        }
        """Patterns of files that were opened to read and write, by what became of the last one."""
        self._learnt = 0
        """How many sizes."""
        self._largest = (-1, 0)
        """The largest save, as of so many sizes that were learnt."""

    def expect(self, path: bytes) -> int | None:
        """Bytes that a file will probably have; None: nothing like it was seen."""
        return self._sizes.get(pattern_of(path))

    def use_of(self, path: bytes) -> Use:
        """What the last file like it was used for that was opened to read and write; `OTHER`: there
        was none, too.
        """
        pattern = pattern_of(path)
        return next((use for use, known in self._uses.items() if pattern in known), Use.OTHER)

    def learn_use(self, path: bytes, use: Use) -> None:
        """A file was opened to read and write, and is closed."""
        pattern = pattern_of(path)
        for other, patterns in self._uses.items():
            if other is not use and pattern in patterns:
                self._forget_use(other, pattern)
        if use is Use.OTHER or pattern in self._uses[use]:
            return
        self._uses[use][pattern] = None
        self._state.change(_TABLES[use].add, (pattern,))
        if len(self._uses[use]) > PATTERNS_MAX:
            self._forget_use(use, next(iter(self._uses[use])))

    def _forget_use(self, use: Use, pattern: bytes) -> None:
        del self._uses[use][pattern]
        self._state.change(_TABLES[use].forget, (pattern,))

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
