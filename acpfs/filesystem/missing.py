"""Tier files that the state names and that are gone: somebody removed them from the RAM tier.

Nothing of acpfs removes a tier file before no state names it. So bytes are lost, and the others
must not be: what is clean is read from the backing directory again, what is not fails with EIO for
whoever reads it, is never stored, and is named. Looks once, at the start.
"""

from __future__ import annotations

import errno

from acpfs.filesystem.content.body import COLD
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.logger import get_logger, shown
from acpfs.ram.tier import Tier
from acpfs.types import NO_TIER, TierId
from acpfs.writeback.log.log import OperationLog

NAMED_MAX = 10

_log = get_logger(__name__)


class Missing:
    """What is lost."""

    def __init__(self, table: NodeTable, log: OperationLog, tier: Tier) -> None:
        """Before anything else uses what an earlier worker left."""
        self._table = table
        self._tier = tier
        self._there = set(tier.ids())
        self._paths: dict[bytes, None] = {}
        for op in log:
            if op.version is not None and self._is_gone(op.version.tier_id):
                self._lose(op.version.tier_id, table.path(op.ino))
        clean = 0
        for node in table:
            if self._is_gone(node.body.tier):
                clean += self._judge(node)
        if clean:
            _log.warning(
                "files in the RAM tier are gone that the backing directory has: they are read "
                "from there",
                files=clean,
            )

    def _is_gone(self, tier_id: TierId) -> bool:
        return tier_id != NO_TIER and tier_id not in self._there

    def _judge(self, node: Node) -> bool:
        """Whether nothing is lost with a node's content."""
        body = node.body
        if not (body.modified or body.is_outgrown or self._tier.is_lost(body.tier)):
            node.body = COLD
            self._table.changed(node)
            return True
        self._lose(body.tier, self._table.path(node.ino))
        if body.modified:
            body.failed = errno.EIO
            body.failed_at = 0
            self._table.changed(node)
        return False

    def _lose(self, tier_id: TierId, path: bytes) -> None:
        self._tier.lose(tier_id)
        if path not in self._paths:
            self._paths[path] = None
            _log.error("the RAM tier has lost a file that is not persisted", path=shown(path))

    def warnings(self) -> list[str]:
        """For `status`, while it lasts."""
        if not self._paths:
            return []
        named = ", ".join(map(shown, list(self._paths)[:NAMED_MAX]))
        more = f" and {len(self._paths) - NAMED_MAX} more" if len(self._paths) > NAMED_MAX else ""
        told = (
            "somebody removed files in the RAM tier: lost before they were persisted are "
            f"{named}{more}"
        )
        return [f"{told}; write them anew, or give them up with acpfs-ctl discard"]
