"""Files that the upper layer knows, with where their bytes are and whether they are persisted under
the name that they have now.

Found by walking the upper tree from a directory on, so that asking about one checkpoint does not
cost a walk over all. Reads only; used under the file system's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.tier import Tier
from acpfs.types import ROOT, Seq
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import OpKind

_NAMING = (OpKind.MKDIR, OpKind.RENAME, OpKind.EXCHANGE)


@dataclass(frozen=True, slots=True)
class KnownFile:
    """One name of a regular file; sizes in bytes."""

    path: bytes
    size: int
    ram_bytes: int
    """How much of it can be read from RAM."""
    spilled_bytes: int
    """How much of it can be read from the spill directory."""
    is_writing: bool
    """Changed since it was last closed, or never closed, and its writer is there."""
    is_half: bool
    """Its writer was lost, or a write failed."""
    is_persisted: bool
    """Content and name, as they are now."""
    logged_until: Seq | None = None
    """Number of the last operation about it; None: not all that it is was logged."""


class KnownFiles:
    """See above."""

    def __init__(self, table: NodeTable, log: OperationLog, tier: Tier) -> None:
        self._table = table
        self._log = log
        self._tier = tier

    def below(self, path: bytes) -> Iterator[KnownFile]:
        """Files at and below a path."""
        node = self._table[ROOT]
        moving = False
        for name in path.split(b"/") if path else []:
            child = node.dir.children.get(name) if node.is_dir else None
            if child is None or not child.ino:
                return
            node = self._table[child.ino]
            moving = moving or self._is_moving(node)
        yield from self._walk(node, path, moving)

    def _walk(self, node: Node, path: bytes, moving: bool) -> Iterator[KnownFile]:
        waiting = [(node, path, moving)]
        while waiting:
            node, path, moving = waiting.pop()
            if node.is_file:
                yield self._file(node, path, moving)
            elif node.is_dir:
                for name, child in node.dir.children.items():
                    if child.ino:
                        below = self._table[child.ino]
                        waiting.append(
                            (
                                below,
                                path + b"/" + name if path else name,
                                moving or self._is_moving(below),
                            )
                        )

    def _is_moving(self, node: Node) -> bool:
        """Whether a directory is not under this name on the backing directory yet."""
        if not node.is_dir:
            return False
        return self._log.is_victim(node.ino) or any(
            op.kind in _NAMING for op in self._log.pending_of(node.ino)
        )

    def _file(self, node: Node, path: bytes, moving: bool) -> KnownFile:
        body = node.body
        taken = body.head_bytes
        spilled = node.size if body.is_spilled else 0
        if body.is_whole_in_ram:
            taken = min(node.size, self._tier.allocated_bytes(body.tier)) if node.size else 0
        pending = self._log.is_active(node.ino) or self._log.is_victim(
            node.ino
        )  # an exchange gives both their names
        is_persisted = not (node.body.modified or moving or node.unlogged or pending)
        is_half = node.body.interrupted or bool(
            node.body.modified and body.failed and not node.handles
        )
        is_writing = node.body.modified and not is_half
        last = self._log.last_of(node.ino)
        is_logged = last is not None and not (node.body.modified or moving or node.unlogged)
        return KnownFile(
            path,
            node.size,
            taken,
            spilled,
            is_writing,
            is_half,
            is_persisted,
            last.seq if last is not None and is_logged else None,
        )

    def is_gone(self, path: bytes) -> bool:
        """Whether the mount shows that nothing lies at a path, whatever the backing directory still
        has there.
        """
        node = self._table[ROOT]
        for name in path.split(b"/"):
            child = node.dir.children.get(name) if node.is_dir else None
            if child is None:
                return not node.is_dir
            if not child.ino:
                return True
            node = self._table[child.ino]
        return False
