"""Bytes of regular files in the RAM tier: reading, writing, freezing, copying aside, eviction.

The one place that keeps "a version's bytes do not change before it is persisted" (docs/ARCHITECTURE.md, "Versions"). Knows tier files and
the operation log; does not know names, handles or where bytes come from when they are not in RAM. Used under the file system's lock; the
coroutines wait as described in `steps`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from acpfs.backing.calls import CallPool
from acpfs.config import WhenFull
from acpfs.filesystem.content import UNSEEN, Content, ContentStatistics
from acpfs.filesystem.kernel_writes import KernelWrites, stamp
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.overflow import Overflow
from acpfs.filesystem.steps import unlocked, wait
from acpfs.ram.tier import BLOCK_BYTES, Tier, fallocate
from acpfs.types import NO_TIER, Ino, TierId
from acpfs.writeback.log import OperationLog
from acpfs.writeback.ops import Version

T = TypeVar("T")

INLINE_WRITE_BYTES_MAX = 16 << 10
"""Up to here writing under the lock (about 4 us) costs less than letting it go and taking it again."""

INLINE_COPY_BYTES_MAX = 1 << 20
"""Up to here a copy under the lock (about 0.3 ms) is cheaper than a thread switch with everybody else let in between."""

COPY_AT_FREEZE_BYTES_MAX = 16 << 20
"""A file that the kernel may go on writing to unseen is frozen by a copy up to here (4 ms); beyond, by watching for changes."""


class Contents:
    """All contents; owner of every tier file."""

    def __init__(self, tier: Tier, log: OperationLog, table: NodeTable, copies: CallPool, overflow: Overflow, when_full: WhenFull) -> None:
        """`copies`: threads for large copies inside the RAM tier; `overflow`: where files go that do not fit."""
        self._tier = tier
        self._log = log
        self._table = table
        self._copies = copies
        self._overflow = overflow
        self._when_full = when_full
        self._users: Counter[TierId] = Counter()
        self._frozen: dict[TierId, list[Version]] = {}
        self.kernel = KernelWrites(tier, log, table, copies, self.opened)
        self._clean: OrderedDict[Ino, None] = OrderedDict()
        self._evicted_files = self._evicted_bytes = self._copied_aside_bytes = 0
        self.writers = 0
        """Open files that may be written to; kept by `Files`."""
        self.on_writer: Callable[[], None] = lambda: None
        """Called when a file is about to be opened for writing; does not wait."""
        self.read_gone: Callable[[Content, int, int], Awaitable[bytes]]
        """Reads a content of which pieces are in a staging file; given by `Spills`."""
        tier.make_room = self.evict_bytes
        self._take_over()

    def _take_over(self) -> None:
        """Count who uses which tier file; remove those that nobody uses."""
        for node in self._table:
            if node.content is not None and node.content.overflow:
                pending = (op.version.staging_name for op in self._log.pending_of(node.ino) if op.version is not None)
                node.content.sealed = node.content.overflow in pending
            elif node.content is not None:
                self._take_over_spill(node)
                self._users[node.content.tier_id] += 1
                if (node.content.modified or self._is_of_other_size(node)) and not self.kernel.as_recorded(node):
                    self.kernel.look(node)  # written since its row was
                    self._close(node.content)
                self.settle_state(node)
        for op in self._log:
            if op.version is not None and op.version.tier_id:
                self._freeze(op.version)
        for tier_id in self._tier.ids():
            if not self._users[tier_id]:
                self._tier.remove(tier_id)

    def _is_of_other_size(self, node: Node) -> bool:
        """The last worker did not live to note a write or truncation of a clean file, by itself or (in passthrough) by the kernel."""
        assert node.content is not None
        return node.content.spill is None and self._tier.stat(node.content.tier_id).st_size != node.size

    def _take_over_spill(self, node: Node) -> None:
        spill = node.content.spill if node.content is not None else None
        for op in self._log.pending_of(node.ino):
            op.unsealed = spill is not None and op.version is not None and op.version.staging_name == spill.name

    def _freeze(self, version: Version) -> None:
        self._users[version.tier_id] += 1
        self._frozen.setdefault(version.tier_id, []).append(version)

    # -- life of a content

    def create(self, node: Node) -> Content:
        """Give a node a new, empty content, modified; open if the node is, to be closed with the node's last handle."""
        tier_id, fd = self._tier.create_open()
        if not node.handles:
            os.close(fd)
        content = Content(tier_id, modified=True, modified_since=time.monotonic(), fd=fd if node.handles else -1)
        self._users[content.tier_id] += 1
        self._let_go(node)
        node.content, node.size, node.blocks = content, 0, 0
        self._table.changed(node)
        return content

    def adopt(self, node: Node, tier_id: TierId) -> None:
        """Give a node a clean content that was read from the backing directory into `tier_id`."""
        self._users[tier_id] += 1
        self._let_go(node)
        node.content = Content(tier_id)
        self.settle_state(node)
        self._table.changed(node)

    def drop(self, node: Node) -> None:
        """The node's content is not needed any more (evicted, deleted, or outdated)."""
        self._let_go(node)
        self._table.changed(node)

    def _let_go(self, node: Node) -> None:
        content, node.content = node.content, None
        self._clean.pop(node.ino, None)
        if content is None:
            return
        if content.spill is not None:
            rest = Content(NO_TIER, overflow=content.spill.name, fd=content.spill.fd)
            self._overflow.let_go(rest, remove=not self._log.unsealed_of(node.ino))
        if content.overflow:
            self._overflow.let_go(content, remove=not content.sealed)
        else:
            self._close(content)
            self._unuse(content.tier_id)

    def _unuse(self, tier_id: TierId) -> None:
        self._users[tier_id] -= 1
        if not self._users[tier_id]:
            del self._users[tier_id]
            self._tier.remove(tier_id)

    def opened(self, content: Content) -> int:
        """The content's descriptor, open from now until `closed`."""
        assert not content.overflow, content.overflow
        if content.fd < 0:
            content.fd = self._tier.open(content.tier_id)
        content.closing = False
        return content.fd

    async def _unlocked(self, content: Content, function: Callable[..., T], *arguments: Any) -> T:
        """A system call on the content's descriptor, while others hold the lock."""
        fd = self.opened(content)
        content.in_flight += 1
        try:
            return await unlocked(function, fd, *arguments)
        finally:
            content.in_flight -= 1
            if content.closing and not content.in_flight:
                self._close(content)

    def closed(self, node: Node) -> None:
        """The last handle of the node is gone."""
        content = node.content
        if content is not None and not content.overflow:
            self._close(content)
            self.settle_state(node)
        elif content is not None and not (content.modified or content.sealed):
            self.drop(node)  # brought up to be changed, and then it was not

    @staticmethod
    def _close(content: Content) -> None:
        if content.in_flight:
            content.closing = True
        elif content.fd >= 0:
            os.close(content.fd)
            content.fd, content.closing = -1, False

    def settle_state(self, node: Node) -> None:
        """Note whether the node's content may be evicted: clean, closed, equal to what the backing directory has."""
        content = node.content
        clean = (
            content is not None
            and not content.overflow
            and content.spill is None
            and not content.modified
            and not self._log.is_pending(node.ino)
            and node.handles == 0
            and node.identity is not None
        )
        if clean:
            self._clean[node.ino] = None
            self._clean.move_to_end(node.ino)
            self._tier.room_changed()
        else:
            self._clean.pop(node.ino, None)

    # -- room

    async def room(self, size: int) -> bool:
        """Reserve bytes of the budget, waiting for them where that can help; the caller releases them after settling.

        False: there will be no room, the file has to overflow to the backing directory.

        Raises:
            OSError: ENOSPC when that is the policy.
        """
        if self._tier.reserve_nowait(size):
            return True
        if self._when_full is WhenFull.ERROR:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._when_full is WhenFull.NATIVE or not self._frozen:
            return False
        with contextlib.suppress(OSError):  # ENOSPC: everything that could have made room is done
            await wait(self._tier.reserve(size))
            return True
        return False

    def awaits_drain(self) -> bool:
        """Whether anything is left that makes room when it is persisted."""
        return bool(self._frozen)

    async def _to_overflow(self, node: Node) -> None:
        """Move a content out of the RAM tier; versions keep their tier file."""
        content = node.content
        assert content is not None
        if node.in_kernel:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the kernel's handles stay on the tier file
        if content.busy is not None or content.overflow:
            return
        done: Future[None] = Future()
        content.busy = done
        try:
            while content.in_flight:
                await wait(self._copies.submit("let writes finish", time.sleep, 0.001))
            moved = await self._overflow.from_tier(content.tier_id, node.size)
            if node.content is content:
                moved.modified, moved.modified_since = content.modified, content.modified_since
                self.adopt_overflow(node, moved)
            else:
                self._overflow.let_go(moved, remove=True)
        finally:
            content.busy = None
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

    def evict_bytes(self, wanted: int) -> None:
        """Let clean contents go, least recently used first, until so many bytes are free."""
        freed = 0
        while freed < wanted and self._clean:
            node = self._table[next(iter(self._clean))]
            if self._log.is_pending(node.ino):
                del self._clean[node.ino]  # renamed or the like since it was clean; it comes back when that is persisted
                continue
            freed += self.evict(node)

    def evict(self, node: Node) -> int:
        """Give up a clean content; returns the bytes that came free."""
        assert node.content is not None
        assert not node.content.modified, node.ino
        assert not self._log.is_pending(node.ino), node.ino
        taken = self._tier.allocated_bytes(node.content.tier_id)
        self._evicted_files += 1
        self._evicted_bytes += taken
        self.drop(node)
        return taken

    # -- bytes

    async def read(self, node: Node, offset: int, size: int) -> bytes:
        """Bytes from RAM; shorter at the end of the file."""
        assert node.content is not None
        if node.content.overflow:
            return await self._overflow.read(node.content, offset, size)
        if node.content.spill is not None:
            return await self.read_gone(node.content, offset, size)
        return await self._unlocked(node.content, os.pread, size, offset)

    async def read_into(self, node: Node, offset: int, buffer: memoryview) -> int:
        """Like `read`, into the caller's buffer."""
        assert node.content is not None
        if node.content.overflow or node.content.spill is not None:
            data = await self.read(node, offset, len(buffer))
            buffer[: len(data)] = data
            return len(data)
        return await self._unlocked(node.content, os.preadv, [buffer], offset)

    async def write(self, node: Node, offset: int, data: bytes | memoryview) -> int:
        """Write to RAM, or where the file overflowed to; all of it or an error."""
        try:
            return await self._write(node, offset, data)
        except OSError as error:
            if node.content is not None and node.content.spill is None:
                node.content.failed, node.content.failed_at = error.errno or errno.EIO, offset
            raise

    async def _write(self, node: Node, offset: int, data: bytes | memoryview) -> int:
        done = await self.change(node, offset, len(data), os.pwrite, data, offset)
        if done is not None:
            return done
        await self._to_overflow(node)
        content = await self._before_change(node, offset)
        return await (self._write_overflow(node, content, offset, data) if content.overflow else self._write(node, offset, data))

    async def change(self, node: Node, offset: int, size: int, function: Callable[..., int], *arguments: Any) -> int | None:
        """Let a system call on the tier file write up to `size` bytes at `offset`; None: the file has no (more) room in RAM."""
        content = await self._before_change(node, offset)
        if content.overflow:
            return None
        wanted = size if offset + size > node.size or node.blocks * BLOCK_BYTES < node.size else 0
        if wanted:
            if not await self.room(wanted):
                return None
            content = await self._before_change(node, offset)
            if content.overflow:
                self._tier.release(wanted)
                return None
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
            if wanted:
                self._tier.release(wanted)
        self._modified(node, content)
        if content.failed and offset <= content.failed_at < offset + done:
            content.failed = 0
        return done

    async def _write_overflow(self, node: Node, content: Content, offset: int, data: bytes | memoryview) -> int:
        done = await self._overflow.write(content, offset, data)
        self._resized(node, max(node.size, offset + done))
        self._modified(node, content)
        return done

    @staticmethod
    def _resized(node: Node, size: int) -> None:
        node.size, node.blocks = size, -(-size // BLOCK_BYTES)

    async def truncate(self, node: Node, size: int) -> None:
        """Change the length of a file whose content is in RAM."""
        if size == 0:
            await self.empty(node)
            return
        content = await self._before_change(node, min(size, node.size))
        if content.overflow:
            await self._overflow.truncate(content, size)
            self._resized(node, size)
        else:
            os.ftruncate(self.opened(content), size)
            self._settle(node, content)
        self._modified(node, content)
        if size <= content.failed_at:
            content.failed = 0

    async def empty(self, node: Node) -> None:
        """Truncate to nothing: a new tier file where a version still needs the old one's bytes, so that nothing is copied."""
        content = node.content
        assert content is not None
        if content.busy is not None:
            await wait(content.busy)
            await self.empty(node)
            return
        if node.in_kernel:
            content = await self._before_change(node, 0)  # the kernel's handles stay on this tier file
        if content.overflow or self._frozen_bytes(content) > 0:
            self.create(node)
        else:
            os.ftruncate(self.opened(content), 0)
            self._settle(node, content)
        assert node.content is not None
        node.content.failed = 0
        self._modified(node, node.content)

    async def allocate(self, node: Node, mode: int, offset: int, length: int, *, keep_size: bool) -> None:
        """fallocate on the tier file; the pages count against the budget at once."""
        if not await self.room(length):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        change = self._before_change if mode & ~1 or not keep_size else self._free
        content = await change(node, offset if mode & ~1 else node.size)
        if content.overflow:
            self._tier.release(length)
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        try:
            fallocate(self.opened(content), mode, offset, length)
        finally:
            self._settle(node, content)
            self._tier.release(length)
        if mode & ~1 or not keep_size:
            self._modified(node, content)

    def _settle(self, node: Node, content: Content) -> None:
        if self._users[content.tier_id]:  # else it was let go of while the bytes were on their way
            st = self._tier.settle_fd(content.tier_id, self.opened(content))
            content.seen = UNSEEN
            if node.content is content:
                node.size, node.blocks = st.st_size, st.st_blocks

    def _modified(self, node: Node, content: Content) -> None:
        node.touch()
        if not content.modified or content.interrupted:
            content.modified, content.interrupted, content.modified_since = True, False, time.monotonic()
            self._clean.pop(node.ino, None)
            self._table.changed(node)

    def dirtied(self, node: Node) -> None:
        """The bytes are to be stored once more, as they are."""
        assert node.content is not None
        node.content.modified, node.content.modified_since = True, time.monotonic()
        self._clean.pop(node.ino, None)
        self._table.changed(node)

    # -- versions

    def freeze(self, node: Node, *, quiet: bool) -> Version:
        """The content as it is now, as a version; the caller logs the STORE. `quiet`: as `Changes.freeze` has it."""
        assert node.content is not None
        if node.content.overflow or node.content.spill is not None:
            return self._freeze_overflow(node, node.content)
        source = node.content.tier_id
        if node.kernel_writers and quiet:
            self.kernel.mark(node)
        if node.kernel_writers and node.size <= COPY_AT_FREEZE_BYTES_MAX:
            source = self._tier.create()
            self._tier.copy(node.content.tier_id, source, node.size)
            self._tier.settle(source)
        version = self._log.new_version(node.ino, source, node.size)
        self._freeze(version)
        if node.kernel_writers and source == node.content.tier_id:
            self.kernel.guard(version, node)
        node.content.modified = node.content.interrupted = False
        self._table.changed(node)
        return version

    def _freeze_overflow(self, node: Node, content: Content) -> Version:
        content.modified, content.interrupted, content.sealed = False, False, content.spill is None
        self._table.changed(node)
        return self._log.new_version(node.ino, NO_TIER, node.size, content.spill.name if content.spill is not None else content.overflow)

    def withdrawn(self, node: Node, version: Version) -> None:
        """The version was not the end of it: the node's content goes on from there."""
        assert node.content is not None
        if node.content.overflow and node.content.overflow == version.staging_name:
            node.content.sealed = False
        else:
            self.finished(version)
        self.kernel.assume_changed(node)

    def finished(self, version: Version) -> None:
        """The version is persisted or will never be: its bytes are free to go, unless they are the current content."""
        self.kernel.forget(version)
        if not version.tier_id:
            node = self._table.get(version.ino)
            if node is not None and node.content is not None and node.content.overflow == version.staging_name:
                self.drop(node)
            return
        versions = self._frozen[version.tier_id]
        versions.remove(version)
        if not versions:
            del self._frozen[version.tier_id]
        self._unuse(version.tier_id)
        if not self._frozen:
            self._tier.fail_waiting(errno.ENOSPC)  # nothing is left that could make room

    async def mark(self, node: Node, *, behind: bool = False) -> None:
        """Take over what the kernel wrote, have its later writes leave a trace. `behind`: another thread waits for the one under way."""
        content = node.content
        if content is None or content.overflow or not self.kernel.look(node):
            return
        content.seen = await (wait(self.kernel.mark_behind(content.tier_id)) if behind else self._unlocked(content, stamp))

    async def protect(self, node: Node, start: int) -> None:
        """Make bytes from `start` on free for the kernel to write."""
        await self._free(node, start)

    def frozen_bytes(self, node: Node) -> int:
        """How many of the first bytes versions still need."""
        return 0 if node.content is None else self._frozen_bytes(node.content)

    def watch_again(self, node: Node, *, versions_too: bool) -> None:
        """After a takeover: the kernel has been writing all the time. `versions_too`: not only behind their ends."""
        if node.content is not None and not node.content.overflow:
            self.kernel.watch_again(node, self._frozen.get(node.content.tier_id, ()) if versions_too else ())

    def unguard(self, node: Node) -> None:
        """Nobody writes in passthrough any more: what versions see now stays as it is."""
        if node.content is not None:
            self.kernel.unguard(self._frozen.get(node.content.tier_id, ()))

    def _frozen_bytes(self, content: Content) -> int:
        """How many of the first bytes belong to a version and must not change."""
        versions = self._frozen.get(content.tier_id)
        return max(v.size for v in versions) if versions else 0

    async def _before_change(self, node: Node, start: int) -> Content:
        """Make bytes from `start` on free to change, and have that recorded.

        A kill after the first changed byte must find the content dirty, and versions on their copies.
        """
        while True:
            copied = self._copied_aside_bytes
            content = await self._free(node, start)
            if content.overflow or (content.modified and not content.interrupted and copied == self._copied_aside_bytes):
                return content
            self._modified(node, content)
            await unlocked(int)  # ends the step: its transaction is committed

    async def _free(self, node: Node, start: int) -> Content:
        """Copy aside what versions need of the bytes from `start` on."""
        while True:
            content = node.content
            assert content is not None, node.ino
            if content.spill is not None:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # through the path, while it outgrows RAM in passthrough
            if content.busy is not None:
                await wait(content.busy)
                continue
            frozen = self._frozen_bytes(content)
            if frozen <= start:
                return content
            await self._copy_aside(content, frozen)

    async def _copy_aside(self, content: Content, size: int) -> None:
        """Give the versions on this tier file a copy of their own."""
        done: Future[None] = Future()
        content.busy = done
        try:
            if not await self.room(size):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            target = self._tier.create()
            try:
                await self._copy(content.tier_id, target, size)
            except BaseException:
                self._tier.remove(target)
                raise
            finally:
                self._tier.release(size)
            self._tier.settle(target)
            self._move_versions(content.tier_id, target)
            self._copied_aside_bytes += size
        finally:
            content.busy = None
            done.set_result(None)

    async def _copy(self, source: TierId, target: TierId, size: int) -> None:
        if size <= INLINE_COPY_BYTES_MAX:
            self._tier.copy(source, target, size)
        else:
            await wait(self._copies.submit("copy aside", self._tier.copy, source, target, size))

    def _move_versions(self, source: TierId, target: TierId) -> None:
        moved = self._frozen.pop(source, [])
        for version in moved:
            version.tier_id = target
            self._log.save_version(version)
            self._users[source] -= 1
            self._freeze(version)
        if not moved:
            self._tier.remove(target)  # they were all persisted meanwhile

    def statistics(self) -> ContentStatistics:
        """What `status`, the metrics and the tests see."""
        clean = 0
        for ino in self._clean:
            content = self._table[ino].content
            assert content is not None
            clean += self._tier.allocated_bytes(content.tier_id)
        return ContentStatistics(
            dirty_bytes=self._tier.used_bytes - clean,
            clean_bytes=clean,
            clean_files=len(self._clean),
            evicted_files=self._evicted_files,
            evicted_bytes=self._evicted_bytes,
            copied_aside_bytes=self._copied_aside_bytes,
        )
