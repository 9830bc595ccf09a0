"""Listings of known directories in the state database: the next worker goes on with them where the backing directory does not answer.

Of a directory: which names it has. Those with a row of their own (`nodes`) say more, and count instead. Bounded in bytes, because state
storage is: the directories that were listed longest ago go first, and a very large one is not kept. Used under the file system's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from acpfs.backing.lower import LowerEntry
from acpfs.ram.state import StateDatabase
from acpfs.types import Ino

BYTES_MAX = 2 << 20
"""Of all: an eighth of the reserve of state storage."""
DIRECTORY_BYTES_MAX = 256 << 10
"""Of one: some 5,000 names."""
ROW_BYTES = 40
"""Of each name, besides itself."""

DDL = """
CREATE TABLE IF NOT EXISTS listed_directory (ino INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS listed (parent INTEGER, name BLOB, ino INTEGER, mode INTEGER, PRIMARY KEY (parent, name)) WITHOUT ROWID;
"""
_INSERT = "INSERT OR REPLACE INTO listed VALUES (?, ?, ?, ?)"


class KeptListings:
    """See above."""

    def __init__(self, state: StateDatabase) -> None:
        self._state = state
        state.create(DDL)
        self._names: dict[Ino, set[bytes]] = {}
        """By directory, in the order in which they were listed."""
        self._bytes = 0

    def load(self) -> dict[Ino, dict[bytes, LowerEntry]]:
        """What the last worker left."""
        found: dict[Ino, dict[bytes, LowerEntry]] = {}
        for (number,) in self._state.rows("SELECT ino FROM listed_directory"):
            rows = self._state.rows("SELECT name, ino, mode FROM listed WHERE parent = ?", (number,))
            directory, listing = Ino(number), {row[0]: LowerEntry(*row) for row in rows}
            self._names[directory] = set(listing)
            self._bytes += _all_bytes(listing)
            found[directory] = listing
        return found

    def keep(self, directory: Ino, names: Collection[bytes], entry: Callable[[bytes], LowerEntry | None]) -> None:
        """It has these names, but those of which there is no entry. Costs little for a directory with too many."""
        if len(names) * ROW_BYTES > DIRECTORY_BYTES_MAX:
            return self.drop(directory)
        listing = {name: found for name in names if (found := entry(name)) is not None}
        if _all_bytes(listing) > DIRECTORY_BYTES_MAX:
            return self.drop(directory)
        if directory not in self._names:
            self._state.change("INSERT OR REPLACE INTO listed_directory VALUES (?)", (directory,))
            self._bytes += ROW_BYTES
        self._names[directory] = self._names.pop(directory, set())
        names = self._names[directory]
        for name in names - listing.keys():
            self.name(directory, name, None)
        new = listing.keys() - names
        if new:  # one call for all: a first listing has many
            self._state.change_many(_INSERT, [(directory, *listing[name]) for name in sorted(new)])
            self._bytes += sum(map(_bytes, new))
            names |= new
        while self._bytes > BYTES_MAX:
            self.drop(next(iter(self._names)))
        return None

    def name(self, directory: Ino, name: bytes, entry: LowerEntry | None) -> None:
        """A name of a kept directory is there, or is not."""
        names = self._names.get(directory)
        if names is None or (name in names) == (entry is not None):
            return
        if entry is None:
            names.remove(name)
            self._bytes -= _bytes(name)
            self._state.change("DELETE FROM listed WHERE parent = ? AND name = ?", (directory, name))
            return
        names.add(name)
        self._bytes += _bytes(name)
        self._state.change(_INSERT, (directory, name, entry.ino, entry.mode))
        if self._bytes > BYTES_MAX:
            self.drop(next(iter(self._names)))

    def agrees(self, directory: Ino, name: bytes) -> bool:
        """Whether there is nothing to keep of a name that is there."""
        names = self._names.get(directory)
        return names is None or name in names

    def drop(self, directory: Ino) -> None:
        """Nothing is kept of it any more."""
        names = self._names.pop(directory, None)
        if names is not None:
            self._bytes -= _all_bytes(names)
            self._state.change("DELETE FROM listed_directory WHERE ino = ?", (directory,))
            self._state.change("DELETE FROM listed WHERE parent = ?", (directory,))


def _bytes(name: bytes) -> int:
    return len(name) + ROW_BYTES


def _all_bytes(names: Collection[bytes]) -> int:
    """Of a directory, and its names."""
    return ROW_BYTES + sum(map(len, names)) + ROW_BYTES * len(names)
