"""Bytes of regular files in the RAM tier: life of a content, reading, writing, freezing.

Keeps, with `versions` and `copy_aside`, "a version's bytes do not change before it is persisted" (docs/internals/versions-and-streams.md).
Knows tier files and the operation log; does not know names, handles or where bytes come from when they are not in RAM. Used under the file
system's lock; the coroutines wait as described in `steps`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from acpfs.backing.calls import CallPool, after
from acpfs.filesystem.content import UNSEEN, Content, ContentStatistics, Writing
from acpfs.filesystem.copy_aside import CopyAside
from acpfs.filesystem.kernel_writes import KernelWrites, stamp
from acpfs.filesystem.leaving import LeavingOrder
from acpfs.filesystem.marks import Marks
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.overflow import Overflow
from acpfs.filesystem.remainder import Remainders
from acpfs.filesystem.retention import Retention
from acpfs.filesystem.room import Room
from acpfs.filesystem.steps import shared, uncancelled, unlocked, wait
from acpfs.filesystem.versions import Versions
from acpfs.ram.tier import BLOCK_BYTES, HUGE_PAGE_BYTES, Tier, fallocate
from acpfs.ram.waiting import Purpose
from acpfs.types import NO_TIER, NO_VERSION, TierId, VersionId
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Version
from acpfs.writeback.log.stages import Step

T = TypeVar("T")

INLINE_WRITE_BYTES_MAX = 16 << 10
"""Up to here writing under the lock (about 4 us) costs less than letting it go and taking it again."""

LOOK_AGAIN_S = 0.001
"""Whether writes that are under way have ended, before the bytes move elsewhere."""
FALLOC_PUNCH_HOLE = 2
ALLOCATE_PIECE_BYTES = 32 << 20
"""About 10 ms of zeroing pages."""
COPY_AT_FREEZE_BYTES_MAX = 16 << 20
"""A file that the kernel may go on writing to unseen is frozen by a copy up to here (4 ms); beyond, by watching for changes."""


class Contents:
    """All contents; owner of every tier file."""

    def __init__(
        self,
        tier: Tier,
        log: OperationLog,
        table: NodeTable,
        copies: CallPool,
        overflow: Overflow,
        versions: Versions,
        room: Room,
        order: LeavingOrder,
        marks: Marks,
        remainders: Remainders,
    ) -> None:
        """`copies`: threads for large copies inside the RAM tier; `overflow`: where files go that do not fit; `order`: who leaves first."""
        self._tier, self._log = tier, log
        self._table = table
        self._copies, self._overflow = copies, overflow
        self._versions = versions
        self._room = room
        self.remainders = remainders
        self._aside = CopyAside(tier, versions, room, copies)
        self.kernel = KernelWrites(tier, log, table, copies, self.opened, marks)
        self.retention = Retention(tier, log, table, order, self.drop, self.cut)
        self.writers = 0
        """Open files that may be written to; kept by `OpenFiles`."""
        self.on_writer: Callable[[], None] = lambda: None
        """Called when a file is about to be opened for writing; does not wait."""
        self.on_version: Callable[[Version], None] = lambda _version: None
        """Called when a content was frozen, before its operation is logged; given, like the next one, by `Spilling`."""
        self.on_finished: Callable[[Version], None] = lambda _version: None
        """Called when a version is not needed any more."""
        self._take_over()

    def _take_over(self) -> None:
        """Count who uses which tier file; remove those that nobody uses."""
        for node in self._table:
            if node.content is not None and node.content.overflow:
                pending = (op.version.staging_name for op in self._log.pending_of(node.ino) if op.version is not None)
                node.content.sealed = node.content.overflow in pending
                self._overflow.inherit(node.content)
            elif node.content is not None:
                self._take_over_outgrown(node)
                self._versions.use(node.content.tier_id)
                if not (node.content.spilled or self._tier.is_lost(node.content.tier_id)):
                    self.kernel.resume(node)
                node.content.close()
                self.retention.settle(node)
            elif node.remainder is not None:
                self.retention.settle(node)
        self._versions.remove_unused()

    def _take_over_outgrown(self, node: Node) -> None:
        outgrown = node.content.outgrown if node.content is not None else None
        for op in self._log.pending_of(node.ino):
            if outgrown is not None and op.version is not None and op.version.staging_name == outgrown.name:
                op.take(Step.OUTGROWN)

    # -- life of a content

    def create(self, node: Node) -> Content:
        """Give a node a new, empty content, modified; open if the node is, to be closed with the node's last handle.

        In place of other bytes it is not published before it is complete.
        """
        tier_id, fd = self._tier.create_open()
        if not node.handles:
            os.close(fd)
        content = Content(tier_id, modified=True, modified_since=time.monotonic(), fd=fd if node.handles else -1)
        content.writing = (
            Writing.WHOLE if node.size or (node.content is not None and node.content.writing is Writing.WHOLE) else Writing.APPENDING
        )
        self._versions.use(content.tier_id)
        self._let_go(node)
        node.content, node.size, node.blocks = content, 0, 0
        self._table.changed(node)
        return content

    def adopt(self, node: Node, tier_id: TierId, spilled: VersionId = NO_VERSION) -> None:
        """Give a node a clean content that was read from the backing directory into `tier_id`, or that a version has."""
        self._versions.use(tier_id)
        self._let_go(node)
        node.content = Content(tier_id, spilled=spilled)
        self.retention.settle(node)
        self._table.changed(node)

    def adopt_version(self, node: Node, version: Version) -> None:
        """Give a node the content of a version that is not persisted yet; it may have the first bytes of a tier file that went on."""
        if not version.spilled:
            self._tier.cut(version.tier_id, self._versions.frozen_bytes(version.tier_id))
        self._resized(node, version.size)
        self.adopt(node, version.tier_id, version.vid if version.spilled else NO_VERSION)

    def drop(self, node: Node) -> None:
        """The node's content is not needed any more (evicted, deleted, or outdated)."""
        self._let_go(node)
        self._table.changed(node)

    def cut(self, node: Node, size: int) -> None:
        """Of a content that may leave only the first bytes stay in RAM."""
        content, node.content = node.content, None
        if content is not None:
            content.close()
        self.remainders.cut(node, node.tier_id if content is None else content.tier_id, size)
        self._table.changed(node)

    def _let_go(self, node: Node) -> None:
        content, node.content = node.content, None
        self.retention.forget(node)
        self.remainders.drop(node)
        if content is None:
            return
        if content.outgrown is not None:
            rest = Content(NO_TIER, overflow=content.outgrown.name, fd=content.outgrown.fd)
            self._overflow.let_go(rest, remove=not self._log.unsealed_of(node.ino))
        if content.overflow:
            self._overflow.let_go(content, remove=not content.sealed)
        else:
            content.close()
            self._versions.unuse(content.tier_id)

    def opened(self, content: Content) -> int:
        """The content's descriptor, open from now until `closed`."""
        assert content.tier_id, (content.overflow, content.spilled)
        if content.fd < 0:
            content.fd = self._tier.open(content.tier_id)
        content.closing = False
        return content.fd

    async def _unlocked(self, content: Content, function: Callable[..., T], *arguments: Any) -> T:
        """A system call on the content's descriptor, while others hold the lock."""
        fd = self.opened(content)
        with content.kept_open():
            return await unlocked(function, fd, *arguments)

    def closed(self, node: Node) -> None:
        """The last handle of the node is gone."""
        content = node.content
        if content is not None and content.failed and content.modified and content.outgrown is None:
            self.interrupt(node)
        if content is not None and not content.overflow:
            content.close()
            self.retention.settle(node)
        elif content is None:
            self.retention.settle(node)
        elif not (content.modified or content.sealed):
            self.drop(node)  # brought up to be changed, and then it was not

    def interrupt(self, node: Node) -> None:
        """It is a half: nothing is published or dropped before somebody writes it anew, or decides."""
        assert node.content is not None
        node.content.interrupted = True
        self._table.changed(node)

    async def _to_overflow(self, node: Node) -> None:
        """Move a content out of the RAM tier; versions keep their tier file."""
        content = node.content
        assert content is not None
        if content.busy is not None or content.overflow:
            return
        if node.in_kernel and node.kernel_target == content.tier_id:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the kernel's handles stay on the tier file
        done = shared()
        content.busy, content.moving = done, True
        try:
            while content.in_flight:
                await wait(after(LOOK_AGAIN_S))
            moved = await self._overflow.from_tier(content.tier_id, node.size)
            if node.content is content:
                self.adopt_overflow(node, moved.moved_from(content))
            else:
                self._overflow.let_go(moved, remove=True)
        finally:
            content.busy, content.moving = None, False
            done.set_result(None)

    def staging_in_use(self) -> set[str]:
        """Names of staging files that hold the content of files."""
        return self._overflow.in_use(node.content for node in self._table if node.content is not None)

    def adopt_overflow(self, node: Node, content: Content) -> None:
        """The node's bytes are in a staging file from now on."""
        self._let_go(node)
        node.content = content
        node.blocks = -(-node.size // BLOCK_BYTES)
        self._table.changed(node)

    # -- bytes

    async def read(self, content: Content, offset: int, size: int) -> bytes:
        """Bytes of a tier file; shorter at its end."""
        return await self._unlocked(content, os.pread, size, offset)

    async def write(self, node: Node, offset: int, data: bytes | memoryview, *, by_append: bool = False) -> int:
        """Write to RAM, or where the file overflowed to; all of it or an error. `by_append`: as `Writing.of` has it."""
        try:
            return await self._write(node, offset, data, Writing.of(offset, len(data), node.size, by_append=by_append))
        except InterruptedError:
            raise  # its caller was killed while it waited, and what it wrote before stays what it is
        except OSError as error:
            if node.content is not None and node.content.outgrown is None:
                self.fail(node, error.errno or errno.EIO, offset)
            raise

    def fail(self, node: Node, number: int, at: int) -> None:
        """Bytes that were written at `at` are not there: the file is not published as long as that is so, by no worker."""
        assert node.content is not None
        node.content.failed, node.content.failed_at = number, at
        self._table.changed(node)

    def _mended(self, node: Node, content: Content) -> None:
        if content.failed:
            content.failed = content.failed_at = 0
            self._table.changed(node)

    async def _write(self, node: Node, offset: int, data: bytes | memoryview, writing: Writing) -> int:
        done = await self.change(node, offset, len(data), os.pwrite, data, offset, writing=writing)
        if done is not None:
            return done
        await self._to_overflow(node)
        content = await self._before_change(node, offset, writing)
        return await (self._write_overflow(node, content, offset, data) if content.overflow else self._write(node, offset, data, writing))

    async def change(
        self, node: Node, offset: int, size: int, function: Callable[..., int], *arguments: Any, writing: Writing = Writing.WHOLE
    ) -> int | None:
        """Let a system call on the tier file write up to `size` bytes at `offset`; None: the file has no (more) room in RAM."""
        content = await self._before_change(node, offset, writing)
        if content.overflow:
            return None
        wanted = _pages_wanted(node, offset, size)
        if wanted and not await self._room.reserve(wanted, node):
            return None
        try:
            if wanted:
                content = await self._before_change(node, offset, writing)  # again: much may have happened meanwhile
            return None if content.overflow else await self._change(node, content, offset, size, function, *arguments)
        finally:
            if wanted:
                self._tier.release(wanted)

    async def _change(
        self, node: Node, content: Content, offset: int, size: int, function: Callable[..., int], *arguments: Any
    ) -> int | None:
        try:
            if size <= INLINE_WRITE_BYTES_MAX:
                done = function(self.opened(content), *arguments)
            else:
                done = await self._unlocked(content, function, *arguments)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return None  # writers that the daemon does not see have filled the tmpfs, slack and all
        finally:
            self._settle(node, content)
        self._modified(node, content)
        if offset <= content.failed_at < offset + done:
            self._mended(node, content)
        return done

    async def _write_overflow(self, node: Node, content: Content, offset: int, data: bytes | memoryview) -> int:
        done = await self._overflow.write(content, node.size, offset, data)
        self._resized(node, max(node.size, offset + done))
        self._modified(node, content)
        return done

    def _resized(self, node: Node, size: int) -> None:
        """The next worker cannot learn the length of what overflowed from a tier file, and asks the backing directory nothing."""
        node.size, node.blocks = size, -(-size // BLOCK_BYTES)
        self._table.changed(node)

    async def truncate(self, node: Node, size: int) -> None:
        """Change the length of a file whose content is in RAM."""
        if size == 0:
            await self.empty(node)
            return
        content = await self._before_change(node, min(size, node.size), Writing.APPENDING if size == node.size else Writing.WHOLE)
        if content.overflow:
            await self._overflow.truncate(content, node.size, size)
            self._resized(node, size)
        else:
            os.ftruncate(self.opened(content), size)
            self._settle(node, content)
        self._modified(node, content)
        if size <= content.failed_at:
            self._mended(node, content)

    async def empty(self, node: Node) -> None:
        """Truncate to nothing: a new tier file where a version still needs the old one's bytes, so that nothing is copied."""
        content = node.content
        assert content is not None
        if content.busy is not None:
            await wait(content.busy)
            await self.empty(node)
            return
        if node.in_kernel:
            content = await self._before_change(
                node, 0, Writing.WHOLE if node.size else Writing.APPENDING
            )  # the kernel's handles stay on this tier file
        held_elsewhere = content.overflow or content.spilled or self._tier.is_lost(content.tier_id)
        if held_elsewhere or not content.modified or self._versions.frozen_bytes(content.tier_id) > 0:
            self.create(node)  # clean bytes stay until it is recorded that they are not shown any more
        else:
            content.writing = Writing.WHOLE if node.size else content.writing
            os.ftruncate(self.opened(content), 0)
            self._settle(node, content)
        assert node.content is not None
        self._mended(node, node.content)
        self._modified(node, node.content)

    async def allocate(self, node: Node, mode: int, offset: int, length: int, *, keep_size: bool) -> None:
        """fallocate on the tier file; the pages count against the budget at once."""
        wanted = 0 if mode & FALLOC_PUNCH_HOLE else length
        if wanted and not await self._room.reserve(wanted, node, Purpose.ALLOCATE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            start = offset if mode & ~1 else node.size
            changes = mode & ~1 or not keep_size
            content = await (self._before_change(node, start, Writing.WHOLE) if changes else self._aside.free(node, start))
            if content.overflow:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            if wanted <= ALLOCATE_PIECE_BYTES:
                try:
                    fallocate(self.opened(content), mode, offset, length)
                finally:
                    self._settle(node, content)
            with content.kept_open():
                for start in range(offset, offset + length, ALLOCATE_PIECE_BYTES) if wanted > ALLOCATE_PIECE_BYTES else ():
                    if node.content is not content:  # truncated meanwhile: that comes after what is done
                        return
                    size = min(ALLOCATE_PIECE_BYTES, offset + length - start)
                    await self._allocate_piece(node, content, mode, start, size)
                    self._tier.release(size)
                    wanted -= size
        finally:
            self._tier.release(wanted)
        if changes:
            self._modified(node, content)

    async def _allocate_piece(self, node: Node, content: Content, mode: int, offset: int, length: int) -> None:
        """In a thread and without the lock: 4 GiB take seconds, during which nobody else would get anywhere."""
        try:
            await wait(uncancelled(self._copies.submit("allocate", fallocate, self.opened(content), mode, offset, length)))
        finally:
            self._settle(node, content)

    def _settle(self, node: Node, content: Content) -> None:
        if self._versions.is_used(content.tier_id):  # else it was let go of while the bytes were on their way
            st = self._tier.settle_fd(content.tier_id, self.opened(content))
            if node.content is content:
                self.kernel.note(node, UNSEEN)
                node.size, node.blocks = st.st_size, st.st_blocks

    def read_in_kernel(self, node: Node) -> None:
        """A reader in the passthrough lane is gone. Holes that it read through a mapping have pages now, which nobody saw come."""
        content = node.content
        if content is not None and content.in_ram:
            node.blocks = self._tier.settle_fd(content.tier_id, self.opened(content)).st_blocks
            if self._tier.free_bytes(urgent=True) < 0:
                self._tier.room_changed()

    def _modified(self, node: Node, content: Content) -> None:
        node.touch()
        if content.sealed:
            self._in_sealed(node, content)
        elif not content.modified or content.interrupted:
            content.modified, content.interrupted, content.modified_since = True, False, time.monotonic()
            self.retention.forget(node)
            self._table.changed(node)

    def _in_sealed(self, node: Node, content: Content) -> None:
        """A write that was under way when another descriptor was closed is in the version that this made, which waited for it."""
        for op in self._log.pending_of(node.ino):
            if op.version is not None and op.version.staging_name == content.overflow:
                op.version.size = node.size
                self._log.save_version(op.version)
        self._table.changed(node)

    def still_frozen(self, version: Version) -> bool:
        """See `Listener`."""
        return self.kernel.still_frozen(version) if version.is_local else not self._overflow.is_changing(version.staging_name)

    def restaged(self, version: Version, before: str) -> None:
        """See `Listener`. Nobody writes to either: the content is sealed."""
        node = self._table.get(version.ino)
        if node is not None and node.content is not None and node.content.overflow == before:
            node.content.overflow = version.staging_name
            self._table.changed(node)

    def dirtied(self, node: Node) -> None:
        """The bytes are to be stored once more, as they are."""
        assert node.content is not None
        node.content.modified, node.content.modified_since = True, time.monotonic()
        self.retention.forget(node)
        self._table.changed(node)

    # -- versions

    def freeze(self, node: Node, *, quiet: bool) -> Version:
        """The content as it is now, as a version; the caller logs the STORE. `quiet`: as `Changes.freeze` has it."""
        assert node.content is not None
        if node.content.overflow or node.content.outgrown is not None:
            return self._freeze_overflow(node, node.content)
        source = node.content.tier_id
        if node.kernel_writers and quiet:
            self.kernel.mark(node)
        if node.kernel_writers and node.size <= COPY_AT_FREEZE_BYTES_MAX:
            source = self._copied(source, node.size)
        version = self._log.new_version(node.ino, source, node.size)
        self._versions.add(version)
        if node.kernel_writers and source == node.content.tier_id:
            self.kernel.guard(version, node)
        node.content.frozen()
        self._table.changed(node)
        self.on_version(version)
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

    def _freeze_overflow(self, node: Node, content: Content) -> Version:
        content.frozen()
        content.sealed = content.outgrown is None
        self._table.changed(node)
        return self._log.new_version(
            node.ino, NO_TIER, node.size, content.outgrown.name if content.outgrown is not None else content.overflow
        )

    def withdrawn(self, node: Node, version: Version) -> None:
        """The version was not the end of it: the node's content goes on from there."""
        assert node.content is not None
        if node.content.overflow and node.content.overflow == version.staging_name:
            node.content.sealed = False
        else:
            self.finished(version)
        self.kernel.assume_changed(node)
        if node.content.last_writing is Writing.WHOLE:
            node.content.writing = Writing.WHOLE
        self.settled()

    def finished(self, version: Version) -> None:
        """The version is persisted or will never be: its bytes are free to go, unless they are the current content."""
        self.kernel.forget(version)
        if not version.is_local:
            node = self._table.get(version.ino)
            if node is not None and node.content is not None and node.content.overflow == version.staging_name:
                self.drop(node)
            return
        self._drop_unreadable(version)
        self._versions.finished(version)
        self.on_finished(version)

    def settled(self) -> None:
        """After the last of `finished` and of what became clean by it: who waits for room may do so in vain now."""
        self._room.look_again()

    def _drop_unreadable(self, version: Version) -> None:
        """A content goes with the copy it lives on, or lived on; one that is on its way back to RAM has no need of it soon."""
        node = self._table.get(version.ino) if version.spilled or self._tier.is_lost(version.tier_id) else None
        if node is not None and node.content is not None and node.content.busy is None and node.content.is_on(version):
            self.drop(node)

    async def mark(self, node: Node, *, behind: bool = False) -> None:
        """Take over what the kernel wrote, have its later writes leave a trace. `behind`: another thread waits for the one under way."""
        content = node.content
        if content is None or content.overflow or not self.kernel.look(node):
            return
        seen = await (wait(self.kernel.mark_behind(content.tier_id)) if behind else self._unlocked(content, stamp))
        if node.content is content:
            self.kernel.note(node, seen)

    async def protect(self, node: Node, start: int) -> None:
        """Make bytes from `start` on free for the kernel to write."""
        await self._aside.free(node, start)

    def frozen_bytes(self, node: Node) -> int:
        """How many of the first bytes versions still need."""
        return 0 if node.content is None else self._versions.frozen_bytes(node.content.tier_id)

    def watch_again(self, node: Node, *, versions_too: bool) -> None:
        """After a takeover: the kernel has been writing all the time. `versions_too`: not only behind their ends."""
        if versions_too and node.content is not None:
            self.kernel.watch_again(self._versions.on(node.content.tier_id))

    def kernel_ended(self, node: Node) -> None:
        """Nobody writes in passthrough any more: what versions see now stays as it is."""
        self.kernel.ended(node, self._versions.on(node.content.tier_id) if node.content is not None else ())

    async def _before_change(self, node: Node, start: int, writing: Writing) -> Content:
        """Make bytes from `start` on free to change, and have that recorded, and how they are changed.

        A kill after the first changed byte must find the content dirty, and versions on their copies.
        """
        while True:
            copied = self._aside.copied_bytes
            content = await self._aside.free(node, start)
            known = writing is Writing.APPENDING or content.writing is Writing.WHOLE
            if not known:
                content.writing = Writing.WHOLE
                self._table.changed(node)
            if content.overflow or (content.modified and known and not content.interrupted and copied == self._aside.copied_bytes):
                return content
            self._modified(node, content)
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


def _pages_wanted(node: Node, offset: int, size: int) -> int:
    """Bytes of RAM that a write may take. In a hole the kernel fills whole huge pages, however little is written."""
    if offset + size > node.size:
        return size
    if node.blocks * BLOCK_BYTES >= node.size:
        return 0
    start, end = offset // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, -(-(offset + size) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return min(end, node.size) - start
