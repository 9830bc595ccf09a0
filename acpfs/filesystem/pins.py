"""Pins: paths whose files stay in RAM, whatever the policy says.

A pin is on a path, not on a file: what comes to lie at or below it is pinned too, and what is moved
away is not any more. Kept in the state database, so that pins outlive workers and mounts, like the
bytes that they keep. Used under the file system's lock.
"""

from __future__ import annotations

from acpfs.ram.state import StateDatabase
from acpfs.runtime.clock import Clock

DDL = "CREATE TABLE IF NOT EXISTS pin (path BLOB PRIMARY KEY, since REAL NOT NULL) WITHOUT ROWID;"


class Pins:
    """Pinned paths, relative to the mount point; b"" is the whole mount."""

    def __init__(self, state: StateDatabase, clock: Clock) -> None:
        """Load what the last worker left."""
        self._state = state
        self._wall = clock.wall
        state.create(DDL)
        self._since: dict[bytes, float] = {
            bytes(path): since for path, since in state.rows("SELECT path, since FROM pin")
        }

    @property
    def paths(self) -> list[bytes]:
        """All pins, in order of path."""
        return sorted(self._since)

    def add(self, path: bytes) -> None:
        """Pin a path; one that is pinned stays so."""
        if path not in self._since:
            self._since[path] = self._wall()
            self._state.change(
                "INSERT OR REPLACE INTO pin VALUES (?, ?)", (path, self._since[path])
            )

    def remove(self, path: bytes) -> bool:
        """Take the pin off exactly this path; False when there is none."""
        if self._since.pop(path, None) is None:
            return False
        self._state.change("DELETE FROM pin WHERE path = ?", (path,))
        return True

    def covering(self, path: bytes) -> bytes | None:
        """The pin that a path lies at or below, the innermost of several; None for none."""
        while self._since:
            if path in self._since:
                return path
            if not path:
                return None
            path = path.rpartition(b"/")[0]
        return None
