"""Listings of known directories in the state database: the next worker goes on with them where the
backing directory does not answer.

Of a directory: which names it has. Those with a row of their own (`nodes`) say more, and count
instead. A listing is one value, and what has changed since are rows beside it: a takeover reads a
hundred values, and takes apart only those that somebody asks for. Bounded in bytes, because state
storage is: the directories that were listed longest ago go first, and a very large one is not kept.
Used under the file system's lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping

from acpfs.backing.lower import LowerEntry
from acpfs.filesystem.known_names import Unread
from acpfs.ram.state import StateDatabase
from acpfs.types import Ino

BYTES_MAX = 2 << 20
"""Of all: an eighth of the reserve of state storage."""
DIRECTORY_BYTES_MAX = 256 << 10
"""Of one: 7,000 names of 24 bytes."""
NAME_BYTES = 13
"""Of each name in a listing, besides itself: its inode, its type, and what parts it from the next
one.
"""
ROW_BYTES = 40
"""Of each row, besides names."""
CHANGED_PART = 8
"""A new listing of which less than one in so many names is new or gone becomes changes of the last
one.
"""

DDL = """
CREATE TABLE IF NOT EXISTS listing (ino INTEGER PRIMARY KEY, entries BLOB);
CREATE TABLE IF NOT EXISTS listing_change (
  parent INTEGER, name BLOB, ino INTEGER, mode INTEGER,
  PRIMARY KEY (parent, name)) WITHOUT ROWID;
"""
GONE = -1
"""In place of a mode: the name is not there any more."""

Listing = dict[bytes, LowerEntry]


class _Kept:
    """What is kept of one directory."""

    def __init__(self, entries: bytes, changes: Collection[LowerEntry] = ()) -> None:
        """`entries`: of a listing, packed; `changes`: since then."""
        self._entries = entries
        self._changes = changes
        self._names: set[bytes] | None = None
        self.changed = {change.name for change in changes}
        """Names that have a row."""
        self.bytes = ROW_BYTES + len(entries) + sum(map(_row_bytes, self.changed))

    def read(self) -> Listing:
        """The listing with its changes, as they were when this was made."""
        listing = _unpack(self._entries)
        for change in self._changes:
            if change.mode == GONE:
                listing.pop(change.name, None)
            else:
                listing[change.name] = change
        return listing

    @property
    def names(self) -> set[bytes]:
        """All that it has now."""
        if self._names is None:
            self._names = set(self.read())
        return self._names

    def change(self, name: bytes, *, there: bool) -> int:
        """A name has come or gone; how many more bytes that takes."""
        if there:
            self.names.add(name)
        else:
            self.names.discard(name)
        if name in self.changed:
            return 0
        self.changed.add(name)
        more = _row_bytes(name)
        self.bytes += more
        return more


class KeptListings:
    """See above."""

    def __init__(self, state: StateDatabase) -> None:
        self._state = state
        state.create(DDL)
        self._kept: dict[Ino, _Kept] = {}
        """In the order in which they were listed."""
        self._bytes = 0

    def load(self) -> Mapping[Ino, Unread]:
        """What the last worker left, by directory."""
        changes: dict[int, list[LowerEntry]] = {}
        for parent, name, ino, mode in self._state.rows(
            "SELECT parent, name, ino, mode FROM listing_change"
        ):
            changes.setdefault(parent, []).append(LowerEntry(name, int(ino), mode))
        for number, entries in self._state.rows("SELECT ino, entries FROM listing"):
            self._have(Ino(number), _Kept(entries, changes.get(number, ())))
        return dict(self._kept)

    def keep(
        self, directory: Ino, names: Collection[bytes], entry: Callable[[bytes], LowerEntry | None]
    ) -> None:
        """It has these names, but those of which there is no entry.

        Costs little for a directory with too many.
        """
        if len(names) * NAME_BYTES > DIRECTORY_BYTES_MAX:
            return self.drop(directory)
        listing = {name: found for name in names if (found := entry(name)) is not None}
        if len(listing) * NAME_BYTES + sum(map(len, listing)) > DIRECTORY_BYTES_MAX:
            return self.drop(directory)
        kept = self._kept.get(directory)
        different = listing.keys() ^ kept.names if kept is not None else set()
        if kept is None or len(different) * CHANGED_PART > len(listing):
            self.drop(directory)
            entries = _pack(listing)
            self._state.change("INSERT INTO listing VALUES (?, ?)", (directory, entries))
            self._have(directory, _Kept(entries))
        else:
            self._kept[directory] = self._kept.pop(directory)
            for name in sorted(different):
                self.name(directory, name, listing.get(name))
        while self._bytes > BYTES_MAX:
            self.drop(next(iter(self._kept)))
        return None

    def name(self, directory: Ino, name: bytes, entry: LowerEntry | None) -> None:
        """A name of a kept directory is there, or is not."""
        kept = self._kept.get(directory)
        if kept is None or (name in kept.names) == (entry is not None):
            return
        ino, mode = (entry.ino, entry.mode) if entry is not None else (0, GONE)
        self._state.change(
            "INSERT OR REPLACE INTO listing_change VALUES (?, ?, ?, ?)",
            (directory, name, ino, mode),
        )
        self._bytes += kept.change(name, there=entry is not None)
        if self._bytes > BYTES_MAX:
            self.drop(next(iter(self._kept)))

    def agrees(self, directory: Ino, name: bytes) -> bool:
        """Whether there is nothing to keep of a name that is there."""
        kept = self._kept.get(directory)
        return kept is None or name in kept.names

    def drop(self, directory: Ino) -> None:
        """Nothing is kept of it any more."""
        kept = self._kept.pop(directory, None)
        if kept is None:
            return
        self._bytes -= kept.bytes
        self._state.change("DELETE FROM listing WHERE ino = ?", (directory,))
        if kept.changed:
            self._state.change("DELETE FROM listing_change WHERE parent = ?", (directory,))

    def _have(self, directory: Ino, kept: _Kept) -> None:
        self._kept[directory] = kept
        self._bytes += kept.bytes


def _row_bytes(name: bytes) -> int:
    return len(name) + ROW_BYTES


def _pack(listing: Listing) -> bytes:
    """Numbers of inodes, types, names: each run is taken apart by one call."""
    numbers = array("q", [len(listing), *(entry.ino for entry in listing.values())])
    types = array("I", [entry.mode for entry in listing.values()])
    return b"".join((numbers.tobytes(), types.tobytes(), b"\0".join(listing)))


def _unpack(entries: bytes) -> Listing:
    (count,) = array("q", entries[:8])
    numbers = array("q")
    types = array("I")
    names_at = 8 + count * (numbers.itemsize + types.itemsize)
    numbers.frombytes(entries[8 : 8 + count * numbers.itemsize])
    types.frombytes(entries[8 + count * numbers.itemsize : names_at])
    names = entries[names_at:].split(b"\0") if count else []
    return dict(zip(names, map(LowerEntry, names, numbers, types), strict=True))
