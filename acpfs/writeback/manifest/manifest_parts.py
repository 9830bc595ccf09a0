"""The manifest's written form in parts: each holds the paths of one range, so that a change costs
one small file and not all of them.

A part is `<node>.xxh128` or `<node>+<number>.xxh128`, each of them a plain list that `xxh128sum -c`
reads; together they say what the table says. A part that has grown is split, one that has shrunk
joins the one before it. Which parts are out of date stands in the state database, in the
transaction of the change: the next worker writes those, and no others. Used under the file system's
lock.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from acpfs.ram.state import StateDatabase

_SUFFIX = b".xxh128"

DDL = (
    "CREATE TABLE IF NOT EXISTS manifest_part (first BLOB PRIMARY KEY, number INTEGER NOT NULL, "
    "stale INTEGER NOT NULL) WITHOUT ROWID"
)


@dataclass(slots=True, eq=False)
class ManifestPart:
    """One of them."""

    first: bytes
    """It begins with this path, and ends before the first one of the next part."""
    number: int
    stale: bool
    changes: int = 0
    """How often what it says was changed; not persisted."""


class ManifestParts:
    """All of them, in order of path; the first one begins with b""."""

    def __init__(self, state: StateDatabase, node_id: str) -> None:
        self._state = state
        self._node = node_id.encode()
        self._pattern = re.compile(
            rb"%s(?:\+(\d+))?%s" % (re.escape(self._node), re.escape(_SUFFIX))
        )
        state.create(DDL)
        rows = state.rows("SELECT first, number, stale FROM manifest_part ORDER BY first")
        self._parts = [
            ManifestPart(first, number, bool(stale)) for first, number, stale in rows
        ] or [ManifestPart(b"", 0, stale=True)]
        self._firsts = [part.first for part in self._parts]
        if not rows:
            self._save(self._parts[0])

    def __iter__(self) -> Iterator[ManifestPart]:
        return iter(list(self._parts))

    def __len__(self) -> int:
        return len(self._parts)

    # -- names of files

    def name(self, number: int) -> bytes:
        """Of the file."""
        return self._node + (b"+%04d" % number if number else b"") + _SUFFIX

    def number(self, name: bytes) -> int | None:
        """Of the part that a file is; None: it is none of this node's."""
        match = self._pattern.fullmatch(name)
        return None if match is None else int(match[1] or 0)

    def is_unfinished(self, name: bytes) -> bool:
        """Whether a file is what a killed worker had begun to write of one."""
        return name.startswith(b".") and self.number(name[1:].rpartition(b".")[0]) is not None

    # -- changes

    def _index(self, key: bytes) -> int:
        return bisect_right(self._firsts, key) - 1

    def changed(self, key: bytes) -> None:
        """What is said about a path."""
        self.touch(self._parts[self._index(key)])

    def changed_below(self, key: bytes) -> None:
        """'0' is the character after '/'."""
        for index in range(self._index(key + b"/"), self._index(key + b"0") + 1):
            self.touch(self._parts[index])

    def touch(self, part: ManifestPart) -> None:
        """It is out of date."""
        part.changes += 1
        if not part.stale:
            part.stale = True
            self._save(part)

    def _save(self, part: ManifestPart) -> None:
        self._state.change(
            "INSERT OR REPLACE INTO manifest_part VALUES (?, ?, ?)",
            (part.first, part.number, part.stale),
        )

    def restart(self, firsts: dict[int, bytes], *, stale: bool) -> None:
        """The parts are those that were found: number → first path."""
        self._state.change("DELETE FROM manifest_part", ())
        ordered = sorted((first, number) for number, first in firsts.items()) or [(b"", 0)]
        self._parts = [
            ManifestPart(first if index else b"", number, stale)
            for index, (first, number) in enumerate(ordered)
        ]
        self._firsts = [part.first for part in self._parts]
        for part in self._parts:
            self._save(part)

    # -- writing

    def has(self, part: ManifestPart) -> bool:
        """Whether it has not joined the one before it."""
        return part in self._parts

    def end(self, part: ManifestPart) -> bytes:
        """The first path behind it; b"" for none."""
        index = self._parts.index(part) + 1
        return self._parts[index].first if index < len(self._parts) else b""

    def written(self, part: ManifestPart, changes: int) -> None:
        """Its file says what it was when it had been changed so often."""
        if part.changes == changes and part.stale:
            part.stale = False
            self._save(part)

    def split(self, part: ManifestPart, firsts: list[bytes]) -> list[ManifestPart]:
        """More parts begin within it: it and those, all out of date."""
        number = max(known.number for known in self._parts)
        made = [part]
        for first in firsts:
            number += 1
            made.append(ManifestPart(first, number, stale=True))
            self._parts.insert(self._index(first) + 1, made[-1])
            self._firsts.insert(self._index(first) + 1, first)
            self._save(made[-1])
        self.touch(part)
        return made

    def join(self, part: ManifestPart) -> ManifestPart | None:
        """The part before it, which takes over what it has and is out of date; None for the first
        one.
        """
        index = self._parts.index(part)
        if not index:
            return None
        self.touch(self._parts[index - 1])
        del self._parts[index], self._firsts[index]
        self._state.change("DELETE FROM manifest_part WHERE first = ?", (part.first,))
        return self._parts[index - 1]
