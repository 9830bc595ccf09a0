"""Tier files that processes of an earlier kernel session can still write, which nobody tells of.

In passthrough the kernel writes a tier file for whoever has the mount's file open or mapped, with
no daemon, and goes on when that one and its session are gone (all of acpfs was killed, the session
was aborted). What is written then belongs to no mount any more: its fsync and close fail. So the
next mount gives its content and versions a tier file of their own, a copy of what is there as it
starts; what is written meanwhile may be in it in parts. Where RAM has no room for that, the file is
kept back as it is: it takes no change, and nothing of it is stored, until there is room or nobody
can write it any more.

Owns which tier files these are. Used under the file system's lock between waits; nothing here
asks the backing directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from functools import partial

from acpfs.backing.calls import CallPool
from acpfs.filesystem.content.body import Body
from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.steps import outlast, shared, wait
from acpfs.logger import get_logger
from acpfs.ram.tier import Tier
from acpfs.types import Ino, TierId

log = get_logger(__name__)


class EarlierWriters:
    """Takes from them what files and versions need."""

    def __init__(
        self,
        tier: Tier,
        table: NodeTable,
        versions: Versions,
        copies: CallPool,
        has_writers: Callable[[TierId, Body], bool],
        go_back: Callable[[Node], object],
        move: Callable[[Node, TierId], None],
        ended: Callable[[Node], None],
    ) -> None:
        """`has_writers`: whether somebody else can write to a tier file that a body may have.

        `go_back`: has a node without changes read what its last version or the backing directory
        has. `move`: a node's bytes are in another tier file. `ended`: nobody writes it unseen.
        """
        self._tier = tier
        self._table = table
        self._versions = versions
        self._copies = copies
        self._has_writers = has_writers
        self._go_back = go_back
        self._move = move
        self._ended = ended
        self._files: dict[TierId, Ino] = {}
        """With the node whose bytes they were."""

    def may_write(self, tier_id: TierId) -> bool:
        """Whether the tier file is one of them."""
        return tier_id in self._files

    def find(self, candidates: Iterable[tuple[Ino, TierId]]) -> None:
        """Before anything is served: which of these tier files of nodes somebody can write."""
        files = {tier_id: ino for ino, tier_id in candidates}
        for tier_id in sorted(files.keys() & self._tier.ids()):
            if self._tier.is_lost(tier_id):
                continue
            ino = files[tier_id]
            node = self._node(ino, tier_id)
            if self._has_writers(tier_id, Body() if node is None else node.body):
                self._files[tier_id] = ino
                self._tier.keep_back(tier_id)
                log.warning(
                    "processes of an earlier mount can still write to a file in RAM: what they "
                    "write from now on is lost to them",
                    file=os.fsdecode(self._path(ino)),
                )

    async def settle(self) -> None:
        """Have all of them left behind, or as many as there is room for."""
        for tier_id in list(self._files):
            if tier_id not in self._files:
                continue
            node = self._node(self._files[tier_id], tier_id)
            if self._has_writers(tier_id, Body() if node is None else node.body):
                await self.leave(tier_id)
            elif tier_id in self._files:
                del self._files[tier_id]
                if node is not None:
                    self._ended(node)
                self._tier.bring_back(tier_id)

    async def leave(self, tier_id: TierId) -> bool:
        """Give what is in the tier file a file of its own; False: there is no room for that."""
        if tier_id not in self._files:
            return True
        node = self._node(self._files[tier_id], tier_id)
        if node is not None and node.body.busy is not None:
            await wait(node.body.busy)
            return await self.leave(tier_id)
        if not self._versions.on(tier_id):
            if node is None:
                return True
            if node.body.is_clean and not node.handles:
                self._go_back(node)
                return True
        size = max(self._versions.frozen_bytes(tier_id), 0 if node is None else node.size)
        taken = self._tier.allocated_bytes(tier_id)
        if not self._tier.reserve_nowait(taken):
            return False
        done = shared()
        body = Body() if node is None else node.body
        body.busy = done
        target = self._tier.create()
        try:
            copy = partial(self._tier.copy, tier_id, target, size)
            await outlast(self._copies.submit("take from earlier writers", copy))
        except BaseException as error:
            self._tier.remove(target)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                return False  # who is not seen has filled the tmpfs, slack and all
            raise
        finally:
            body.busy = None
            self._tier.release(taken)
            done.set_result(None)
        self._tier.settle(target)
        self._taken(tier_id, target, node if node is not None and node.body is body else None)
        return True

    def _taken(self, tier_id: TierId, target: TierId, node: Node | None) -> None:
        """The copy is whole: who has read on in the old file finds that its number has changed."""
        self._versions.use(target)  # until all who need it have it
        if self._versions.on(tier_id):
            self._versions.move(tier_id, target)
        if node is not None and node.body.tier == tier_id:
            self._move(node, target)
            self._ended(node)
        self._versions.unuse(target)

    def demand(self, node: Node) -> None:
        """Nobody else may write what is about to be changed or stored.

        Raises:
            OSError: EBUSY: processes of an earlier mount can, and RAM has no room for a copy.
        """
        if self.may_write(node.body.tier):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fsdecode(self._path(node.ino)))

    def warnings(self) -> list[str]:
        """Of files that are kept back."""
        return [
            f"{os.fsdecode(self._path(ino))} is kept back: processes of an earlier mount can "
            "still write to it, and RAM has no room for a copy"
            for tier_id, ino in self._files.items()
            if self._node(ino, tier_id) is not None or self._versions.on(tier_id)
        ]

    def _node(self, ino: Ino, tier_id: TierId) -> Node | None:
        node = self._table.get(ino)
        return node if node is not None and node.body.tier == tier_id else None

    def _path(self, ino: Ino) -> bytes:
        return self._table.path(ino) if ino in self._table else b"?"
