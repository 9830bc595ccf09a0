"""Mending: clean content that RAM still has is stored once more, where the backing directory spoiled or lost it.

Says what RAM has of a path and puts it back into the log; comparing checksums is the caller's, for that takes long. Used under the file
system's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.filesystem.changes import Changes
from acpfs.filesystem.contents import Contents
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.tier import Tier
from acpfs.types import ROOT, Seq, TierId
from acpfs.writeback.log import OperationLog


@dataclass(frozen=True, slots=True)
class Held:
    """Content of a file in RAM; `fd` reads it, the caller closes it."""

    tier_id: TierId
    size: int
    fd: int


class Mending:
    """See above."""

    def __init__(self, table: NodeTable, log: OperationLog, contents: Contents, changes: Changes, tier: Tier) -> None:
        self._table, self._log, self._contents, self._changes, self._tier = table, log, contents, changes, tier

    def held(self, path: bytes) -> Held | str:
        """What RAM has of the file that is persisted at a path, or in words why that is nothing."""
        node = self._node(path)
        if node is None or not node.is_file:
            return "the mount does not know it (any more): its copy has left RAM, or somebody removed it from the backing directory"
        if node.modified or self._log.is_pending(node.ino):
            return "it is being written or stored anew: look again when that is done"
        content = node.content
        if content is None or not content.in_ram or not content.tier_id:
            return "its copy has left RAM: restore it from another copy"
        return Held(content.tier_id, node.size, self._tier.open(content.tier_id))

    def store_again(self, path: bytes, tier_id: TierId) -> Seq | None:
        """Log the content once more; None: it is not that content any more."""
        node = self._node(path)
        if node is None or node.content is None or node.content.tier_id != tier_id or node.modified or self._log.is_pending(node.ino):
            return None
        self._contents.dirtied(node)
        op = self._changes.freeze(node)
        return None if op is None else op.seq

    def _node(self, path: bytes) -> Node | None:
        ino = ROOT
        for name in path.split(b"/"):
            node = self._table.get(ino)
            child = node.dir.children.get(name) if node is not None and node.is_dir else None
            if child is None or not child.ino:
                return None
            ino = child.ino
        return self._table.get(ino)
