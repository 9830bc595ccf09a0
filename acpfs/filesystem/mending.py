"""Mending: clean content is in RAM and on the backing directory, and the good copy takes the place
of the bad one.

What the backing directory spoiled or lost is stored once more from RAM; what RAM spoiled leaves it.
Says what RAM has; comparing checksums is the caller's, for that takes long. Used under the file
system's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.filesystem.changes import Changes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Identity, Node, NodeTable
from acpfs.ram.tier import Tier
from acpfs.types import ROOT, Ino, Seq, TierId
from acpfs.writeback.log.log import OperationLog


@dataclass(frozen=True, slots=True)
class HeldContent:
    """Content of a file in RAM; `fd` reads it, the caller closes it."""

    tier_id: TierId
    size: int
    fd: int


@dataclass(frozen=True, slots=True)
class Clean:
    """A file of which RAM has all bytes, and which is what lies on the backing directory, as long
    as this is equal.
    """

    path: bytes
    tier_id: TierId
    size: int
    identity: Identity


class Mending:
    """See above."""

    def __init__(
        self,
        table: NodeTable,
        log: OperationLog,
        contents: Contents,
        changes: Changes,
        tier: Tier,
        view: LowerView,
    ) -> None:
        self._table = table
        self._log = log
        self._contents = contents
        self._changes = changes
        self._tier = tier
        self._view = view

    def in_ram(self) -> list[tuple[Ino, int]]:
        """(file, size) of those of which RAM has all bytes."""
        return [
            (node.ino, node.size) for node in self._table.recorded() if node.body.is_whole_in_ram
        ]

    def clean(self, ino: Ino) -> Clean | None:
        """What RAM has of a file; None: it is being changed or stored, or has left."""
        node = self._table.get(ino)
        body = node.body if node is not None else None
        if (
            node is None
            or body is None
            or not body.is_whole_in_ram
            or body.busy is not None
            or self._tier.is_lost(body.tier)
        ):
            return None
        if (
            node.identity is None
            or node.is_written
            or node.open_writers
            or not node.names
            or self._log.is_active(ino)
        ):
            return None
        return Clean(self._table.path(ino), body.tier, node.size, node.identity)

    def drop(self, ino: Ino, clean: Clean) -> bool:
        """Let RAM's copy go, and what the kernel has of it; False: it is another one by now, or
        somebody has it open.
        """
        node = self._table.get(ino)
        if node is None or self.clean(ino) != clean or not self._contents.retention.may_leave(node):
            return False
        node.keep_cache = False
        self._contents.drop(node)
        if node.lookups:
            self._view.notices.changed(ino)
        return True

    def held(self, path: bytes) -> HeldContent | str:
        """What RAM has of the file that is persisted at a path, or in words why that is nothing."""
        node = self.node(path)
        if node is None or not node.is_file:
            return (
                "the mount does not know it (any more): its copy has left RAM, or somebody "
                "removed it from the backing directory"
            )
        if node.body.modified or self._log.is_active(node.ino):
            return "it is being written or stored anew: look again when that is done"
        body = node.body
        if not body.is_whole_in_ram:
            return "its copy has left RAM: restore it from another copy"
        return HeldContent(body.tier, node.size, self._tier.open(body.tier))

    def store_again(self, path: bytes, tier_id: TierId) -> Seq | None:
        """Log the content once more; None: it is not that content any more."""
        node = self.node(path)
        if (
            node is None
            or node.body.is_cold
            or node.body.tier != tier_id
            or node.body.modified
            or self._log.is_active(node.ino)
        ):
            return None
        self._contents.dirtied(node)
        op = self._changes.freeze(node)
        return None if op is None else op.seq

    def node(self, path: bytes) -> Node | None:
        """What lies at a path, as far as the mount knows it."""
        ino = ROOT
        for name in path.split(b"/"):
            node = self._table.get(ino)
            child = node.dir.children.get(name) if node is not None and node.is_dir else None
            if child is None or not child.ino:
                return None
            ino = child.ino
        return self._table.get(ino)
