"""Manifest: path → (digest, size) of every file that this node has on the backing directory.

The table in the state database is the truth, changed in the transaction of the commit that it
describes. The written form, `.acpfs/manifest/<node>*.xxh128`, is for others: `cd BACKING &&
xxh128sum -c .acpfs/manifest/*.xxh128`. It is in parts (`manifest_parts`), and only those that say
something else by now are written anew. Names with a newline or a backslash are only in the table,
because xxhash 0.8.1 does not read escaped names. Changed under the file system's lock; written by
one thread at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from threading import Lock, RLock

from acpfs.backing.lower import Lower, LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.writeback.manifest.manifest_parts import ManifestPart, ManifestParts

DDL = """
CREATE TABLE IF NOT EXISTS checksum (
  path BLOB PRIMARY KEY, digest TEXT NOT NULL, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checksum_origin (loaded INTEGER NOT NULL);
"""
PAGE_ROWS = 2000
"""Rows read at a time under the lock: about a millisecond."""
PART_LINES = 1000
"""50 to 100 kB."""
_DIRECTORY: LowerPath = (b"manifest",)
_LINE = re.compile(rb"([0-9a-f]{32})  (.+)")
_UNWRITABLE = (b"\n", b"\\", b"\r")


class Manifest:
    """The table and its written form."""

    def __init__(
        self,
        state: StateDatabase,
        lower: Lower,
        lock: RLock,
        node_id: str,
        part_lines: int = PART_LINES,
    ) -> None:
        """Touches only the state database; `load` reads the written manifest.

        `part_lines`: of a part when it is made by a split; it is split again at twice, and joined
        with another one at a quarter of that.
        """
        self._state = state
        self._lower = lower
        self._lock = lock
        self._parts = ManifestParts(state, node_id)
        self._part_lines = part_lines
        self._files_seen: set[int] | None = None
        """Numbers of the parts that have files; None: not looked yet."""
        self._changes = 0
        self._written = -1
        self._loading = Lock()
        state.create(DDL)
        self._lacks_sizes = self._find_lack()
        self.entries: int = state.rows("SELECT count(*) FROM checksum")[0][0]

    # -- the table, under the lock

    def digest(self, path: LowerPath) -> str:
        """Recorded xxh3-128 of a file, "" for none."""
        rows = self._state.rows("SELECT digest FROM checksum WHERE path = ?", (b"/".join(path),))
        return str(rows[0][0]) if rows else ""

    def put(self, path: LowerPath, digest: str, size: int) -> None:
        """A file with this content lies there now."""
        key = b"/".join(path)
        self.entries += not self._has(key)
        self._state.change("INSERT OR REPLACE INTO checksum VALUES (?, ?, ?)", (key, digest, size))
        self._parts.changed(key)
        self._changes += 1

    def copy(self, source: LowerPath, target: LowerPath) -> None:
        """An additional name of a file."""
        rows = self._state.rows(
            "SELECT digest, size FROM checksum WHERE path = ?", (b"/".join(source),)
        )
        if rows:
            self.put(target, *rows[0])
        else:
            self.remove(target)

    def remove(self, path: LowerPath) -> None:
        """Nothing lies there any more, nor below it."""
        key = b"/".join(path)
        at = ("path = ?", (key,), self._parts.changed)
        below = ("path > ? AND path < ?", (key + b"/", key + b"0"), self._parts.changed_below)
        for sql, values, changed in (at, below):
            # constants
            found = self._state.rows((f"SELECT count(*) FROM checksum WHERE {sql}"), values)[0][0]  # noqa: S608
            if found:
                # constants
                self._state.change(f"DELETE FROM checksum WHERE {sql}", values)  # noqa: S608
                changed(key)
                self.entries -= found
                self._changes += 1

    def move(self, source: LowerPath, target: LowerPath) -> None:
        """What lay at `source`, and below it, lies at `target`; what lay there is gone."""
        self.remove(target)
        self._rename(b"/".join(source), b"/".join(target))

    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        """Swap what lies at two paths, and below them."""
        # no path begins with a slash
        key_a = b"/".join(a)
        key_b = b"/".join(b)
        aside = b"/aside"
        self._rename(key_a, aside)
        self._rename(key_b, key_a)
        self._rename(aside, key_b)

    def _has(self, key: bytes) -> bool:
        return bool(self._state.rows("SELECT 1 FROM checksum WHERE path = ?", (key,)))

    def _rename(self, old: bytes, new: bytes) -> None:
        """'0' is the character after '/': the range holds all that begins with the path and a
        slash.
        """
        rows = self._state.rows(
            "SELECT path FROM checksum WHERE path = ? OR (path > ? AND path < ?)",
            (old, old + b"/", old + b"0"),
        )
        if rows:
            moved = [(new + path[len(old) :], path) for (path,) in rows]
            self._state.change_many("UPDATE checksum SET path = ? WHERE path = ?", moved)
            for key in itertools.chain.from_iterable(moved):
                self._parts.changed(key)
            self._changes += 1

    def page(self, after: bytes, below: LowerPath = ()) -> list[tuple[bytes, str, int]]:
        """The next rows after a path, at and below another one, in order of path."""
        prefix = b"/".join(below)
        if not prefix:
            return self._state.rows(
                "SELECT * FROM checksum WHERE path > ? ORDER BY path LIMIT ?", (after, PAGE_ROWS)
            )
        sql = (
            "SELECT * FROM checksum WHERE path > ? AND (path = ? OR (path > ? AND path < ?)) "
            "ORDER BY path LIMIT ?"
        )
        return self._state.rows(sql, (after, prefix, prefix + b"/", prefix + b"0", PAGE_ROWS))

    def rows(self, below: LowerPath = ()) -> Iterator[tuple[bytes, str, int]]:
        """All rows at and below a path, page by page, the lock free in between."""
        after = b""
        while True:
            with self._lock:
                page = self.page(after, below)
            if not page:
                return
            yield from page
            after = page[-1][0]

    # -- the written form; these block on the backing directory

    def remove_unfinished(self) -> None:
        """What workers that were killed while they wrote have left: each as large as a part."""
        for found in self._lower.list_own(_DIRECTORY):
            if self._parts.is_unfinished(found):
                self._lower.remove_own((*_DIRECTORY, found))

    def load(self) -> int:
        """Fill a new table from the written manifest; returns the number of lines taken over.

        Asked for by two at a mount's start: the second waits for the first, or it would bring back
        what was removed meanwhile.
        """
        with self._loading:
            return self._load()

    def _load(self) -> int:
        with self._lock:
            if self._state.rows("SELECT 1 FROM checksum_origin"):
                return 0  # also when it is empty: then the written one is out of date
        lines, found = self._read()
        # Page by page, the lock free in between: nothing is committed before this has ended, and
        # what a kill leaves of it is loaded again.
        for start in range(0, len(lines), PAGE_ROWS):
            page = [(path, digest.decode()) for digest, path in lines[start : start + PAGE_ROWS]]
            with self._lock, self._state.step():
                self._state.change_many("INSERT OR IGNORE INTO checksum VALUES (?, ?, -1)", page)
        with self._lock, self._state.step():
            if not self._changes:
                self._take_over(found)
            self._state.change("INSERT INTO checksum_origin VALUES (1)")
            self._lacks_sizes = self._find_lack()
            if not self._changes:
                self._written = 0
            self.entries = self._state.rows("SELECT count(*) FROM checksum")[0][0]
        return len(lines)

    def _read(self) -> tuple[list[tuple[bytes, bytes]], dict[int, tuple[bytes, bytes]]]:
        """All lines, (digest, path), and of each part its first and last path."""
        lines: list[tuple[bytes, bytes]] = []
        found: dict[int, tuple[bytes, bytes]] = {}
        for number in sorted(self._look()):
            with contextlib.suppress(FileNotFoundError):
                content = self._lower.read_own((*_DIRECTORY, self._parts.name(number)))
                part = [
                    (match[1], match[2])
                    for line in content.split(b"\n")
                    if (match := _LINE.fullmatch(line))
                ]
                lines += part
                if part:
                    found[number] = (min(part, key=_path)[1], max(part, key=_path)[1])
        return lines, found

    def _take_over(self, found: dict[int, tuple[bytes, bytes]]) -> None:
        """The written parts as they are.

        After a cut in the middle of a split two say the same: then all are written anew.
        """
        ranges = sorted(found.values())
        overlap = any(one[1] >= other[0] for one, other in itertools.pairwise(ranges))
        self._parts.restart(
            {number: first for number, (first, _last) in found.items()}, stale=overlap
        )

    def _look(self) -> set[int]:
        """Which parts have files."""
        numbers = map(self._parts.number, self._lower.list_own(_DIRECTORY))
        self._files_seen = {number for number in numbers if number is not None}
        return self._files_seen

    def learn_sizes(self, below: LowerPath = ()) -> None:
        """Look up sizes for rows that came from the written manifest, which has none: each once."""
        if not self._lacks_sizes:
            return
        for key, digest, size in self.rows(below):
            if size >= 0:
                continue
            with contextlib.suppress(OSError):  # gone, or not to be had now: asked again next time
                found = self._lower.lstat(tuple(key.split(b"/")))
                with self._lock, self._state.step():
                    known = (
                        "UPDATE checksum SET size = ? WHERE path = ? AND digest = ? AND size < 0"
                    )
                    self._state.change(known, (found.size, key, digest))
        with self._lock:
            self._lacks_sizes = self._find_lack()

    def _find_lack(self) -> bool:
        return bool(self._state.rows("SELECT 1 FROM checksum WHERE size < 0 LIMIT 1"))

    @property
    def changes(self) -> int:
        """How often the table was changed."""
        return self._changes

    def is_written_to(self, changes: int) -> bool:
        """Whether the written form has at least so many of the changes."""
        return self._written >= changes

    @property
    def is_written(self) -> bool:
        """Whether the written form says what the table says."""
        return self._written == self._changes

    def write(self) -> None:
        """Bring the written form up to date. A change made meanwhile makes it out of date again."""
        anew = self._files_seen is None
        seen = self._look() if self._files_seen is None else self._files_seen
        with self._lock:
            changes = self._changes
            for part in self._parts if anew and self.entries else ():
                if part.number not in seen:
                    self._parts.touch(part)  # somebody has removed it
            due = [part for part in self._parts if part.stale]
        while due:  # the last first: of what is split, that keeps its lines until others have them
            due += self._write_part(due.pop(), seen)
        with self._lock:
            numbers = {part.number for part in self._parts} if self.entries else set()
        for number in seen - numbers:
            self._remove_file(number, seen)
        with self._lock, self._state.step():
            self._written = changes

    def _write_part(self, part: ManifestPart, seen: set[int]) -> list[ManifestPart]:
        """Returns what is to be written in place of it: after a split, or where the part before has
        its lines now.
        """
        with self._lock:
            if not self._parts.has(part):
                return []
            noted = part.changes
            end = self._parts.end(part)
        lines = [
            (key, b"%s  %s\n" % (digest.encode(), key))
            for key, digest, _size in self._between(part.first, end)
            if _is_writable(key)
        ]
        with self._lock:
            if len(lines) > 2 * self._part_lines:
                count = len(lines) // self._part_lines
                return self._parts.split(
                    part, [lines[len(lines) * index // count][0] for index in range(1, count)]
                )
            if (
                len(lines) < self._part_lines // 4
                and (before := self._parts.join(part)) is not None
            ):
                return [before]
        if lines:
            self._lower.write_own(
                (*_DIRECTORY, self._parts.name(part.number)), b"".join(line for _key, line in lines)
            )
            seen.add(part.number)
        else:
            self._remove_file(part.number, seen)
        with self._lock, self._state.step():
            self._parts.written(part, noted)
        return []

    def _between(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, str, int]]:
        """Rows of a range, page by page, the lock free in between. b"" is no path."""
        sql = (
            "SELECT * FROM checksum WHERE path >= ? AND (? = x'' OR path < ?) ORDER BY path LIMIT ?"
        )
        while True:
            with self._lock:
                page = self._state.rows(sql, (first, end, end, PAGE_ROWS))
            yield from page
            if len(page) < PAGE_ROWS:
                return
            first = page[-1][0] + b"\0"

    def _remove_file(self, number: int, seen: set[int]) -> None:
        self._lower.remove_own((*_DIRECTORY, self._parts.name(number)))
        seen.discard(number)


def _path(line: tuple[bytes, bytes]) -> bytes:
    return line[1]


def _is_writable(path: bytes) -> bool:
    return not any(mark in path for mark in _UNWRITABLE)
