"""Tier files that processes of an earlier kernel session can still write, which nobody tells of.

In passthrough the kernel writes a tier file for whoever has the mount's file open or mapped, with
no daemon, and goes on when that one and its session are gone (all of acpfs was killed, the session
was aborted). What is written then belongs to no mount any more: its fsync and close fail. So the
next mount gives its content and versions a tier file of their own, a copy that is of one moment.
Where RAM has no room for that, or somebody writes all the time, the file is kept back as it is: it
takes no change, and nothing of it is stored, until there is a copy or nobody can write it any more.
Meanwhile it is as long as it was when the mount began. What grows behind that is in no file, but of
a half, which is then as long as its bytes.

Owns which tier files these are. Used under the file system's lock between waits; nothing here
asks the backing directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from acpfs.backing.calls import CallPool
from acpfs.filesystem.content.body import Body
from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.steps import outlast, shared, wait
from acpfs.logger import get_logger
from acpfs.ram.tier import Tier
from acpfs.types import Ino, TierId

AT_START_BYTES_MAX = 1 << 30
"""So much is copied before the mount serves, which takes a second or two; the rest is kept back
until it has been copied beside others' calls.
"""
AGAIN_SHARE = 20
"""Of the time, one part is spent on copies of a file that somebody writes all the time."""

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
        self._now = copies.clock.now
        self._files: dict[TierId, Ino] = {}
        """With the node whose bytes they were."""
        self._leaving: dict[TierId, Future[None]] = {}
        """Those that are being copied."""
        self._again_at: dict[TierId, float] = {}
        """Of those that were written to all the while: when the next copy is tried, monotonic
        time, seconds.
        """
        self._resized: Callable[[Ino], None] = lambda _ino: None

    def follow(self, resized: Callable[[Ino], None]) -> None:
        """Call this with each file of which the kernel may know another length."""
        self._resized = resized

    def __iter__(self) -> Iterator[TierId]:
        """These tier files."""
        return iter(list(self._files))

    def may_write(self, tier_id: TierId) -> bool:
        """Whether the tier file is one of them."""
        return tier_id in self._files

    def find(self, candidates: Iterable[tuple[Ino, TierId]]) -> None:
        """Before anything is served: which of these tier files of nodes somebody can write."""
        files = {tier_id: ino for ino, tier_id in candidates}
        files |= self._of_versions_alone()
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

    def _of_versions_alone(self) -> dict[TierId, Ino]:
        """Those whose file has other bytes by now: no mark tells of them."""
        found = {}
        for tier_id, ino in self._versions.files():
            node = self._table.get(ino)
            if node is None or tier_id not in (node.body.tier, self._written_here(node)):
                found[tier_id] = ino
        return found

    @staticmethod
    def _written_here(node: Node) -> TierId | None:
        return node.kernel_target if node.kernel_writers else None

    def settle(self) -> list[TierId]:
        """Let go of those that nobody can write any more; the others that are to be left behind
        now.
        """
        if not self._files:
            return []
        for tier_id in self._files.keys() - self._leaving.keys():
            node = self._node(self._files[tier_id], tier_id)
            if not self._has_writers(tier_id, Body() if node is None else node.body):
                del self._files[tier_id]
                self._again_at.pop(tier_id, None)
                if node is not None:
                    self._ended(node)
                self._tier.bring_back(tier_id)
                if node is not None or self._versions.on(tier_id):
                    self._bound(tier_id, node, tier_id, self._tier.stat(tier_id).st_size)
        now = self._now()
        return [
            tier_id
            for tier_id in sorted(self._files.keys() - self._leaving.keys())
            if self._again_at.get(tier_id, 0.0) <= now
        ]

    async def begin(self) -> None:
        """Before anything is served: have as many left behind as does not take long."""
        left = AT_START_BYTES_MAX
        for tier_id in self.settle():
            taken = self._tier.allocated_bytes(tier_id)
            if self._needs_copy(tier_id):
                if taken > left:
                    continue
                left -= taken
            await self.leave(tier_id)

    def _needs_copy(self, tier_id: TierId) -> bool:
        """Whether a version or somebody who may have it open needs the bytes, or nothing else has
        them.
        """
        if self._versions.on(tier_id):
            return True
        node = self._node(self._files[tier_id], tier_id)
        return node is not None and not (node.body.is_clean and not node.handles)

    async def leave(self, tier_id: TierId) -> bool:
        """Give what is in the tier file a file of its own; False: there is no room for that, or
        somebody writes to it all the while.
        """
        if tier_id not in self._files:
            return True
        node = self._node(self._files[tier_id], tier_id)
        busy = self._leaving.get(tier_id) or (None if node is None else node.body.busy)
        if busy is not None:
            await wait(busy)
            return await self.leave(tier_id)
        if not self._needs_copy(tier_id):
            if node is not None:
                self._go_back(node)
            return True
        if self._now() < self._again_at.get(tier_id, 0.0):
            return False
        return await self._copy(tier_id, node)

    async def _copy(self, tier_id: TierId, node: Node | None) -> bool:
        self._tier.settle(tier_id)  # it may have grown, which nobody has counted
        taken = self._tier.allocated_bytes(tier_id)
        if not self._tier.reserve_nowait(taken):
            return False
        done = shared()
        body = Body() if node is None else node.body
        body.busy = done
        self._leaving[tier_id] = done
        begun = self._now()
        target = self._tier.create()
        length = None
        try:
            length = await outlast(
                self._copies.submit(
                    "take from earlier writers", self._tier.copy_steady, tier_id, target
                )
            )
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False  # who is not seen has filled the tmpfs, slack and all
        finally:
            if length is None:
                self._tier.remove(target)
            body.busy = None
            del self._leaving[tier_id]
            self._tier.release(taken)
            done.set_result(None)
        if length is None:
            now = self._now()
            self._again_at[tier_id] = now + AGAIN_SHARE * (now - begun)
            return False
        self._tier.settle(target)
        if node is not None and node.body is not body:
            node = None
        self._bound(tier_id, node, target, length)
        self._taken(tier_id, target, node)
        return True

    def _bound(self, tier_id: TierId, node: Node | None, target: TierId, length: int) -> None:
        """Nobody makes `target` longer any more: it has what there is of the tier file, `length`
        bytes, and ends where its file ends.

        A half ends with its bytes, for what says how long the file is may lie within them. Of what
        was complete the length is known, and who has the mount's file open now would append behind
        what is more, and read it.
        """
        if node is not None and node.body.modified:
            is_told = length != node.size and node.lookups
            node.size = length
            node.blocks = self._tier.stat(target).st_blocks
            self._table.changed(node)
            if is_told:
                self._resized(node.ino)
            return
        end = max(self._versions.frozen_bytes(tier_id), 0 if node is None else node.size)
        if end < length:
            self._tier.cut(target, end)

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
            OSError: EBUSY: processes of an earlier mount can, and there is no copy.
        """
        if self.may_write(node.body.tier):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fsdecode(self._path(node.ino)))

    def warnings(self) -> list[str]:
        """Of files that are kept back."""
        return [
            f"{os.fsdecode(self._path(ino))} is kept back: processes of an earlier mount can "
            f"still write to it, and {self._why(tier_id)}"
            for tier_id, ino in self._files.items()
            if self._node(ino, tier_id) is not None or self._versions.on(tier_id)
        ]

    def _why(self, tier_id: TierId) -> str:
        if tier_id in self._leaving:
            return "it is being copied"
        if tier_id in self._again_at:
            return "do, all the time: no copy of it is of one moment"
        return "RAM has no room for a copy"

    def _node(self, ino: Ino, tier_id: TierId) -> Node | None:
        node = self._table.get(ino)
        return node if node is not None and node.body.tier == tier_id else None

    def _path(self, ino: Ino) -> bytes:
        return self._table.path(ino) if ino in self._table else b"?"
