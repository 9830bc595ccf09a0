"""What gets a pointer's name comes with it, also where the backing directory has it already under
another one.

Members write a pointer by way of one temporary name. What was closed, or made, a while before it is
renamed, or was synced, is persisted under that by then. If the rename has to wait for other members
(`writeback.members.gate`), one of them may put its own file in that place meanwhile; then this one
would be gone, and the pointer would never come. So it is logged once more, right before the
operation that gives it the name, and waits with that (`Gate.note`). Used under the file system's
lock.
"""

from __future__ import annotations

import stat

from acpfs.config import ClusterOrder, Settings
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import Ino
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.members.peer_names import PeerNames
from acpfs.writeback.members.pointers import Pointers

COMES_ALONG_BYTES_MAX = 1 << 20
"""Pointers are small. What is larger is not stored twice."""


class PointerContent:
    """Logs it once more."""

    def __init__(
        self,
        settings: Settings,
        upper: UpperLayer,
        contents: Contents,
        changes: Changes,
        peers: PeerNames,
    ) -> None:
        """`peers`: knows whether there are other members."""
        self._pointers = Pointers(settings.pointer_patterns, changes.is_directory)
        self._waits = settings.cluster_order is ClusterOrder.POINTERS
        self._log = upper.log
        self._tier = upper.tier
        self._contents = contents
        self._changes = changes
        self._peers = peers

    def bring(self, node: Node, parent: Ino, name: bytes, new_name: bytes) -> None:
        """A node is about to get a pointer's name, beside or instead of the one that it has in a
        directory.

        Not where it has a pointer's name already: then it has waited itself. And not what this
        member has no bytes of.
        """
        if not (self._waits and self._peers.anybody) or node.unlogged:
            return
        if not self._pointers.is_ones_name(new_name) or self._pointers.is_ones_name(name):
            return
        if any(_comes_by_itself(op) for op in self._log.pending_of(node.ino)):
            return
        if node.is_file:
            self._store(node)
        elif stat.S_ISLNK(node.mode) and node.target:
            self._changes.record(
                OpKind.SYMLINK,
                node,
                parent,
                name,
                meta=self._changes.metadata(node, everything=True),
                payload=node.target,
            )

    def _store(self, node: Node) -> None:
        body = node.body
        if node.size > COMES_ALONG_BYTES_MAX or not body.is_whole_in_ram:
            return
        if body.busy is not None or body.failed or self._tier.is_lost(body.tier):
            return
        if body.is_clean:
            self._contents.dirtied(node)
            self._changes.freeze(node, quiet=True)


def _comes_by_itself(op: Op) -> bool:
    """Whether it is not handed to the backing directory yet: it waits with the pointer anyway."""
    return op.kind in (OpKind.STORE, OpKind.SYMLINK) and not (op.begun or op.started)
