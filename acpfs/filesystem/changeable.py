"""Having a file's content where it can be changed: in RAM, or in a staging file of its own where RAM has no room for it.

Brings up from the backing directory what the upper layer does not hold, and waits for a content that is on its way there. Knows nodes and
contents, not handles. Runs as a call does, under the file system's lock between its waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.backing.progress import Progress
from acpfs.filesystem.content import Content
from acpfs.filesystem.contents import Contents
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.outgrown import OutgrownFiles
from acpfs.filesystem.overflow import Overflow
from acpfs.filesystem.room import Room
from acpfs.filesystem.steps import wait
from acpfs.filesystem.warming import Warming
from acpfs.ram.tier import Tier
from acpfs.ram.waiting import Purpose
from acpfs.types import Seq
from acpfs.writeback.log.log import OperationLog


class Changeable:
    """Makes contents changeable."""

    def __init__(
        self,
        table: NodeTable,
        view: LowerView,
        contents: Contents,
        overflow: Overflow,
        outgrown: OutgrownFiles,
        tier: Tier,
        room: Room,
        log: OperationLog,
        warming: Warming,
        bring_back: Callable[[Node], Awaitable[None]] | None,
    ) -> None:
        """`bring_back`: brings a content back from the spill directory; None: there is no spill tier."""
        self._table = table
        self._view = view
        self._contents = contents
        self._overflow = overflow
        self._outgrown = outgrown
        self._tier = tier
        self._room = room
        self._log = log
        self._warming = warming
        self._bring_back = bring_back

    async def bring_up(self, node: Node, size: int | None = None) -> None:
        """Copy the content from the backing directory to RAM, the first `size` bytes of it, so that it can be changed.

        One that went to the spill directory comes back whole.
        """
        if node.content is not None and node.content.spilled:
            assert self._bring_back is not None, node.ino
            await self._bring_back(node)
        self._warming.check(node)
        if size is None:
            await self._warming.whole(node)
        while node.content is None:
            wanted = node.size if size is None else min(size, node.size)
            if not await self._room.reserve(wanted, node, Purpose.BRING_UP):
                await self._bring_beside(node, wanted)
                continue
            try:
                tier_id, st = await self._view.at_place(node, self._view.read_up, wanted, again=False)
            finally:
                self._tier.release(wanted)
            if not self._adopt(node, st, wanted, partial(self._contents.adopt, node, tier_id)):
                self._tier.remove(tier_id)

    async def _bring_beside(self, node: Node, size: int) -> None:
        """Copy the content to a staging file: RAM has no room for it."""
        content, st = await self._view.at_place(node, self._copy_beside, size, again=False)
        if not self._adopt(node, st, size, partial(self._contents.adopt_overflow, node, content)):
            self._overflow.let_go(content, remove=True)

    async def _copy_beside(self, path: LowerPath, size: int) -> tuple[Content, LowerStat]:
        progress, found = Progress(), []
        content = await self._overflow.filled(lambda fd: found.append(self._view.whole.copy(path, fd, size, progress)), progress)
        return content, found[0]

    def _adopt(self, node: Node, st: LowerStat, size: int, take: Callable[[], None]) -> bool:
        """Take over a content that was read, unless another caller was quicker (and may have written) or the file is another one by now."""
        if node.content is not None:
            return False
        if st.identity() != node.identity:
            self._view.compare(node, st)
            if self._view.held(node):  # its attributes are ours, its content is not
                self._table.bind_lower(node, st)
                same, node.size = node.size == st.size, st.size
                if not same:
                    return False
            else:
                return False
        node.size = size
        take()
        return True

    async def ensure(self, node: Node, size: int | None = None) -> None:
        """Have the content, or its first `size` bytes, where it can be changed."""
        while True:
            if node.content is None or node.content.spilled:
                await self.bring_up(node, size)
            elif node.content.outgrown is not None and not node.in_kernel:
                await self._outgrown.whole(node)
            elif node.content.sealed:
                await self.persisted(node)  # larger than RAM, and on its way to the backing directory
            else:
                return

    async def truncate(self, node: Node, size: int) -> None:
        """Change the file's length, whether the content is in RAM or not."""
        if not node.in_kernel:
            await self._outgrown.whole(node)
        if size == 0 and node.content is None:
            self._contents.create(node)
            node.touch()
            return
        if size:
            await self.ensure(node, size)
        await self._contents.truncate(node, size)

    async def persisted(self, node: Node) -> None:
        """Wait until all that was logged about the node is persisted."""
        await wait(self.persisting(node))

    def persisting(self, node: Node) -> Future[None]:
        """Done when all is that was logged about the node so far."""
        op = self._log.last_of(node.ino)
        return self._log.when_done(Seq(0) if op is None else op.seq, node.ino)
