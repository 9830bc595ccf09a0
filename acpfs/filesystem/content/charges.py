"""Whose share of RAM which bytes are in (`ram_per_user`): found out from inodes and versions
whenever somebody asks for it, and remembered nowhere.

A file's owner pays for its tier files that have what the backing directory has not got: those that
versions need, and that of a content that is changed, or that the kernel may be changing. What the
backing directory has as well is nobody's, and leaves RAM first. So a chown moves what the file is
charged, and the next worker finds the same charges as the last. Used under the file system's lock.
"""

from __future__ import annotations

from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.nodes import NodeTable
from acpfs.ram.tier import Tier
from acpfs.ram.waiting import NO_OWNER
from acpfs.types import Ino, TierId


class Charges:
    """Looks again at files that have changed since somebody asked last."""

    def __init__(self, tier: Tier, table: NodeTable, versions: Versions, wanted: int | str) -> None:
        """`wanted`: the share of each user, bytes or percent of the budget; 0: no limit."""
        self._tier = tier
        self._shares = tier.shares
        self._table = table
        self._versions = versions
        self._stale: set[Ino] = set()
        """Files to be looked at again."""
        self._shares.asks(self._refresh)
        self.change(wanted)

    def change(self, wanted: int | str) -> None:
        """Another share from now on: who has more waits until he has less."""
        shares = self._shares
        was_limited = shares.limit_bytes > 0
        shares.change(wanted, self._tier.budget_bytes)
        if not shares.limit_bytes:
            shares.clear()
            self._stale.clear()
            self._table.tells_to(None)
            self._versions.tells_to(None)
        elif not was_limited:
            self._stale.update(node.ino for node in self._table if node.body.tier)
            self._stale.update(ino for _tier_id, ino in self._versions.files())
            self._table.tells_to(self._stale)
            self._versions.tells_to(self._stale)

    def _refresh(self) -> None:
        while self._stale:
            self._look(self._stale.pop())

    def _look(self, ino: Ino) -> None:
        tier_files: dict[TierId, int] = {}
        for version in self._versions.of(ino):
            tier_files[version.tier_id] = 0
        node = self._table.get(ino)
        if node is not None and node.body.tier and node.is_written:
            tier_files[node.body.tier] = 0
        for tier_id in tier_files:
            tier_files[tier_id] = self._tier.allocated_bytes(tier_id)
        uid = self._shares.owner(ino) if node is None else node.uid
        self._shares.charge(ino, uid, tier_files if uid != NO_OWNER else {})
