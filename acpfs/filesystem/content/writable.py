"""Having a file's content where it can be changed: in RAM, or in a staging file of its own where
RAM has no room for it.

Brings up from the backing directory what the upper layer does not hold, and waits for a content
that is on its way there. Knows nodes and contents, not handles. Runs as a call does, under the file
system's lock between its waits.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TypeVar

from acpfs.backing.lower import LowerStat
from acpfs.backing.progress import Progress
from acpfs.errors import FULL_ERRNOS
from acpfs.filesystem.content.body import Body
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.content.overflow import Overflow
from acpfs.filesystem.content.room import Room
from acpfs.filesystem.content.spilling import Spilling
from acpfs.filesystem.content.warming import Warming
from acpfs.filesystem.content.whole_reads import There
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import shared, wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.ram.waiting import Purpose
from acpfs.types import Seq

T = TypeVar("T")


class Known(enum.Enum):
    """How it is known whether what was read is the node's file."""

    SURELY = "surely"
    BY_IDENTITY = "by identity"
    OVERTAKEN = "overtaken"
    """A commit moved things meanwhile. What was read may be another file's, which lies at this
    one's former place: of that nothing is learnt.
    """


class Writable:
    """Makes contents writable."""

    def __init__(
        self,
        upper: UpperLayer,
        view: LowerView,
        contents: Contents,
        overflow: Overflow,
        outgrown: OutgrownFiles,
        room: Room,
        warming: Warming,
        spilling: Spilling | None,
    ) -> None:
        """`spilling`: None: there is no spill tier, and no copy elsewhere."""
        self._table = upper.table
        self._view = view
        self._contents = contents
        self._overflow = overflow
        self._outgrown = outgrown
        self._tier = upper.tier
        self._room = room
        self._log = upper.log
        self._warming = warming
        self._spilling = spilling

    async def bring_up(self, node: Node, size: int | None = None) -> None:
        """Copy the content from the backing directory to RAM, the first `size` bytes of it, so that
        it can be changed.

        One that went to the spill directory comes back whole.
        """
        if node.body.is_spilled:
            assert self._spilling is not None, node.ino
            await self._spilling.bring_back(node)
        self._warming.check(node)
        if size is None:
            await self._warming.whole(node)
        while node.body.is_cold:
            wanted = node.size if size is None else min(size, node.size)
            has_room = await self._room.reserve(wanted, node, Purpose.BRING_UP)
            if not has_room or not await self._bring_to_ram(node, wanted):
                await self._bring_beside(node, wanted)

    async def _bring_to_ram(self, node: Node, size: int) -> bool:
        """Copy the content to RAM, whose room is reserved; False: others have filled its tmpfs,
        though the budget has room.

        The reservation ends here: to copy beside may take long, and nobody else is to wait for room
        that this file does not take.
        """
        try:
            (tier_id, st), known = await self._read(node, self._view.read_up, size)
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                raise
            return False
        finally:
            self._tier.release(size, node.ino)
        take = partial(self._contents.adopt, node, tier_id)
        if not self._adopt(node, st, size, take, known):
            self._tier.remove(tier_id)
            if known is Known.OVERTAKEN:
                await self._look_again(node)
        return True

    async def _bring_beside(self, node: Node, size: int) -> None:
        """Copy the content to a staging file: RAM has no room for it."""
        (body, st), known = await self._read(node, self._copy_beside, size)
        take = partial(self._contents.adopt_overflow, node, body)
        if not self._adopt(node, st, size, take, known):
            self._overflow.let_go(body, remove=True)
            if known is Known.OVERTAKEN:
                await self._look_again(node)

    async def _read(
        self, node: Node, copy: Callable[[There, int], Awaitable[T]], size: int
    ) -> tuple[T, Known]:
        """Have the backing directory's file copied: what is deleted by its descriptor."""
        fd = self._view.nameless.copy(node)
        if fd >= 0:
            try:
                return await copy(fd, size), Known.SURELY
            finally:
                self._view.close_later(fd)
        moves = self._view.questions.moves
        answer = await self._view.questions.at_place(node, copy, size, again=False)
        overtaken = self._view.questions.overtaken(moves)
        return answer, Known.OVERTAKEN if overtaken else Known.BY_IDENTITY

    async def _copy_beside(self, path: There, size: int) -> tuple[Body, LowerStat]:
        progress = Progress()
        found = []
        body = await self._overflow.filled(
            lambda fd: found.append(self._view.whole.copy(path, fd, size, progress)), progress
        )
        return body, found[0]

    def _adopt(
        self, node: Node, st: LowerStat, size: int, take: Callable[[], None], known: Known
    ) -> bool:
        """Take over a content that was read, unless another caller was quicker (and may have
        written) or the file is another one by now.
        """
        if not node.body.is_cold:
            return False
        is_same = known is Known.SURELY or st.identity() == node.identity
        if not is_same and (known is Known.OVERTAKEN or not self._learn(node, st)):
            return False
        node.size = size
        take()
        return True

    def _learn(self, node: Node, st: LowerStat) -> bool:
        """It is another one on the backing directory by now; whether what was read of it is its
        content all the same.
        """
        self._view.compare(node, st)
        if not self._view.held(node):
            return False
        self._table.bind_lower(node, st)  # its attributes are ours, its content is not
        same = node.size == st.size
        node.size = st.size
        return same

    async def _look_again(self, node: Node) -> None:
        """What is there, when no commit moves anything: if it is another file indeed, that one is
        read then.
        """
        st = await self._view.look(node)
        if node.body.is_cold and st.identity() != node.identity:
            self._learn(node, st)

    async def ensure(self, node: Node, size: int | None = None) -> None:
        """Have the content, or its first `size` bytes, where it can be changed.

        Raises:
            OSError: EIO: what it holds cannot be told any more, as it was overwritten while it
                moved out.
        """
        while not (body := node.body).is_writable:
            if body.is_cold or body.is_spilled:
                await self.bring_up(node, size)
            elif (
                body.sealed
                and (last := self._log.last_of(node.ino)) is not None
                and self._room.outlook.is_held_up(last.seq)
            ):
                await self._copy_sealed(node, body)
            elif body.sealed:
                await self.persisted(
                    node
                )  # larger than RAM, and on its way to the backing directory
            elif node.in_kernel:
                return  # it is moving out: EBUSY (exception X7)
            else:
                await self._outgrown.whole(node)
                if node.body is body and not node.body.interrupted:  # the rest of it never comes
                    raise OSError(body.failed or errno.EIO, os.strerror(body.failed or errno.EIO))

    async def _copy_sealed(self, node: Node, body: Body) -> None:
        """It waits for somebody, who may be the caller: that is not waited for, as what is brought
        up is copied anyway.
        """
        try:
            copy = await self._overflow.copied(body, lambda: node.size)
        except FileNotFoundError:
            await self._overflow.patient(self.persisting(node))
            return
        if copy is not None and node.body is body:
            self._contents.adopt_overflow(node, copy)
        elif copy is not None:
            self._overflow.let_go(copy, remove=True)

    async def truncate(self, node: Node, size: int, *, opens: bool = False) -> bool:
        """Change the file's length, whether the content is in RAM or not; `opens`: as
        `Contents.empty` has it. Whether that took bytes from the file.
        """
        if not node.in_kernel:
            await self._outgrown.whole(node, size)
        if size == 0 and node.body.is_cold:
            has_taken = node.size > 0
            self._contents.create(node)
            self._table.touch(node)
            return has_taken
        before = node.size
        if size:
            await self.ensure(node, size)
        if node.size == size < before and node.body.is_clean:
            # No more than that was brought up. It is a change in this very step: else a kill, or an
            # error of the next call, would leave what nobody has changed, and is not what the
            # backing directory has.
            self._contents.brought_up_cut(node)
            return True
        return await self._contents.truncate(node, size, opens=opens)

    async def persisted(self, node: Node) -> None:
        """Wait until all that was logged about the node is persisted."""
        await wait(self.persisting(node))

    @property
    def can_be_copied(self) -> bool:
        """Whether another member may come to have what is closed here."""
        return self._spilling is not None and self._spilling.copies_to_members

    async def copied(self, node: Node, seq: Seq | None = None) -> None:
        """Wait until another member has the node as it is, or all that was logged about it is
        persisted; with `seq`, all operations up to that one.

        Raises:
            OSError: the errno of an operation on it that is parked.
        """
        assert self._spilling is not None
        persisted = self.persisting(node) if seq is None else self._log.when_done(seq, node.ino)
        copied = self._spilling.when_copied(node.ino, seq)
        either = shared()
        for one in (persisted, copied):
            one.add_done_callback(partial(_settle, either))
        try:
            await wait(either)
        finally:
            persisted.cancel()
            copied.cancel()

    def persisting(self, node: Node) -> Future[None]:
        """Done when all is that was logged about the node so far."""
        op = self._log.last_of(node.ino)
        return self._log.when_done(Seq(0) if op is None else op.seq, node.ino)


def _settle(either: Future[None], one: Future[None]) -> None:
    """The first of two is done; the other one is given up, or comes too late."""
    if one.cancelled():
        return
    with contextlib.suppress(InvalidStateError):
        if (error := one.exception()) is None:
            either.set_result(None)
        else:
            either.set_exception(error)
