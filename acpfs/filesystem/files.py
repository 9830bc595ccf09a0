"""Open files: open, create, read, write, truncate, flush, fsync, release, fallocate, lseek.

Decides when a file's content is fixed (a version): FLUSH of a descriptor that wrote, fsync, rename, link, and RELEASE when
the kernel sent no FLUSH. Where the bytes are is `Contents`' and `LowerView`'s business.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import Counter

from acpfs.backing.lower import LowerStat
from acpfs.config import FsyncMode
from acpfs.filesystem.admission import Admission
from acpfs.filesystem.attributes import AttributeCalls
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.contents import COPY_AT_FREEZE_BYTES_MAX, Contents
from acpfs.filesystem.copy_range import copy_pieces
from acpfs.filesystem.hold import Hold
from acpfs.filesystem.kept_handles import Handle, KeptHandles
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.names import Names, fail
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.overflow import Overflow
from acpfs.filesystem.records import Caller, Lane, OpenFile
from acpfs.filesystem.spill import Spills
from acpfs.filesystem.steps import wait
from acpfs.ram.kept import Kept
from acpfs.ram.tier import Tier
from acpfs.types import HandleId, Ino, Seq, TierId
from acpfs.writeback.log import OperationLog
from acpfs.writeback.ops import Op

FALLOC_KEEP_SIZE = 1
COPY_RANGE_BYTES_MAX = 128 << 20
"""One request copies at most this (about 50 ms of a reader thread); the caller asks for the rest."""
LAST_CLOSE_WAIT_S = 5.0
"""A descriptor that stays open in another process, and is not written to, holds up the drain no longer than this."""


class Files:
    """Calls on open files."""

    def __init__(
        self,
        table: NodeTable,
        lanes: Lanes,
        names: Names,
        attributes: AttributeCalls,
        view: LowerView,
        changes: Changes,
        contents: Contents,
        overflow: Overflow,
        admission: Admission,
        hold: Hold,
        spills: Spills,
        tier: Tier,
        log: OperationLog,
        kept: Kept,
    ) -> None:
        self._table = table
        self._lanes = lanes
        self._names = names
        self._attributes = attributes
        self._view = view
        self._changes = changes
        self._contents = contents
        self._overflow = overflow
        self._admission = admission
        self._hold = hold
        self._spills = spills
        self._tier = tier
        self._log = log
        self._kept = KeptHandles(kept)
        self._handles: dict[HandleId, Handle] = {}
        self._last_handle = kept.first_number
        self._unanswered: dict[int, Handle] = {}
        """Request → open file of the last worker that it opened; some of these requests come again."""

    def handle(self, number: HandleId) -> Handle:
        """The open file of a number.

        Raises:
            OSError: EBADF when there is none.
        """
        handle = self._handles.get(number)
        if handle is None:
            raise fail(errno.EBADF)
        return handle

    def is_open(self, number: HandleId) -> bool:
        """Whether there is an open file of that number."""
        return number in self._handles

    def open_nodes(self) -> set[Node]:
        """Nodes that somebody has open."""
        return {handle.node for handle in self._handles.values()}

    def lane_of(self, node: Node) -> str:
        """How a file's bytes travel now, or would at the next open for reading."""
        if node.kernel_handles:
            return Lane.PASSTHROUGH.value
        return self._lanes.daemon_lane.value if node.handles else "-"

    def open_lanes(self) -> dict[str, int]:
        """Lane → open files that use it."""
        used = Counter(handle.lane.value for handle in self._handles.values())
        return {lane: used[lane] for lane in {*self._lanes.offered(), *used}}

    def __len__(self) -> int:
        return len(self._handles)

    # -- opening and closing

    async def open(self, ino: Ino, flags: int, caller: Caller) -> OpenFile:
        """Open an existing regular file; close-to-open: its attributes are renewed first."""
        node = self._names.node(ino)
        if self._unanswered:
            self._forget_unanswered(caller.unique)
        await self._view.renew(node)
        node.handles += 1  # from here on its content may not be evicted
        try:
            if flags & os.O_TRUNC:
                await self._truncate(node, 0)
            elif flags & os.O_ACCMODE != os.O_RDONLY:
                await self._bring_up(node)
        except BaseException:
            self._closed(node)
            raise
        return await self._opened(node, flags, caller, wrote=bool(flags & os.O_TRUNC))

    async def _opened(self, node: Node, flags: int, caller: Caller, *, wrote: bool, created: bool = False) -> OpenFile:
        try:
            await self._spills.closed_in_the_kernel(node)
        except BaseException:
            self._closed(node)
            raise
        self._last_handle += 1
        handle = Handle(HandleId(self._last_handle), node, flags, pid=caller.pid, wrote=wrote, unique=caller.unique, created=created)
        if handle.writable:
            self._contents.on_writer()
        try:
            backing_fd = await self._take_lane(handle)
        except BaseException:
            node.bound_handles -= handle.bound
            self._closed(node)
            raise
        self._handles[handle.number] = handle
        self._kept.opened(handle)
        self._contents.writers += handle.writable
        keep, node.keep_cache = node.keep_cache, True
        self._contents.settle_state(node)
        if handle.writable and node.names:
            self._attributes.foresee_fsync(self._table[node.names[0][0]])
        return OpenFile(handle.number, keep, handle.lane, backing_fd)

    async def _take_lane(self, handle: Handle) -> int:
        """Decide the handle's lane; returns the descriptor for the kernel, -1 outside passthrough."""
        node = handle.node
        if handle.writable and not handle.flags & os.O_APPEND and self._contents.frozen_bytes(node) > COPY_AT_FREEZE_BYTES_MAX:
            lane = self._lanes.daemon_lane  # bytes that versions need are copied aside only where they are really changed
        else:
            lane = self._choose(handle)
        if lane is Lane.PASSTHROUGH and node.content is None:
            handle.lower_fd = await self._view.open_lower(node)
            lane = self._choose(handle)  # much may have happened meanwhile
        handle.lane = lane
        if lane is not Lane.PASSTHROUGH:
            if self._lanes.bind(handle):
                await self._expect_kernel_writes(node, 0)
                handle.unseen = True
            node.daemon_mappers += handle.may_map
            return -1
        if handle.writable:
            await self._expect_kernel_writes(node, node.size if handle.flags & os.O_APPEND else 0)
            self._hold.add(node)
        node.kernel_handles += 1
        node.kernel_target = node.content.tier_id if node.content is not None else TierId(0)
        return self._contents.opened(node.content) if node.content is not None else handle.lower_fd

    async def _expect_kernel_writes(self, node: Node, start: int) -> None:
        await self._contents.protect(node, start)
        if not (node.kernel_writers or node.modified):
            self._contents.kernel.mark_clean(node)
        node.kernel_writers += 1

    def _choose(self, handle: Handle) -> Lane:
        return self._lanes.choose(handle.node, handle.flags, lambda: self._admission.refuse(handle.node, handle.pid))

    def refuse_passthrough(self, number: HandleId) -> None:
        """The kernel would not take the file: the handle goes on in the daemon's lane."""
        handle = self.handle(number)
        self._leave_lane(handle)
        handle.lane, handle.bound = self._lanes.daemon_lane, False
        handle.node.daemon_mappers += handle.may_map
        self._kept.changed(handle)

    def _leave_lane(self, handle: Handle) -> None:
        node = handle.node
        if handle.lane is not Lane.PASSTHROUGH:
            node.daemon_mappers -= handle.may_map
            node.bound_handles -= handle.bound
        else:
            node.kernel_handles -= 1
        if handle.unseen or (handle.lane is Lane.PASSTHROUGH and handle.writable):
            self._look(handle)
            node.kernel_writers -= 1
            if not node.kernel_writers:
                self._admission.settle(node)
                self._contents.unguard(node)

    def _look(self, handle: Handle) -> None:
        """Whether the kernel wrote for this handle; of a mapping it does not tell, so that is assumed."""
        self._contents.kernel.look(handle.node)
        content = handle.node.content  # a stat meanwhile may have looked before: then the content is modified, by whichever handle
        handle.wrote = handle.wrote or (content is not None and content.modified)
        if handle.unseen:
            handle.wrote = True
            self._contents.kernel.assume_changed(handle.node)

    async def create(self, parent_ino: Ino, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[OpenFile, Node]:
        """Make and open a regular file; one that exists is opened, unless O_EXCL."""
        parent = self._names.node(parent_ino)
        again = self._created_before(caller.unique) if self._unanswered else None
        if again is not None:
            return again
        ino = await self._view.child(parent, name)
        if ino and not flags & os.O_EXCL:
            opened = await self.open(ino, flags, caller)
            node = self._table[ino]
        else:
            self._names.check_vacant(parent, name, ino)
            node = self._names.new_node(parent, stat.S_IFREG | stat.S_IMODE(mode), caller)
            node.handles += 1
            self._names.give_birth(parent, name, node)
            opened = await self._opened(node, flags, caller, wrote=True, created=True)
        node.lookups += 1
        return opened, node

    async def tmpfile(self, parent_ino: Ino, mode: int, flags: int, caller: Caller) -> tuple[OpenFile, Node]:
        """O_TMPFILE: a file without a name, until linkat gives it one."""
        parent = self._names.node(parent_ino)
        again = self._created_before(caller.unique) if self._unanswered else None
        if again is not None:
            return again
        node = self._names.new_node(parent, stat.S_IFREG | stat.S_IMODE(mode), caller)
        node.nlink = 0
        node.handles += 1
        self._contents.create(node)
        node.lookups += 1
        return await self._opened(node, flags, caller, wrote=True, created=True), node

    async def flush(self, number: HandleId) -> None:
        """close(2) of one descriptor: what it wrote is complete, if no copy of the descriptor (dup, fork) is open elsewhere.

        The place in the order is taken now; whether it was the last close, RELEASE tells, which comes in the background.
        Tells writers what the backing directory refused for good.
        Not readers: a program that only reads treats an error from close as bytes that it must not trust, and these are good.
        """
        handle = self.handle(number)
        if handle.writable:
            await self._spills.check(handle.node)
        if handle.node.kernel_writers:
            await self._contents.mark(handle.node)
        op = self._complete(handle)
        if op is not None:
            op.tentative, handle.tentative, handle.tentative_since = True, op, time.monotonic()
            self._kept.changed(handle)
        if handle.writable:
            self._report_refusal(handle.node)

    def _settle_tentative(self, handle: Handle, *, written: bool) -> None:
        """The descriptor's first close was followed by a write, or by its last close."""
        op, handle.tentative = handle.tentative, None
        if op is None:
            return
        if written:
            self._changes.withdraw(op)
            handle.wrote = True
        else:
            self._changes.confirm(op)
        self._kept.changed(handle)

    def _complete(self, handle: Handle, *, quiet: bool = False) -> Op | None:
        if handle.unseen or (handle.lane is Lane.PASSTHROUGH and handle.writable):
            self._look(handle)
        if handle.wrote:
            self._settle_tentative(handle, written=True)  # the kernel wrote after the first close
            self._admission.learn(handle.node)
        op = self._changes.freeze(handle.node, quiet=quiet) if handle.wrote and not handle.node.interrupted else None
        if handle.wrote:
            handle.wrote = False
            self._kept.changed(handle)
        return op

    def _report_refusal(self, node: Node) -> None:
        if node.content is not None and node.content.failed:
            raise fail(node.content.failed)
        for op in self._log.pending_of(node.ino):
            if op.parked and op.last_error:
                raise fail(op.last_error)

    async def fsync(self, number: HandleId) -> None:
        """Fix the content in the order; in durable mode, wait until it is persisted."""
        handle = self.handle(number)
        handle.wrote = True
        await self._spills.check(handle.node)
        self._complete(handle, quiet=True)
        self._report_refusal(handle.node)
        if handle.synchronous or await self._attributes.fsync_mode(handle.node) is FsyncMode.DURABLE:
            await self.persisted(handle.node)

    async def persisted(self, node: Node) -> None:
        """Wait until all that was logged about the node is persisted."""
        op = self._log.last_of(node.ino)
        if op is not None:
            await wait(self._log.when_done(op.seq, node.ino))

    async def release(self, number: HandleId) -> None:
        """The last reference of an open file is gone; the clean-up must not depend on FLUSH, which may be missing after an I/O error."""
        handle = self._handles.pop(number, None)
        if handle is None:
            return
        if self._unanswered:
            self._unanswered.pop(handle.unique, None)
        self._contents.writers -= handle.writable
        if handle.node.kernel_writers:
            await self._contents.mark(handle.node)
        self._leave_lane(handle)
        self._settle_tentative(handle, written=handle.wrote)
        self._kept.closed(handle)
        if handle.lower_fd >= 0:
            self._view.close_later(handle.lower_fd)
        node = handle.node
        if handle.wrote or (handle.writable and node.handles == 1 and node.modified and not node.interrupted):
            self._changes.freeze(node)  # no FLUSH came, or a shared mapping wrote after the last one
        if handle.writable and not node.kernel_writers and not node.interrupted:
            await self._spills.finish(node)
        self._closed(node)
        if self._spills.is_lost(node):
            self._changes.discard(node)

    async def finish_spilled(self, node: Node) -> None:
        """What came in an earlier daemon before its last close could be finished."""
        node.handles += 1
        await self._spills.finish(node)
        self._closed(node)

    # -- after a takeover

    def restore(self) -> None:
        """Open files of the session's last worker go on; before anything is served or streamed."""
        for handle, tentative in self._kept.restore(self._table):
            node = handle.node
            self._handles[handle.number] = handle
            self._unanswered[handle.unique] = handle
            node.handles += 1
            self._contents.writers += handle.writable
            if handle.lane is not Lane.PASSTHROUGH:
                node.daemon_mappers += handle.may_map
                node.bound_handles += handle.bound
            else:
                node.kernel_handles += 1
            if handle.unseen or (handle.lane is Lane.PASSTHROUGH and handle.writable):
                node.kernel_writers += 1
                self._hold.add(node)
            op = self._log.get(Seq(tentative))
            if op is not None and op is self._log.last_of(node.ino) and not op.started:
                op.tentative, handle.tentative, handle.tentative_since = True, op, time.monotonic()

    def appending_only(self, node: Node) -> bool:
        """Whether whoever writes to the file unseen does so behind what it has: then no version of it changes."""
        unseen = (h for h in self._handles.values() if h.node is node and (h.unseen or (h.lane is Lane.PASSTHROUGH and h.writable)))
        return all(h.flags & os.O_APPEND and not h.unseen for h in unseen)

    def _created_before(self, unique: int) -> tuple[OpenFile, Node] | None:
        """The answer to a request that made and opened a file, which the last worker carried out and did not give."""
        handle = self._unanswered.get(unique)
        if handle is None or not handle.created:
            return None
        del self._unanswered[unique]
        node = handle.node
        node.lookups += 1
        fd = self._contents.opened(node.content) if handle.lane is Lane.PASSTHROUGH and node.content is not None else -1
        return OpenFile(handle.number, keep_cache=False, lane=handle.lane, backing_fd=fd), node

    def _forget_unanswered(self, unique: int) -> None:
        """What the last worker opened for a request that comes again is opened anew: the kernel never learned that number."""
        handle = self._unanswered.pop(unique, None)
        if handle is not None and self._handles.pop(handle.number, None) is not None:
            self._leave_lane(handle)
            self._kept.closed(handle)
            self._contents.writers -= handle.writable
            self._lanes.forgotten(handle.number)
            handle.node.handles -= 1

    def _closed(self, node: Node) -> None:
        node.handles -= 1
        if node.handles == 0:
            self._contents.closed(node)
            self._view.reap(node)

    # -- content that is not in RAM yet

    async def _bring_up(self, node: Node, size: int | None = None) -> None:
        """Copy the content from the backing directory to RAM, the first `size` bytes of it, so that it can be changed."""
        while node.content is None:
            path = self._view.path(node)
            if path is None:
                raise fail(errno.ESTALE)
            wanted = node.size if size is None else min(size, node.size)
            if not await self._contents.room(wanted):
                content = await self._overflow.from_lower(path, wanted)
                node.size = wanted
                self._contents.adopt_overflow(node, content)
                return
            tier_id = self._tier.create()
            try:
                st = await self._view.read_up(path, tier_id, wanted)
            except BaseException:
                self._tier.remove(tier_id)
                raise
            finally:
                self._tier.release(wanted)
            self._tier.settle(tier_id)
            if not self._adopt(node, tier_id, st, wanted):
                self._tier.remove(tier_id)

    def _adopt(self, node: Node, tier_id: TierId, st: LowerStat, size: int) -> bool:
        """Take over a content that was read, unless another caller was quicker or the file is another one by now."""
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
        self._contents.adopt(node, tier_id)
        node.size = size
        return True

    async def truncate(self, node: Node, size: int, number: HandleId | None) -> None:
        """Change a file's length; through a descriptor it is complete at that descriptor's close, by path at once."""
        if size < 0:
            raise fail(errno.EINVAL)
        handle = self._handles.get(number) if number is not None else None
        if handle is not None:
            self._settle_tentative(handle, written=True)
        node.handles += 1
        try:
            await self._truncate(node, size)
        finally:
            self._closed(node)
        if handle is not None:
            self._wrote(handle)
        else:
            self._changes.freeze(node)

    async def _truncate(self, node: Node, size: int) -> None:
        if not node.in_kernel:
            await self._spills.whole(node)
        if size == 0 and node.content is None:
            self._contents.create(node)
            node.touch()
            return
        if size:
            await self._make_changeable(node, size)
        await self._contents.truncate(node, size)

    async def _make_changeable(self, node: Node, size: int | None = None) -> None:
        """Have the content, or its first `size` bytes, where it can be changed."""
        while True:
            if node.content is None:
                await self._bring_up(node, size)
            elif node.content.spill is not None and not node.in_kernel:
                await self._spills.whole(node)
            elif node.content.sealed:
                await self.persisted(node)  # larger than RAM, and on its way to the backing directory
            else:
                return

    # -- bytes

    async def read(self, number: HandleId, offset: int, size: int) -> bytes:
        """Bytes of the file: from RAM where the content is there, else from the backing directory."""
        handle = self.handle(number)
        if handle.node.content is not None:
            return await self._contents.read(handle.node, offset, size)
        return await self._view.read(handle, offset, size)

    async def write(self, number: HandleId, offset: int, data: bytes | memoryview) -> int:
        """Write bytes; with O_APPEND at most at the end.

        The kernel has put an appending write at the end already, under its inode lock. It also writes the pages of a shared
        mapping back through whichever descriptor can write, and these keep their place even where that descriptor appends.
        """
        handle = self.handle(number)
        node = handle.node
        self._settle_tentative(handle, written=True)
        await self._make_changeable(node)
        if handle.flags & os.O_APPEND:
            offset = min(offset, node.size)
        done = await self._contents.write(node, offset, data)
        self._wrote(handle)
        if handle.synchronous:
            await self.fsync(number)
        return done

    def _wrote(self, handle: Handle) -> None:
        if not handle.wrote:
            handle.wrote = True
            self._kept.changed(handle)

    async def fallocate(self, number: HandleId, mode: int, offset: int, length: int) -> None:
        """Allocate in the tier file; an honest ENOSPC when the budget will not hold it."""
        handle = self.handle(number)
        self._settle_tentative(handle, written=True)
        await self._make_changeable(handle.node)
        await self._contents.allocate(handle.node, mode, offset, length, keep_size=bool(mode & FALLOC_KEEP_SIZE))
        self._wrote(handle)

    async def copy_range(self, source_number: HandleId, source_offset: int, number: HandleId, offset: int, size: int) -> int:
        """copy_file_range(2) inside the RAM tier: the bytes visit neither the caller nor this process. May copy less than asked for.

        Raises:
            OSError: EOPNOTSUPP where the bytes are not both in RAM; the kernel then copies by reading and writing.
        """
        source, handle = self.handle(source_number).node.content, self.handle(number)
        self._settle_tentative(handle, written=True)
        await self._make_changeable(handle.node)
        if source is None or source.overflow or source.spill is not None:
            raise fail(errno.EOPNOTSUPP)
        source_fd = os.dup(self._contents.opened(source))  # a truncation meanwhile may give its node another content
        try:
            done = await copy_pieces(self._contents, source_fd, source_offset, handle.node, offset, min(size, COPY_RANGE_BYTES_MAX))
        finally:
            os.close(source_fd)
        if done is None:
            raise fail(errno.EOPNOTSUPP)
        handle.wrote = True
        if handle.synchronous:
            await self.fsync(number)
        return done

    async def lseek(self, number: HandleId, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE; a file that is not in RAM is all data."""
        node = self.handle(number).node
        if node.content is not None and not node.content.overflow and node.content.spill is None:
            return os.lseek(self._contents.opened(node.content), offset, whence)
        if offset >= node.size:
            raise fail(errno.ENXIO)
        return offset if whence == os.SEEK_DATA else node.size

    # -- files that stay open

    def confirm_older_than(self, age_s: float) -> None:
        """Descriptors that were closed once, and whose copies have not been written to for so long: that close counts."""
        closed_before = time.monotonic() - age_s
        for handle in self._handles.values():
            if handle.tentative is not None and handle.tentative_since <= closed_before:
                self._settle_tentative(handle, written=False)

    async def mark_older_than(self, age_s: float) -> None:
        """Before `freeze_older_than`: writes that are under way in the passthrough lane get done first, and are waited for elsewhere."""
        due = time.monotonic() - age_s
        for node in self.open_nodes():
            if node.kernel_writers and node.content is not None and node.content.modified_since <= due:
                await self._contents.mark(node, behind=True)

    def freeze_older_than(self, age_s: float) -> int:
        """Fix the content of open files whose first unfixed change is older; returns how many."""
        due = time.monotonic() - age_s
        for node in self.open_nodes():
            if node.kernel_writers:
                self._contents.kernel.look(node)
        nodes = [
            n
            for n in self.open_nodes()
            if n.content is not None
            and n.content.modified
            and not n.content.interrupted
            and n.content.spill is None
            and n.content.modified_since <= due
        ]
        return sum(self._changes.freeze(node) is not None for node in nodes)
