"""Bytes of regular files in the RAM tier: life of a content, reading, writing, freezing.

Keeps, with `versions` and `copy_aside`, "a version's bytes do not change before it is persisted"
(docs/internals/versions-and-streams.md). Knows tier files and the operation log; does not know
names, handles or where bytes come from when they are not in RAM. Used under the file system's lock;
the coroutines wait as described in `steps`.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from acpfs.backing.calls import CallPool
from acpfs.errors import wanted
from acpfs.filesystem.content.body import (
    COLD,
    UNSEEN,
    Body,
    ContentStatistics,
    SpillCopy,
    Staging,
    Writing,
    in_ram,
    overflowed,
)
from acpfs.filesystem.content.copy_aside import CopyAside
from acpfs.filesystem.content.earlier_writers import EarlierWriters
from acpfs.filesystem.content.eviction_order import EvictionOrder
from acpfs.filesystem.content.fill import Coming, Fills
from acpfs.filesystem.content.overflow import LOOK_AGAIN_S, Overflow
from acpfs.filesystem.content.retention import Retention
from acpfs.filesystem.content.room import Room, pages_wanted
from acpfs.filesystem.content.unseen_room import Lengthening
from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.kernel_writes import KernelWrites, mark_file
from acpfs.filesystem.marks import Marks
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import outlast, shared, unlocked, wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.ram.tier import (
    BLOCK_BYTES,
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE,
    fallocate,
    set_mtime,
)
from acpfs.ram.waiting import Purpose
from acpfs.types import NO_TIER, Ino, TierId
from acpfs.writeback.log.ops import Op, Version, VersionState
from acpfs.writeback.log.stages import Step

T = TypeVar("T")


class Half(enum.Enum):
    """Whether a content is a half as long as a change is under way, should the worker die in it."""

    NO = "no"
    """The next worker knows who changes it as one who is at the file, from before the change on."""
    AS_BEFORE = "as before"
    """It does not know the caller, who may be gone by then; what was a half stays one until that is
    done.
    """
    YES = "yes"
    """Nor that one, who takes the file's bytes to write others."""


INLINE_WRITE_BYTES_MAX = 16 << 10
"""Up to here writing under the lock (about 4 us) costs less than letting it go and taking it
again.
"""
ALLOCATE_PIECE_BYTES = 32 << 20
"""About 10 ms of zeroing pages."""
SLACK_LEFT_BYTES = 64 << 20
"""Of the tmpfs' slack so much is left to writers in the passthrough lane who are not held yet
(`hold`).
"""
COPY_AT_FREEZE_BYTES_MAX = 16 << 20
"""A file that the kernel may go on writing to unseen is frozen by a copy up to here (4 ms); beyond,
by watching for changes.
"""


def _emptied(fd: int) -> bool:
    """Cut all of a tier file; whether there was anything, also of a write that had to end first."""
    mark = mark_file(fd)  # waits for that
    os.ftruncate(fd, 0)
    return mark[1] != 0


