"""Manifest: path → (digest, size) of every file that this node has on the backing directory.

The table in the state database is the truth, changed in the transaction of the commit that it describes. The written form,
`.acpfs/manifest/<node>.xxh128`, is for others: `cd BACKING && xxh128sum -c .acpfs/manifest/<node>.xxh128`. Names with a newline or a
backslash are only in the table, because xxhash 0.8.1 does not read escaped names. Changed under the file system's lock; written by one
thread at a time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from threading import Lock, RLock

from acpfs.backing.lower import Lower, LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.writeback.records import Verification
from acpfs.writeback.verify import Verifier

DDL = """
CREATE TABLE IF NOT EXISTS checksum (path BLOB PRIMARY KEY, digest TEXT NOT NULL, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checksum_origin (loaded INTEGER NOT NULL);
"""
PAGE_ROWS = 2000
"""Rows read at a time under the lock: about a millisecond."""
_LINE = re.compile(rb"([0-9a-f]{32})  (.+)")
_UNWRITABLE = (b"\n", b"\\", b"\r")


class Manifest:
    """The table and its written form."""

    def __init__(self, state: StateDatabase, lower: Lower, lock: RLock, node_id: str) -> None:
        """Touches only the state database; `load` reads the written manifest."""
        self._state, self._lower, self._lock = state, lower, lock
        self._names: LowerPath = (b"manifest", f"{node_id}.xxh128".encode())
        self._changes, self._written = 0, -1
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
        self._changes += 1

    def copy(self, source: LowerPath, target: LowerPath) -> None:
        """An additional name of a file."""
        rows = self._state.rows("SELECT digest, size FROM checksum WHERE path = ?", (b"/".join(source),))
        if rows:
            self.put(target, *rows[0])
        else:
            self.remove(target)

    def remove(self, path: LowerPath) -> None:
        """Nothing lies there any more, nor below it."""
        key = b"/".join(path)
        for sql, values in (("path = ?", (key,)), ("path > ? AND path < ?", (key + b"/", key + b"0"))):
            found = self._state.rows(f"SELECT count(*) FROM checksum WHERE {sql}", values)[0][0]  # noqa: S608 - constants
            if found:
                self._state.change(f"DELETE FROM checksum WHERE {sql}", values)  # noqa: S608 - constants
                self.entries -= found
                self._changes += 1

    def move(self, source: LowerPath, target: LowerPath) -> None:
        """What lay at `source`, and below it, lies at `target`; what lay there is gone."""
        self.remove(target)
        self._rename(b"/".join(source), b"/".join(target))

    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        """Swap what lies at two paths, and below them."""
        key_a, key_b, aside = b"/".join(a), b"/".join(b), b"/aside"  # no path begins with a slash
        self._rename(key_a, aside)
        self._rename(key_b, key_a)
        self._rename(aside, key_b)

    def _has(self, key: bytes) -> bool:
        return bool(self._state.rows("SELECT 1 FROM checksum WHERE path = ?", (key,)))

    def _rename(self, old: bytes, new: bytes) -> None:
        """'0' is the character after '/': the range holds all that begins with the path and a slash."""
        rows = self._state.rows("SELECT path FROM checksum WHERE path = ? OR (path > ? AND path < ?)", (old, old + b"/", old + b"0"))
        if rows:
            self._state.change_many("UPDATE checksum SET path = ? WHERE path = ?", [(new + path[len(old) :], path) for (path,) in rows])
            self._changes += 1

    def page(self, after: bytes, below: LowerPath = ()) -> list[tuple[bytes, str, int]]:
        """The next rows after a path, at and below another one, in order of path."""
        prefix = b"/".join(below)
        if not prefix:
            return self._state.rows("SELECT * FROM checksum WHERE path > ? ORDER BY path LIMIT ?", (after, PAGE_ROWS))
        sql = "SELECT * FROM checksum WHERE path > ? AND (path = ? OR (path > ? AND path < ?)) ORDER BY path LIMIT ?"
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
        """What workers that were killed while they wrote have left: each as large as the manifest."""
        directory, name = self._names
        for found in self._lower.list_own((directory,)):
            if found.startswith(b".%s." % name):
                self._lower.remove_own((directory, found))

    def load(self) -> int:
        """Fill a new table from the written manifest; returns the number of lines taken over.

        Asked for by two at a mount's start: the second waits for the first, or it would bring back what was removed meanwhile.
        """
        with self._loading:
            return self._load()

    def _load(self) -> int:
        with self._lock:
            if self._state.rows("SELECT 1 FROM checksum_origin"):
                return 0  # also when it is empty: then the written one is out of date
        try:
            content = self._lower.read_own(self._names)
        except FileNotFoundError:
            content = b""
        lines = [match.groups() for line in content.split(b"\n") if (match := _LINE.fullmatch(line))]
        # Page by page, the lock free in between: nothing is committed before this has ended, and what a kill leaves of it is loaded again.
        for start in range(0, len(lines), PAGE_ROWS):
            page = [(path, digest.decode()) for digest, path in lines[start : start + PAGE_ROWS]]
            with self._lock:
                self._state.change_many("INSERT OR IGNORE INTO checksum VALUES (?, ?, -1)", page)
                self._state.commit()
        with self._lock:
            self._state.change("INSERT INTO checksum_origin VALUES (1)")
            self._state.commit()
            self._lacks_sizes = self._find_lack()
            if not self._changes:
                self._written = 0
            self.entries = self._state.rows("SELECT count(*) FROM checksum")[0][0]
        return len(lines)

    def learn_sizes(self, below: LowerPath = ()) -> None:
        """Look up sizes for rows that came from the written manifest, which has none: each once."""
        if not self._lacks_sizes:
            return
        for key, digest, size in self.rows(below):
            if size >= 0:
                continue
            with contextlib.suppress(OSError):  # gone, or not to be had now: asked again next time
                found = self._lower.lstat(tuple(key.split(b"/")))
                with self._lock:
                    known = "UPDATE checksum SET size = ? WHERE path = ? AND digest = ? AND size < 0"
                    self._state.change(known, (found.size, key, digest))
                    self._state.commit()
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
        with self._lock:
            changes = self._changes
        lines = [
            b"%s  %s\n" % (digest.encode(), path) for path, digest, _size in self.rows() if not any(mark in path for mark in _UNWRITABLE)
        ]
        if lines:
            self._lower.write_own(self._names, b"".join(lines))
        else:
            self._lower.remove_own(self._names)
        with self._lock:
            self._written = changes

    def verify(self, paths: Iterable[LowerPath] = ()) -> Iterator[Verification]:
        """Hash files on the backing directory and compare; see `Verifier.verify`."""
        return Verifier(self, self._lower, self._lock).verify(paths)
