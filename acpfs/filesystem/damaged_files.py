"""Files of the backing directory that were read back and are not what was stored there, until they
are whole again.

By path below the mount point: most of them have left the upper tree long ago. Rows are in the state
database and so outlive workers. Owns no comparison; must not know how a file was read. Used under
the file system's lock.
"""

from __future__ import annotations

from acpfs.ram.state import StateDatabase
from acpfs.runtime.clock import Clock

DDL = "CREATE TABLE IF NOT EXISTS damaged_file (path BLOB PRIMARY KEY, found_at REAL) WITHOUT ROWID"
FILES_MAX = 4096
"""A storage that damages more files than this needs no list of them; the oldest ones are
forgotten.
"""


class DamagedFiles:
    """Paths, oldest finding first."""

    def __init__(self, state: StateDatabase, clock: Clock) -> None:
        """Load what the last worker left."""
        self._wall = clock.wall
        self._state = state
        state.create(DDL)
        rows = state.rows("SELECT path FROM damaged_file ORDER BY found_at")
        self._paths: dict[bytes, None] = {bytes(path): None for (path,) in rows}

    def __contains__(self, path: bytes) -> bool:
        return path in self._paths

    def found(self, path: bytes) -> None:
        """It was read back, and differs, is missing, or cannot be read."""
        if path in self._paths:
            return
        self._paths[path] = None
        row = (path, self._wall())
        self._state.change("INSERT OR REPLACE INTO damaged_file VALUES (?, ?)", row)
        if len(self._paths) > FILES_MAX:
            self.whole(next(iter(self._paths)))

    def whole(self, path: bytes) -> None:
        """It was read back and is as it was stored, or it was stored anew."""
        if path in self._paths:
            del self._paths[path]
            self._state.change("DELETE FROM damaged_file WHERE path = ?", (path,))

    def replaced(self, path: bytes) -> None:
        """Something else has come to this path, a file or a directory with all below it."""
        if self._paths:
            below = path + b"/"
            for other in [p for p in self._paths if p == path or p.startswith(below)]:
                self.whole(other)