class Contents:
    """All contents; owner of every tier file."""

    def __init__(
        self,
        upper: UpperLayer,
        copies: CallPool,
        overflow: Overflow,
        versions: Versions,
        room: Room,
        order: EvictionOrder,
        marks: Marks,
        fills: Fills,
    ) -> None:
        """`copies`: threads for large copies inside the RAM tier.

        `overflow`: where files go that do not fit; `order`: who leaves first.
        """
        self._now = copies.clock.now
        tier = upper.tier
        self._tier = tier
        log = upper.log
        self._log = log
        table = upper.table
        self._table = table
        self._copies = copies
        self._overflow = overflow
        self._versions = versions
        self._room = room
        self._fills = fills
        self._aside = CopyAside(tier, versions, room, copies)
        self.kernel = KernelWrites(
            tier,
            log,
            table,
            self._opened_to_look,
            marks,
            versions.tell_renewed,
            copies.clock,
            room.unseen.count,
        )
        self.earlier = EarlierWriters(
            tier,
            table,
            versions,
            copies,
            self._has_writers,
            self.go_back,
            self._rehouse,
            self.kernel_ended,
        )
        self.retention = Retention(tier, log, table, order, self.drop, self.cut)
        self._read_on: dict[Ino, tuple[TierId, int]] = {}
        """Tier files that files have left, and that the kernel still reads for those who opened
        them before; with a descriptor.
        """
        self.writers = 0
        """Open files that may be written to; kept by `OpenFiles`."""
        self._take_over()

    def _take_over(self) -> None:
        """Count who uses which tier file; remove those that nobody uses."""
        for node in self._table:
            body = node.body
            self._versions.use(body.tier)
            if body.is_overflowed:
                if body.modified:  # what is logged of it went on, and is for its next close to end
                    self._take_over_unsealed(node)
                pending = (
                    op.version.staging_name
                    for op in self._log.pending_of(node.ino)
                    if op.version is not None and not op.unsealed
                )
                body.sealed = body.staging in pending
                self._overflow.inherit(body)
            elif not body.is_cold:
                if body.is_outgrown:
                    self._take_over_unsealed(node)
                if not (body.is_spilled or self._tier.is_lost(body.tier)):
                    self.kernel.resume(node)
                body.close()
                self.retention.settle(node)
                self.stored(node)
            elif body.tier:
                self.retention.settle(node)
        self._versions.remove_unused()

    def _take_over_unsealed(self, node: Node) -> None:
        for op in self._log.pending_of(node.ino):
            if op.version is not None and op.version.staging_name == node.body.staging:
                op.take(Step.OUTGROWN)

    # -- life of a content

    def create(self, node: Node) -> Body:
        """Give a node a new, empty content, modified; open if the node is, to be closed with the
        node's last handle.

        In place of other bytes it is not published before it is complete.
        """
        tier_id, fd = self._tier.create_open()
        if not node.handles:
            os.close(fd)
        body = in_ram(tier_id, modified=True, fd=fd if node.handles else -1)
        body.modified_since = self._now()
        body.writing = (
            Writing.WHOLE if node.size or node.body.writing is Writing.WHOLE else Writing.APPENDING
        )
        body.last_writing = node.body.last_writing  # of a version that may be in doubt still
        self._versions.use(tier_id)
        node.size = 0
        node.blocks = 0
        self._put(node, body)
        return body

    def adopt(self, node: Node, tier_id: TierId) -> None:
        """Give a node a clean content that was read from the backing directory into `tier_id`, or
        that a version has.
        """
        self._versions.use(tier_id)
        # Blocks of the backing directory's file say nothing of holes here: room is reserved by
        # these (`pages_wanted`).
        taken = min(node.size, self._tier.allocated_bytes(tier_id))
        node.blocks = -(-taken // BLOCK_BYTES)
        self._put(node, in_ram(tier_id))
        self.retention.settle(node)

    def stored(self, node: Node) -> None:
        """A version was stored: whether what RAM has is that, and as such may be given to others.

        Also after what was read from the backing directory became the content.
        """
        has_newer = any(op.version is not None for op in self._log.pending_of(node.ino))
        if (
            node.identity is not None
            and node.body.is_whole_in_ram
            and node.body.is_clean
            and not has_newer
        ):
            self._fills.lent.vouch(node.body.tier, node.identity)

    def adopt_version(self, node: Node, version: Version) -> None:
        """Give a node the content of a version that is not persisted yet; it may have the first
        bytes of a tier file that went on.
        """
        self._resized(node, version.size)
        if version.spilled:
            self._put(node, Body(rest=SpillCopy(version.vid)))
        elif not version.is_local:
            self.adopt_overflow(node, overflowed(version.staging_name, sealed=True))
        else:
            self._shorten_earlier(version)
            self._tier.cut(version.tier_id, self._versions.frozen_bytes(version.tier_id))
            self.adopt(node, version.tier_id)

    def _shorten_earlier(self, last: Version) -> None:
        """Earlier versions in the same tier file end where the last one does: what one of them got
        behind that, as it was read again (X11), is of a half that goes. Else the file could not be
        cut, and who reads past the daemon would see that half.
        """
        for version in self._versions.on(last.tier_id):
            if version.size > last.size and version.state is not VersionState.COMMITTED:
                version.size = last.size
                self.kernel.renew(version)

    def go_back(self, node: Node) -> Op | None:
        """Give a node what was complete last; returns its STORE, or None where that is the backing
        directory's file.
        """
        last = next(
            (
                op
                for op in reversed(self._log.pending_of(node.ino))
                if op.version is not None and not op.unsealed
            ),
            None,
        )
        if last is None or last.version is None:
            self.drop(node)
            return None
        self.adopt_version(node, last.version)
        return last

    @staticmethod
    def differs_from_staged(op: Op) -> bool:
        """Whether the kernel may have written to a version's bytes since they were staged (X11):
        then what RAM has, and the mount shows, is not what would be stored.
        """
        version = op.version
        return (
            version is not None
            and bool(version.tier_id)
            and version.is_staged
            and not version.digest
        )

    def drop(self, node: Node) -> None:
        """The node's content is not needed any more (evicted, deleted, or outdated)."""
        self._put(node, COLD)

    def cut(self, node: Node, size: int) -> None:
        """Of a content that may leave only the first bytes stay in RAM: the row is committed before
        the tier file is cut.
        """
        node.body.close()
        self._fills.lent.spoil(node.body.tier)
        node.body.cut(size)
        self._table.changed(node)
        self._tier.cut(node.body.tier, size)

    def _put(self, node: Node, body: Body) -> None:
        """The node's bytes are there from now on, and what it had goes."""
        before = node.body
        node.body = body
        if body.tier != before.tier:
            self._fills.lent.spoil(before.tier)
        self._table.changed(node)
        self.retention.order.discard(node.ino)
        if self.earlier.may_write(before.tier) and body.tier != before.tier:
            self.kernel.ended(node, ())  # its mark was of what they write
        if before.is_overflowed:
            self._overflow.let_go(before, remove=not before.sealed)
            return
        if before.moving_out is not None and before.staging != body.staging:
            before.moving_out.is_let_go = True
            self._overflow.let_go(
                overflowed(before.staging, before.moving_out.fd),
                remove=not self._log.unsealed_of(node.ino),
            )
        before.close()
        self._versions.unuse(before.tier)
        if before.filling is not None:
            self._fills.give_up(before.filling)

    def comes(self, node: Node, coming: Coming) -> None:
        """A copy of a cold file is on its way to RAM, and goes with what the node has now."""
        assert node.body.is_cold, node.ino
        if node.body is COLD:
            node.body = Body()
        node.body.coming = coming
        self._fills.begun(coming)

    def forget(self, node: Node) -> None:
        """Nobody knows the node any more: nor does anybody want what is on its way for it."""
        if node.body.filling is not None:
            self._fills.give_up(node.body.filling)

    def opened(self, body: Body) -> int:
        """The content's descriptor, open from now until `closed`."""
        if body.fd < 0 or body.is_fd_to_read:
            self._opened_to_look(body)
            self._to_write(body)
        body.closing = False
        return body.fd

    def _opened_to_look(self, body: Body) -> int:
        """The same, which need not be one that writes."""
        assert body.tier, body.rest
        if body.fd < 0:
            body.fd = self._tier.open(body.tier)
        body.closing = False
        return body.fd

    def is_mapped(self, node: Node) -> bool:
        """Whether somebody may write to the tier file that the kernel has for the node, be it
        through a mapping alone.

        Such a mapping keeps nothing of the mount open: the kernel sends RELEASE when the descriptor
        is closed. Where a thread is at work on the file that is not known now, nor where the
        machine has nothing left to look with: then it is said to be so.
        """
        tier_id = node.kernel_target
        if not tier_id or self._tier.is_lost(tier_id):
            return False
        return self._has_writers(tier_id, node.body)

    def is_as_stored(self, node: Node) -> bool:
        """Whether the content is known to be what the node's identity says."""
        identity = node.identity
        return identity is not None and self._fills.lent.is_vouched(node.body.tier, identity)

    def is_quiet(self, node: Node) -> bool:
        """Whether nobody can write to the content's tier file before he opens the file anew.

        Where the kernel has it for readers, a mapping of somebody who has closed it cannot be told
        from those: then it is said only if it was known before.
        """
        lent = self._fills.lent
        tier_id = node.body.tier
        if lent.is_quiet(tier_id):
            return True
        if node.in_kernel or self.earlier.may_write(tier_id):
            return False
        if self._has_writers(tier_id, node.body):
            return False
        lent.found_quiet(tier_id)
        return True

    def _has_writers(self, tier_id: TierId, body: Body) -> bool:
        """Whether somebody else may write to a tier file, which may be a content's."""
        is_own = body.tier == tier_id and body.fd >= 0
        if is_own and body.in_flight:
            return True
        try:
            if not is_own:
                return self._tier.has_writers(tier_id)
            # One that writes would count itself, so none can be ready meanwhile. Where it cannot be
            # had again, this one stays, and `opened` tries again before anybody writes.
            self._to_read(body)
            has_writers = self._tier.has_writers(tier_id)
            self._to_write(body)
        except OSError as error:
            if not wanted(error):
                raise
            return True
        return has_writers

    def _rehouse(self, node: Node, tier_id: TierId) -> None:
        """The node's bytes have a copy in another tier file."""
        body = node.body
        fd = self._tier.open(tier_id)
        set_mtime(fd, node.mtime_ns)
        self._versions.use(tier_id)
        before = body.tier
        self._fills.lent.spoil(before)
        body.rehouse(tier_id)
        if body.fd >= 0:
            self._reopen(body, fd)
            body.is_fd_to_read = False
        else:
            os.close(fd)
        self._table.changed(node)
        self._versions.unuse(before)

    def open_kernel_target(self, node: Node) -> int:
        """A descriptor that only reads of the tier file that the kernel has for the node; the
        caller closes it.

        Raises:
            OSError: its bytes are lost, or the machine has no descriptor.
        """
        assert node.kernel_target
        return self._tier.open_to_read(node.kernel_target)

    def _to_read(self, body: Body) -> None:
        """Its number stays: an answer to open may be on its way that has the kernel take this
        file.
        """
        self._reopen(body, self._tier.open_to_read(body.tier))
        body.is_fd_to_read = True

    def _to_write(self, body: Body) -> None:
        if body.is_fd_to_read:
            self._reopen(body, self._tier.open(body.tier))
            body.is_fd_to_read = False

    @staticmethod
    def _reopen(body: Body, fd: int) -> None:
        os.dup2(fd, body.fd, inheritable=False)
        os.close(fd)

    async def locking(self, body: Body, function: Callable[..., T], *arguments: Any) -> T:
        """A system call that takes the inode lock of the content's RAM file, on its descriptor.

        Made at once, unless an application may have that lock: then in the file's own thread, and
        only the caller waits. Where a killed worker may still make the same call, that comes first.
        """
        calls = self._tier.calls
        if not calls.must_queue(body.tier):
            return function(self.opened(body), *arguments)
        fd = self.opened(body)
        body.keep_open()
        try:
            return await outlast(calls.submit(body.tier, function, fd, *arguments))
        finally:
            body.let_go()  # not before: the thread has the descriptor

    async def _unlocked(self, body: Body, function: Callable[..., T], *arguments: Any) -> T:
        """A system call on the content's descriptor, while others hold the lock."""
        fd = self.opened(body)
        body.keep_open()
        try:
            return await unlocked(function, fd, *arguments)
        finally:
            body.let_go()

    def closed(self, node: Node) -> None:
        """The last handle of the node is gone."""
        body = node.body
        if body.failed and body.modified and not body.is_outgrown:
            self.interrupt(node)
        self.forget_vain_write(node)
        if not body.is_overflowed:
            body.close()
            self.retention.settle(node)
        elif not (body.modified or body.sealed or self._log.unsealed_of(node.ino)):
            # brought up to be changed, and then it was not: what it was a copy of may still wait in
            # the spill directory
            self.go_back(node)
        self._versions.tell_closed(node.ino)

    def forget_vain_write(self, node: Node) -> None:
        """Nobody has the file open. A write that failed and changed nothing has left what the last
        version is: who changes the file next does not go on with a half.
        """
        body = node.body
        if body.failed and body.is_whole_in_ram and not (body.modified or body.interrupted):
            self._mended(node, body)

    def interrupt(self, node: Node) -> None:
        """It is a half: nothing is published or dropped before somebody writes it anew, or
        decides.
        """
        assert not node.body.is_cold, node.ino
        node.body.interrupted = True
        self._table.changed(node)

    def go_on(self, node: Node) -> None:
        """Somebody is at it, and is known: it is no half."""
        if node.body.interrupted:
            node.body.interrupted = False
            self._table.changed(node)

    async def _to_overflow(self, node: Node) -> None:
        """Move a content out of the RAM tier; versions keep their tier file."""
        body = node.body
        if body.busy is not None or body.is_overflowed:
            return
        if self._is_written_in_kernel(node):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = shared()
        body.busy = done
        body.overflowing = True
        try:
            while body.in_flight:
                await wait(self._copies.clock.after(LOOK_AGAIN_S))
            moved = await self._overflow.from_tier(body.tier, node.size)
            if node.body is body:
                self._keep_for_readers(node)
                self.adopt_overflow(node, moved.moved_from(body))
            else:
                self._overflow.let_go(moved, remove=True)
        finally:
            body.busy = None
            body.overflowing = False
            done.set_result(None)

    @staticmethod
    def _is_written_in_kernel(node: Node) -> bool:
        """Whether somebody may write to the tier file unseen, perhaps through a mapping: then the
        file's bytes cannot be elsewhere.
        """
        return node.kernel_writers > 0 and node.in_kernel and node.kernel_target == node.body.tier

    def _keep_for_readers(self, node: Node) -> None:
        """Who reads in the passthrough lane goes on reading the tier file (exception X9): its bytes
        count until the last has closed it.
        """
        tier_id = node.body.tier
        if node.in_kernel and node.kernel_target == tier_id and node.ino not in self._read_on:
            self._read_on[node.ino] = (tier_id, self._tier.read_long(tier_id))

    def left_by_kernel(self, node: Node) -> None:
        """A handle is gone that kept the kernel on a tier file."""
        if node.ino in self._read_on and not node.in_kernel:
            self._tier.read_done(*self._read_on.pop(node.ino))

    def staging_in_use(self) -> set[str]:
        """Names of staging files that hold the content of files."""
        return self._overflow.in_use(node.body for node in self._table if not node.body.is_cold)

    def adopt_overflow(self, node: Node, body: Body, *, is_longer: bool = False) -> None:
        """The node's bytes are in a staging file from now on.

        `is_longer`: with more behind them, which is cut off before the first change.
        """
        node.blocks = -(-node.size // BLOCK_BYTES)
        self._put(node, body)
        if is_longer:
            self._overflow.inherit(body)

    def owed_bytes(self, nodes: Iterable[Node]) -> int:
        """What of these, which are open, and of all versions is in RAM alone: the backing directory
        will want room for it.
        """
        written = (
            node
            for node in nodes
            if (node.body.modified or node.kernel_writers)
            and not node.body.is_cold
            and node.body.tier
        )
        unfrozen = (max(0, node.blocks * BLOCK_BYTES - self.frozen_bytes(node)) for node in written)
        return self._log.sizes.unstored_bytes + sum(unfrozen)

    # -- bytes

    async def read(self, body: Body, offset: int, size: int) -> bytes:
        """Bytes of a tier file; shorter at its end."""
        return await self._unlocked(body, os.pread, size, offset)

    def read_head(self, body: Body, offset: int, size: int) -> bytes:
        """What RAM has of a range of a cold file, from its beginning on; without the lock. b"" also
        where it has just been given up.
        """
        size = min(size, body.head_bytes - offset)
        if size <= 0:
            return b""
        try:
            fd = self._tier.open(body.tier)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    async def write(
        self, node: Node, offset: int, data: bytes | memoryview, *, by_append: bool = False
    ) -> int:
        """Write to RAM, or where the file overflowed to; all of it or an error.

        `by_append`: as `Writing.of` has it.
        """
        writing = Writing.of(offset, len(data), node.size, by_append=by_append)
        try:
            while True:
                done = await self.change(
                    node, offset, len(data), os.pwrite, data, offset, writing=writing
                )
                if done is not None:
                    return done
                if self._is_written_in_kernel(node):
                    return await self._beyond(node, offset, data, writing)
                await self._to_overflow(node)
                body = await self._before_change(node, offset, writing)
                if body.is_overflowed:
                    return await self._write_overflow(node, body, offset, data)
        except InterruptedError:
            # its caller was killed while it waited, and what it wrote before stays what it is
            raise
        except OSError as error:
            if not (node.body.is_cold or node.body.is_outgrown):
                self.fail(node, error.errno or errno.EIO, offset)
            raise

    async def _beyond(
        self, node: Node, offset: int, data: bytes | memoryview, writing: Writing
    ) -> int:
        """Write to RAM without room for it, into the slack of the tmpfs.

        Raises:
            OSError: ENOSPC: there is too little of that left, or a hole would come to be that
                others may store into.
        """
        body = await self._before_change(node, offset, writing)
        done = None
        if (
            not body.is_overflowed
            and not self._room.unseen.hole_bytes(node, offset)
            and self._tier.space_left_bytes() >= len(data) + SLACK_LEFT_BYTES
        ):
            done = await self._change(node, body, offset, len(data), os.pwrite, data, offset)
        if done is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return done

    def fail(self, node: Node, number: int, at: int) -> None:
        """Bytes that were written at `at` are not there: the file is not published as long as that
        is so, by no worker.
        """
        node.body.failed = number
        node.body.failed_at = at
        self._table.changed(node)

    def _mended(self, node: Node, body: Body) -> None:
        if body.failed:
            body.failed = 0
            body.failed_at = 0
            self._table.changed(node)

    async def change(
        self,
        node: Node,
        offset: int,
        size: int,
        function: Callable[..., int],
        *arguments: Any,
        writing: Writing = Writing.WHOLE,
    ) -> int | None:
        """Let a system call on the tier file write up to `size` bytes at `offset`; None: the file
        has no (more) room in RAM.
        """
        # what RAM has of it already is not in its owner's share before it is changed
        if self._tier.shares.limit_bytes and not (
            self._room.is_covered(node) or await self._room.reserve(0, node)
        ):
            return None
        body = await self._before_change(node, offset, writing)
        if body.is_overflowed:
            return None
        own = self._room.unseen
        hole = own.hole_bytes(node, offset)
        wanted = pages_wanted(node, offset, size)
        wanted -= own.own_bytes(node, offset, wanted, max(node.size, offset + size))
        wanted += hole
        at_once = not wanted or self._room.at_once(wanted, node)
        if not at_once and not await self._room.reserve(wanted, node):
            return None
        longer: Lengthening | None = None
        try:
            if not at_once:
                body = await self._before_change(
                    node, offset, writing
                )  # again: much may have happened meanwhile
                if body.is_overflowed:
                    return None
            if hole:
                longer = Lengthening(offset)
                own.lengthens(node, longer, hole)
                wanted -= hole
            return await self._change(node, body, offset, size, function, *arguments)
        finally:
            if wanted:
                self._tier.release(wanted, node.ino)
            if longer is not None:
                own.resized(node, longer)

    async def _change(
        self,
        node: Node,
        body: Body,
        offset: int,
        size: int,
        function: Callable[..., int],
        *arguments: Any,
    ) -> int | None:
        try:
            if self._tier.calls.must_queue(body.tier):
                done = await self.locking(body, function, *arguments)
            elif size <= INLINE_WRITE_BYTES_MAX:
                done = function(self.opened(body), *arguments)
            else:
                # Others who open the file meanwhile, to write in the kernel, come too late to hold
                # this up: the kernel has the lock of the mount's inode, which their writes take
                # first, until this one is answered.
                done = await self._unlocked(body, function, *arguments)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return None  # writers that the daemon does not see have filled the tmpfs, slack and all
        finally:
            self._settle(node, body)
        self._modified(node, body)
        if body.failed and offset <= body.failed_at < offset + done:
            self._mended(node, body)
        return done

    async def _write_overflow(
        self, node: Node, body: Body, offset: int, data: bytes | memoryview
    ) -> int:
        done = await self._overflow.write(body, node.size, offset, data)
        if node.body is body:  # else it was emptied meanwhile: that comes after what is done
            self._resized(node, max(node.size, offset + done))
        self._modified(node, body)
        return done

    async def _truncate_overflow(self, node: Node, body: Body, size: int) -> None:
        def ended() -> None:
            if node.body is body:
                self._resized(node, size)

        await self._overflow.truncate(body, node.size, size, ended)

    def _resized(self, node: Node, size: int) -> None:
        """The next worker cannot learn the length of what overflowed from a tier file, and asks the
        backing directory nothing.
        """
        node.size = size
        node.blocks = -(-size // BLOCK_BYTES)
        self._table.changed(node)

    async def truncate(self, node: Node, size: int, *, opens: bool = False) -> bool:
        """Change the length of a file whose content is in RAM; `opens`: as `empty` has it. Whether
        that took bytes from it.
        """
        if size == 0:
            return await self.empty(node, opens=opens)
        has_taken = size < node.size
        body = await self._before_change(
            node,
            min(size, node.size),
            Writing.APPENDING if size == node.size else Writing.WHOLE,
            Half.AS_BEFORE,
        )
        if body.is_overflowed:
            await self._truncate_overflow(node, body, size)
        else:
            await self.locking(body, os.ftruncate, size)
            if has_taken and node.body is body:
                self._room.unseen.cut(node, size)
            self._settle(node, body)
        self._modified(node, body)
        if size <= body.failed_at:
            self._mended(node, body)
        return has_taken

    def brought_up_cut(self, node: Node) -> None:
        """What was brought up in this step is only the file's first bytes, and it is to have no
        more: nothing of it is to be kept for a version, and no byte will change.
        """
        node.body.writing = Writing.WHOLE
        self._modified(node, node.body)

    async def empty(self, node: Node, *, opens: bool = False) -> bool:
        """Truncate to nothing: a new tier file where a version still needs the old one's bytes, so
        that nothing is copied. Whether there was anything.

        `opens`: for somebody who opens the file, and is not known to the next worker before he has
        it. The kernel's handles stay on their tier file, so there the bytes go before that. Then it
        is a half from before that on; when this returns it is none, and whoever called says what it
        is.
        """
        body = node.body
        if body.busy is not None:
            await wait(body.busy)
            return await self.empty(node, opens=opens)
        if node.in_kernel:
            half = Half.YES if opens and node.size else Half.AS_BEFORE
            writing = Writing.WHOLE if node.size else Writing.APPENDING
            body = await self._before_change(node, 0, writing, half)
            if node.kernel_writers:
                # What is taken from the file is seen meanwhile, and nobody who goes on with a half.
                self.kernel.note(node, UNSEEN)
        # not before: while this waited, somebody may have written to it
        has_taken = node.size > 0
        if body.is_overflowed and not body.sealed and self._log.unsealed_of(node.ino):
            await self._truncate_overflow(node, body, 0)  # its place in the order has this one
            self._mended(node, body)
            self._modified(node, body)
            return has_taken
        held_elsewhere = not body.is_whole_in_ram or self._tier.is_lost(body.tier)
        is_found = not body.modified or (body.interrupted and not node.in_kernel)
        if held_elsewhere or is_found or self._versions.frozen_bytes(body.tier) > 0:
            # Clean bytes, and those of a half, stay until it is recorded that they are not shown
            # any more.
            self.create(node)
        else:
            body.writing = Writing.WHOLE if node.size else body.writing
            if node.kernel_writers:  # they may have written since it was looked at
                has_taken = await self.locking(body, _emptied) or has_taken
            else:
                await self.locking(body, os.ftruncate, 0)
            self._room.unseen.cut(node, 0)
            self._settle(node, body)
        self._mended(node, node.body)
        self._modified(node, node.body)
        return has_taken

    async def allocate(
        self, node: Node, mode: int, offset: int, length: int, *, keep_size: bool
    ) -> None:
        """fallocate on the tier file; the pages count against the budget at once.

        Where RAM has no room for them the file goes where the bytes would if they were written.
        """
        takes = 0 if mode & FALLOC_PUNCH_HOLE or node.body.is_overflowed else length
        own = self._room.unseen
        if takes and keep_size:
            own.allocates(node, offset + length)
        size = node.size if keep_size else max(node.size, offset + length)
        wanted = takes - own.own_bytes(node, offset, takes, size)
        if node.body.is_overflowed or (
            wanted and not await self._room.reserve(wanted, node, Purpose.ALLOCATE)
        ):
            await self._allocate_overflow(node, mode, offset, length)
            return
        try:
            start = offset if mode & ~1 else node.size
            changes = mode & ~1 or not keep_size
            body = await (
                self._before_change(node, start, Writing.WHOLE)
                if changes
                else self._free(node, start)
            )
            if body.is_overflowed:
                await self._allocate_overflow(node, mode, offset, length)
                return
            begin = offset if mode & ~FALLOC_KEEP_SIZE else self._missing(body, offset, length)
            end = offset + length
            is_short = takes <= ALLOCATE_PIECE_BYTES
            body.keep_open()
            try:
                for start in range(begin, end, end - begin if is_short else ALLOCATE_PIECE_BYTES):
                    if node.body is not body:  # truncated meanwhile: that comes after what is done
                        return
                    piece = end - begin if is_short else min(ALLOCATE_PIECE_BYTES, end - start)
                    await self._allocate_piece(node, body, mode, start, piece, is_short=is_short)
                    rest = end - start - piece
                    left = max(0, rest - own.own_bytes(node, start + piece, rest, size))
                    self._tier.release(max(0, wanted - left), node.ino)
                    wanted = min(wanted, left)
            finally:
                body.let_go()
        finally:
            if takes and keep_size:
                own.allocates(node, offset + length)  # again: it may have been emptied meanwhile
            self._tier.release(wanted, node.ino)
        if changes:
            self._modified(node, body)

    def _missing(self, body: Body, offset: int, length: int) -> int:
        """From where on pages are to be allocated for a range: what was taken ahead is there.

        The kernel fills with zeros what is allocated a second time (shmem_get_folio, of SGP_FALLOC
        on a folio that is not up to date), which takes as long as a write of all of it.
        """
        ahead = body.ahead_to
        body.ahead_to = 0  # what the user allocates beyond would count as if it lay before
        if ahead <= offset:
            return offset
        st = os.fstat(self._opened_to_look(body))
        if st.st_size > ahead or st.st_blocks * BLOCK_BYTES < ahead:
            return offset  # some lie elsewhere, or have been given back
        return min(ahead, offset + length - 1)  # the last byte all the same: the length is there

    async def _allocate_overflow(self, node: Node, mode: int, offset: int, length: int) -> None:
        """fallocate on the staging file, to which the file moves first.

        Raises:
            OSError: EOPNOTSUPP: the kernel may write to it in RAM, or the mode moves other bytes.
                Or the backing directory's.
        """
        cannot = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if mode & ~(FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE):
            raise cannot
        start = offset if mode & ~FALLOC_KEEP_SIZE else node.size
        while not (body := await self._before_change(node, start, Writing.WHOLE)).is_overflowed:
            if self._is_written_in_kernel(node):
                raise cannot
            await self._to_overflow(node)
        await self._overflow.allocate(body, node.size, mode, offset, length)
        if not mode & FALLOC_KEEP_SIZE and node.body is body:
            self._resized(node, max(node.size, offset + length))
        self._modified(node, body)

    async def _allocate_piece(
        self, node: Node, body: Body, mode: int, offset: int, length: int, *, is_short: bool
    ) -> None:
        """In a thread and without the lock, unless it is short: 4 GiB take seconds, during which
        nobody else would get anywhere.
        """
        try:
            if is_short or self._tier.calls.must_queue(body.tier):
                await self.locking(body, fallocate, mode, offset, length)
                return
            await outlast(
                self._copies.submit("allocate", fallocate, self.opened(body), mode, offset, length)
            )
        finally:
            self._settle(node, body)

    def _settle(self, node: Node, body: Body) -> None:
        if self._versions.is_used(
            body.tier
        ):  # else it was let go of while the bytes were on their way
            st = self._tier.settle_fd(body.tier, self._opened_to_look(body))
            if node.body is body:
                self.kernel.note(node, UNSEEN)
                node.size = st.st_size
                node.blocks = st.st_blocks
                self._room.unseen.count(node, is_mapped=self.kernel.has_trace(st))

    def read_in_kernel(self, node: Node) -> None:
        """A reader in the passthrough lane is gone.

        Holes that it read through a mapping have pages now, which nobody saw come.
        """
        body = node.body
        if body.is_whole_in_ram:
            node.blocks = self._tier.settle_fd(body.tier, self.opened(body)).st_blocks
            if self._tier.free_bytes(urgent=True) < 0:
                self._tier.room_changed()

    def may_change(self, node: Node) -> None:
        """Somebody who may change its bytes opens it: nothing of it is lent any more."""
        self._fills.lent.spoil(node.body.tier)

    def _modified(self, node: Node, body: Body) -> None:
        self._fills.lent.spoil(body.tier)
        self._table.touch(node)
        if body.sealed:
            self._in_sealed(node, body)
        elif not body.modified or body.interrupted:
            body.modified = True
            body.interrupted = False
            body.modified_since = self._now()
            self.retention.order.discard(node.ino)
            self._table.changed(node)

    def _in_sealed(self, node: Node, body: Body) -> None:
        """A write that was under way when another descriptor was closed is in the version that this
        made, which waited for it.
        """
        for op in self._log.pending_of(node.ino):
            if op.version is not None and op.version.staging_name == body.staging:
                op.version.size = node.size
                self._log.save_version(op.version)
        self._table.changed(node)

    def still_frozen(self, version: Version) -> bool:
        return (
            self.kernel.still_frozen(version)
            if version.is_local
            else not self._overflow.is_changing(version.staging_name)
        )

    def restaged(self, version: Version, before: str) -> None:
        """See `Listener`. Nobody writes to either: the content is sealed."""
        node = self._table.get(version.ino)
        if node is not None and node.body.is_overflowed and node.body.staging == before:
            node.body.rebind(Staging(version.staging_name))
            self._table.changed(node)

    def unstaged(self, version: Version) -> None:
        """See `Listener`."""
        self._versions.tell_unstaged(version)

    def dirtied(self, node: Node) -> None:
        """The bytes are to be stored once more, as they are."""
        assert not node.body.is_cold, node.ino
        node.body.modified = True
        node.body.modified_since = self._now()
        self.retention.order.discard(node.ino)
        self._table.changed(node)

    # -- versions

    def freeze(self, node: Node, *, quiet: bool) -> Version:
        """The content as it is now, as a version; the caller logs the STORE.

        `quiet`: as `Changes.freeze` has it.
        """
        assert not node.body.is_cold, node.ino
        if node.body.staging:
            return self._freeze_overflow(node, node.body)
        source = node.body.tier
        if node.kernel_writers and quiet:
            self.kernel.mark(node)
        if node.kernel_writers and node.size <= COPY_AT_FREEZE_BYTES_MAX:
            source = self._copied(source, node.size)
        version = self._log.new_version(node.ino, source, node.size)
        self._versions.add(version)
        if node.kernel_writers and source == node.body.tier:
            self.kernel.guard(version, node)
        node.body.frozen()
        self._table.changed(node)
        self._versions.tell_new(version)
        return version

    def _copied(self, source: TierId, size: int) -> TierId:
        """A copy of a tier file; where there is no room for one, slack and all, the file itself."""
        copy = self._tier.create()
        try:
            self._tier.copy(source, copy, size)
        except OSError:
            self._tier.discard(copy)
            return source
        self._tier.settle(copy)
        return copy

    def _freeze_overflow(self, node: Node, body: Body) -> Version:
        body.frozen()
        body.sealed = not body.is_outgrown
        self._table.changed(node)
        version = self._log.new_version(node.ino, NO_TIER, node.size, body.staging)
        self._versions.tell_new(version)
        return version

    def withdrawn(self, node: Node, version: Version) -> None:
        """The version was not the end of it: the node's content goes on from there."""
        if node.body.is_overflowed and node.body.staging == version.staging_name:
            node.body.sealed = False
            self._versions.tell_finished(version)
        elif not version.is_local and node.body.staging != version.staging_name:
            self._overflow.let_go(overflowed(version.staging_name), remove=True)
            self._versions.tell_finished(version)
        else:
            self.finished(version)
        self.kernel.assume_changed(node)
        if node.body.last_writing is Writing.WHOLE:
            node.body.writing = Writing.WHOLE
        self.settled()

    def finished(self, version: Version) -> None:
        """The version is persisted or will never be: its bytes are free to go, unless they are the
        current content.
        """
        self.kernel.forget(version)
        if not version.is_local:
            node = self._table.get(version.ino)
            if (
                node is not None
                and node.body.is_overflowed
                and node.body.staging == version.staging_name
            ):
                self.drop(node)
            self._versions.tell_finished(version)
            return
        self._drop_unreadable(version)
        self._versions.finished(version)
        self._versions.tell_finished(version)

    def keeps_staging(self, version: Version) -> bool:
        """See `Listener`."""
        node = self._table.get(version.ino)
        return (
            node is not None
            and not node.names
            and node.handles > 0
            and node.body.is_overflowed
            and node.body.staging == version.staging_name
        )

    def keep_overflowed(self, version: Version) -> None:
        """The version is given up, and its staging file stays: who has the file open reads and
        writes on there (`keeps_staging`).
        """
        node = self._table[version.ino]
        node.body.sealed = False
        self.kernel.forget(version)
        self._table.changed(node)

    def settled(self) -> None:
        """After the last of `finished` and of what became clean by it: who waits for room may do so
        in vain now.
        """
        self._room.drained()

    def _drop_unreadable(self, version: Version) -> None:
        """A content goes with the copy it lives on, or lived on; one that is on its way back to RAM
        has no need of it soon.
        """
        node = (
            self._table.get(version.ino)
            if version.spilled or self._tier.is_lost(version.tier_id)
            else None
        )
        if (
            node is not None
            and not node.body.is_cold
            and node.body.busy is None
            and node.body.is_on(version)
        ):
            self.drop(node)
            if node.identity is not None and node.size != node.identity[1]:
                # It was given up: the file is what was persisted before it.
                _number, node.size, node.mtime_ns, _ctime = node.identity
                self._table.ask_anew(node)

    async def mark(self, node: Node) -> None:
        """Take over what the kernel wrote, have its later writes leave a trace.

        Waits for the write that is under way, which its application may hold up for ever. A caller
        that dies meanwhile is let go: what its mark leaves is taken for one more write.
        """
        body = node.body
        if not self.kernel.look(node):
            return
        body.marking += 1
        try:
            seen = await wait(self.kernel.mark_behind(body.tier))
        finally:
            body.marking -= 1
        if node.body is body:
            self.kernel.marked(node, seen)

    async def protect(self, node: Node, start: int) -> None:
        """Make bytes from `start` on free for the kernel to write."""
        await self._free(node, start)

    async def _free(self, node: Node, start: int) -> Body:
        """The content, once no version needs its bytes from `start` on: they have a copy, or,
        without room for one, the file moves.
        """
        if self.earlier.may_write(node.body.tier) and not await self.earlier.leave(node.body.tier):
            self.earlier.demand(node)
        while (body := await self._aside.free(node, start)) is None:
            await self._to_overflow(node)
        return body

    def frozen_bytes(self, node: Node) -> int:
        """How many of the first bytes versions still need."""
        return 0 if node.body.is_cold else self._versions.frozen_bytes(node.body.tier)

    def find_earlier_writers(self, targets: Iterable[tuple[Ino, TierId]]) -> None:
        """Which tier files programs of an earlier session can write still, before anything is
        served; what versions they may have written to.

        `targets`: nodes with tier files that were open with it.
        """
        candidates = [*self.kernel.left_open(), *targets]
        self.earlier.find(candidates)
        # also where nobody can any more: until the mount began they could
        for tier_id in {*self.earlier, *(tier_id for _ino, tier_id in candidates)}:
            versions = self._versions.on(tier_id)
            self.kernel.of_dead_session(versions)
            for version in versions:
                self._stage_anew(version)

    def _stage_anew(self, version: Version) -> None:
        """Its file may have been written to since it was staged, or read (X11): what is shown from
        now on is what the file has, so that is what is stored, and copied.

        A later mount does not know that any more, so it is to find no checksum.
        """
        ops = [op for op in self._log.pending_of(version.ino) if op.version is version]
        if version.state is VersionState.COMMITTED or any(op.begun for op in ops):
            return  # it may be there already, and is known by its checksum
        version.state = VersionState.COMPLETE
        self.kernel.renew(version)

    def watch_again(self, node: Node, *, versions_too: bool) -> None:
        """After a takeover: the kernel has been writing all the time.

        `versions_too`: not only behind their ends.
        """
        if versions_too and not node.body.is_cold:
            versions = self._versions.on(node.body.tier)
            mappable = node.kernel_mappers > 0 or node.bound_handles > 0
            self.kernel.watch_again(versions, mappable=mappable)

    def kernel_ended(self, node: Node) -> None:
        """Nobody writes in passthrough any more: what versions see now stays as it is."""
        self.kernel.ended(node, self._versions.on(node.body.tier) if not node.body.is_cold else ())

    async def _before_change(
        self, node: Node, start: int, writing: Writing, half: Half = Half.NO
    ) -> Body:
        """Make bytes from `start` on free to change, and have that recorded, and how they are
        changed.

        A kill after the first changed byte must find the content dirty, and versions on their
        copies. `half`: whether it must find a half.
        """
        while True:
            copied = self._aside.copied_bytes
            body = await self._free(node, start)
            known = writing is Writing.APPENDING or body.writing is Writing.WHOLE
            if not known:
                body.writing = Writing.WHOLE
                self._table.changed(node)
            was_half = body.interrupted
            recorded = (
                body.modified
                and known
                and (half is Half.AS_BEFORE or was_half == (half is Half.YES))
                and copied == self._aside.copied_bytes
            )
            # What is sealed meanwhile is in the version that did so.
            if recorded or (body.is_overflowed and (body.modified or body.sealed)):
                return body
            self._modified(node, body)
            is_half = half is Half.YES or (half is Half.AS_BEFORE and was_half)
            if is_half and not body.is_overflowed:
                self.interrupt(node)
            if half is Half.YES:
                half = Half.AS_BEFORE  # once: who writes to it meanwhile is known, and it is none
            await unlocked(int)  # ends the step: its transaction is committed

    def statistics(self) -> ContentStatistics:
        """What `status`, the metrics and the tests see."""
        clean = self.retention.statistics()
        return ContentStatistics(
            dirty_bytes=self._tier.used_bytes - clean.clean_bytes,
            clean_bytes=clean.clean_bytes,
            clean_files=clean.clean_files,
            retained_bytes=clean.retained_bytes,
            evicted_files=clean.evicted_files,
            evicted_bytes=clean.evicted_bytes,
            copied_aside_bytes=self._aside.copied_bytes,
        )
