"""Whose memory control group pays for pages in RAM, and that it gets them back.

A page of the RAM tier is charged to whoever writes it first, and stays charged after the close: as
long as it is dirty, and then as long as it is retained. In the daemon's lane that is the daemon. In
the passthrough lane it is the writer; its groups may be limited to what the writer itself will
need, and then the kernel kills it for pages that it does not know of. So a foreign group, whose
limit does not hold for the daemon too, pays only where much room is left beside the file; which
files it paid for is kept in the state database, and when its room becomes small, clean ones of them
leave RAM. Used under the file system's lock; nothing here waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from acpfs.filesystem.content.retention import Retention
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.control_groups import LimitedGroup, limit_of, limits_of_caller, own_limits
from acpfs.ram.state import StateDatabase
from acpfs.types import Ino, TierId

ROOMY = 2
"""A foreign group pays where a half of its limit is left: its processes may still double what they
use.
"""
PRESSED = 4
"""It gets pages back when less than a quarter is left: enough for a second of growth, after which
it is looked at again.
"""
DDL = (
    "CREATE TABLE IF NOT EXISTS payer (tier_id INTEGER PRIMARY KEY, ino INTEGER NOT NULL, groups "
    "BLOB NOT NULL);"
)

Limits = Callable[[int], "list[LimitedGroup] | None"]


class Payers:
    """Foreign groups, and what they paid for."""

    def __init__(
        self,
        state: StateDatabase,
        table: NodeTable,
        retention: Retention,
        limits: Limits = limits_of_caller,
    ) -> None:
        """Load what earlier workers noted. `limits`: around a caller, by pid; None: not known."""
        state.create(DDL)
        self._state = state
        self._table = table
        self._retention = retention
        self._limits = limits
        self._paid: dict[TierId, tuple[Ino, frozenset[bytes]]] = {
            TierId(tier_id): (Ino(ino), frozenset(groups.split(b"\0")))
            for tier_id, ino, groups in state.rows("SELECT tier_id, ino, groups FROM payer")
        }
        """Tier file → its node, and the groups."""
        self.pays_as_we_do = False
        """Of the writer that was asked about last: whether its pages are charged to the same
        limited groups as those of the daemon.
        """

    def refuse(
        self, node: Node, pid: int, wanted_bytes: int, outstanding: Callable[[Node], int]
    ) -> str:
        """Why the groups around a writer cannot pay for its file; "": they do, from now on.

        `outstanding`: what the writers of a file that is paid for already are still to write.
        """
        limits = self._limits(pid)
        if limits is None:
            return "the writer's memory control group is not known"
        own = {group.directory for group in own_limits()}
        self.pays_as_we_do = own == {group.directory for group in limits}
        foreign = [group for group in limits if group.directory not in own]
        if any(wanted_bytes > group.room_bytes() for group in limits if group.directory in own):
            return "the writer's memory control group has no room for it"
        for group in foreign:
            promised = sum(
                outstanding(other)
                for other in self._nodes_of(os.fsencode(group.directory))
                if other is not node and other.kernel_writers
            )
            if group.room_bytes() - promised - wanted_bytes < group.limit_bytes // ROOMY:
                return "the writer's memory control group has no room for it"
        if foreign and not node.body.is_cold:
            self._note(
                node.body.tier,
                node.ino,
                frozenset(os.fsencode(group.directory) for group in foreign),
            )
        return ""

    def look(self) -> None:
        """Every second: let clean files of groups that are short of room leave."""
        if not self._paid:
            return
        for tier_id in [
            tier_id
            for tier_id, (ino, _groups) in self._paid.items()
            if not self._is_there(tier_id, ino)
        ]:
            del self._paid[tier_id]
            self._state.change("DELETE FROM payer WHERE tier_id = ?", (tier_id,))
        for directory in {group for _ino, groups in self._paid.values() for group in groups}:
            group = limit_of(Path(os.fsdecode(directory)))
            missing = 0 if group is None else group.limit_bytes // PRESSED - group.room_bytes()
            if missing > 0:
                self._retention.let_these_leave(
                    {node.ino for node in self._nodes_of(directory)}, missing
                )

    def _note(self, tier_id: TierId, ino: Ino, groups: frozenset[bytes]) -> None:
        known = self._paid.get(tier_id, (ino, frozenset()))[1]
        if not groups <= known:
            self._paid[tier_id] = (ino, known | groups)
            self._state.change(
                "INSERT OR REPLACE INTO payer VALUES (?, ?, ?)",
                (tier_id, ino, b"\0".join(sorted(known | groups))),
            )

    def _nodes_of(self, group: bytes) -> Iterable[Node]:
        return [
            self._table[ino]
            for tier_id, (ino, groups) in self._paid.items()
            if group in groups and self._is_there(tier_id, ino)
        ]

    def _is_there(self, tier_id: TierId, ino: Ino) -> bool:
        """Whether the file still has those pages; True, too, where it was cut to nothing and the
        daemon wrote anew: no loss when clean.
        """
        node = self._table.get(ino)
        return node is not None and node.body.tier == tier_id
