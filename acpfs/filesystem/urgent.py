"""Urgent files: those at and below paths that a client has declared urgent, for whom the last part
of the budget is kept.

A declaration is on a path, not on a file: what comes to lie at or below it is urgent too, and what
is moved away is not any more. Declarations are in the state database, so that they outlive workers;
their ends are told by a clock that no step of the wall clock moves, and that a new boot begins
anew. Used under the file system's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.errors import RefusedError
from acpfs.filesystem.eviction import below
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.node_clock import boot_id
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.runtime.clock import Clock
from acpfs.types import Ino

URGENT_PATHS_MAX = 16
URGENT_S_MAX = 3600.0
"""A declaration that somebody forgets must not keep the reserve from others for long."""

DDL = (
    "CREATE TABLE IF NOT EXISTS urgent (path BLOB PRIMARY KEY, until REAL NOT NULL, "
    "boot TEXT NOT NULL, uid INTEGER NOT NULL) WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class Urgency:
    """One declaration."""

    path: bytes
    until: float
    """By the clock of `UrgentFiles`."""
    uid: int
    """Who declared it."""


class UrgentFiles:
    """Who may take from the reserve."""

    def __init__(
        self,
        state: StateDatabase,
        table: NodeTable,
        tier: Tier,
        reserve: int | str,
        clock: Clock,
    ) -> None:
        """Load what earlier workers of this boot were told, and keep that part of the tier's
        budget.
        """
        self._state = state
        self._table = table
        self._tier = tier
        self._clock = clock.since_boot
        self._boot = boot_id()
        state.create(DDL)
        rows = state.rows("SELECT path, until, uid FROM urgent WHERE boot = ?", (self._boot,))
        self._declared = {
            bytes(path): Urgency(bytes(path), until, uid) for path, until, uid in rows
        }
        tier.keep_for_urgent(reserve)

    def declare(self, path: bytes, seconds: float, uid: int) -> bool:
        """From now on, for so long; a path that is urgent already gets a new end. True.

        Raises:
            RefusedError: for too long, or too many paths are.
        """
        if not 0 < seconds <= URGENT_S_MAX:
            raise RefusedError(f"a path can be urgent for at most {URGENT_S_MAX:g} seconds")
        self.look()
        if path not in self._declared and len(self._declared) >= URGENT_PATHS_MAX:
            raise RefusedError(
                f"{URGENT_PATHS_MAX} paths are urgent already: end one with --off, or declare "
                "one that lies above"
            )
        declared = Urgency(path, self._clock() + seconds, uid)
        self._declared[path] = declared
        self._state.change(
            "INSERT OR REPLACE INTO urgent VALUES (?, ?, ?, ?)",
            (path, declared.until, self._boot, uid),
        )
        self._tier.tell_urgent(self._is_urgent)
        return True

    def withdraw(self, path: bytes) -> bool:
        """It is not urgent any more; False: exactly this path was not."""
        self.look()
        if self._declared.pop(path, None) is None:
            return False
        self._state.change("DELETE FROM urgent WHERE path = ?", (path,))
        self._tier.tell_urgent(self._is_urgent)
        return True

    def declared(self) -> list[tuple[Urgency, float]]:
        """All that holds now, in order of path, each with the seconds that are left."""
        now = self._clock()
        return [
            (one, one.until - now)
            for _path, one in sorted(self._declared.items())
            if one.until > now
        ]

    def look(self) -> None:
        """End what is over, and serve who waits by what is urgent now: files may have been moved in
        or out.
        """
        if not self._declared:
            return
        now = self._clock()
        for one in [one for one in self._declared.values() if one.until <= now]:
            del self._declared[one.path]
            self._state.change("DELETE FROM urgent WHERE path = ?", (one.path,))
        self._tier.tell_urgent(self._is_urgent)

    def covers(self, node: Node) -> bool:
        """Whether a file may take from the reserve now.

        Cheap as long as nothing is urgent: it is asked for each write.
        """
        if not self._declared or not node.names:
            return False
        path = self._table.path(node.ino)
        now = self._clock()
        return any(below(path, one.path) for one in self._declared.values() if one.until > now)

    def _is_urgent(self, ino: Ino) -> bool:
        node = self._table.get(ino)
        return node is not None and self.covers(node)
