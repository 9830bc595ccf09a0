"""By which path people know an operation: the mount's, and where its directory is gone from the
mount, the one that it had.

A path that is shown is a path that verbs take (`retry`, `discard`). Used under the file system's
lock.
"""

from __future__ import annotations

from acpfs.filesystem.nodes import NodeTable
from acpfs.types import NO_INO, ROOT, Ino
from acpfs.writeback.log.log import REMOVING, OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.log.ops import Op

UNKNOWN = b"?"


class OperationPaths:
    """Paths below the mount point."""

    def __init__(self, table: NodeTable, log: OperationLog, tree: LowerTree) -> None:
        self._table = table
        self._log = log
        self._tree = tree

    def named(self, op: Op) -> bytes:
        """By the name that the operation mentions; of one that mentions none, by its file's."""
        if not op.parent:
            return self._table.path(op.ino) if op.ino in self._table else UNKNOWN
        directory = self.directory(op.parent)
        return directory + b"/" + op.name if directory else op.name

    def directory(self, ino: Ino) -> bytes:
        """Where the mount has it; else where the backing directory still has it; else where the log
        says that it was removed from.
        """
        names: list[bytes] = []
        while ino != ROOT:
            node = self._table.get(ino)
            if node is not None and node.names:
                return b"/".join([self._table.path(ino), *reversed(names)])
            committed = self._tree.path(ino)
            if committed is not None:
                return b"/".join([*committed, *reversed(names)])
            removal = self._removal(ino)
            if removal is None:
                names.append(UNKNOWN)
                break
            ino, name = removal
            names.append(name)
        return b"/".join(reversed(names))

    def _removal(self, ino: Ino) -> tuple[Ino, bytes] | None:
        op = self._log.last_of(ino)
        if op is None or op.kind not in REMOVING or op.parent == NO_INO:
            return None
        return op.parent, op.name
