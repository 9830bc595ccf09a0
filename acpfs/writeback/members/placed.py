"""Which pointer files this member has made on the backing directory last, and when they were
closed.

Told in its record, so that a member that withheld an older pointer of such a name, or was away with
one, learns that this one has replaced it. Owns its table in the state database, which is changed in
the transaction that takes the pointer out of the log: a worker that dies right after the commit
tells of it all the same. Used under the file system's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from acpfs.ram.state import StateDatabase

PLACED_MAX = 64
"""Names, of 40 bytes each in a record; of the one that was closed first nothing is told any
more.
"""
DDL = """
CREATE TABLE IF NOT EXISTS placed (key TEXT PRIMARY KEY, closed_at REAL NOT NULL) WITHOUT ROWID;
"""


class Placed:
    """Remembers them by the keys of their names (`scopes`)."""

    def __init__(self, state: StateDatabase) -> None:
        self._state = state
        state.create(DDL)
        self._closed_at: dict[str, float] = {
            str(key): float(closed_at)
            for key, closed_at in state.rows("SELECT key, closed_at FROM placed")
        }

    def note(self, keys: Iterable[str], closed_at: float) -> None:
        """A pointer file of these names is persisted.

        One that was closed earlier, and came later, changes nothing.
        """
        for key in keys:
            if closed_at > self._closed_at.get(key, 0.0):
                self._closed_at[key] = closed_at
                self._state.change("INSERT OR REPLACE INTO placed VALUES (?, ?)", (key, closed_at))
        while len(self._closed_at) > PLACED_MAX:
            oldest = min(self._closed_at, key=lambda key: self._closed_at[key])
            del self._closed_at[oldest]
            self._state.change("DELETE FROM placed WHERE key = ?", (oldest,))

    def learn(self, told: Mapping[str, float]) -> None:
        """What an earlier incarnation of this member has told: its state was lost with its RAM
        tier.
        """
        for key, closed_at in told.items():
            self.note((key,), closed_at)

    def told(self) -> dict[str, float]:
        """For this member's record."""
        return dict(self._closed_at)
