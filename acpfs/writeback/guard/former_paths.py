"""By which path a node was known when it still counted as a checkpoint (or as what checkpoints lie
in).

A checkpoint that is renamed to something else (out of the way, before it is deleted) or moved aside
by the guard stays that checkpoint. Remembered by node number in the state database. Used under the
file system's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.backing.lower import LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.types import NO_INO, ROOT, Ino
from acpfs.writeback.log.lower_tree import LowerTree

DDL = "CREATE TABLE IF NOT EXISTS former_path (ino INTEGER PRIMARY KEY, path BLOB NOT NULL)"


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a name lies, and where it would lie had nothing been moved."""

    now: LowerPath
    former: LowerPath
    moved: Ino
    """The node above (or itself) that was moved; 0: none."""


class FormerPaths:
    """Nodes that were moved, and from where."""

    def __init__(self, tree: LowerTree, state: StateDatabase) -> None:
        """Take up what an earlier worker knew."""
        self._tree = tree
        self._state = state
        state.create(DDL)
        self._paths: dict[Ino, LowerPath] = {
            Ino(ino): tuple(path.split(b"/"))
            for ino, path in state.rows("SELECT ino, path FROM former_path")
        }

    def remember(self, ino: Ino, path: LowerPath) -> None:
        """The node was known by that path."""
        self._paths[ino] = path
        self._state.change(
            "INSERT OR REPLACE INTO former_path VALUES (?, ?)", (ino, b"/".join(path))
        )

    def forget(self, ino: Ino) -> None:
        """It is gone, or is known by the path that it has."""
        if self._paths.pop(ino, None) is not None:
            self._state.change("DELETE FROM former_path WHERE ino = ?", (ino,))

    def trace(self, parent: Ino, name: bytes, ino: Ino = NO_INO) -> Trace | None:
        """Of a name, and of the node under it; None when its directory is not on the backing
        directory.
        """
        now = self._tree.path_at(parent, name)
        if now is None:
            return None
        # how many components of `now` lead to `above`
        above = ino
        below = len(now)
        while self._paths and above != ROOT:
            former = self._paths.get(above)
            if former is not None:
                return Trace(now, (*former, *now[below:]), above)
            above = parent if below == len(now) else self._tree.places(above)[0][0]
            below -= 1
        return Trace(now, now, NO_INO)
