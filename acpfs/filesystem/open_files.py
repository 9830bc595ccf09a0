"""Open files from open to release: their table, their lanes, and when their content is complete.

Decides when a file's content is fixed (a version): FLUSH of a descriptor that wrote, and RELEASE
when the kernel sent no FLUSH, unless somebody else is at the file (`file_writers`). Knows how open
files outlive the worker (`kept_handles`); what is done with the bytes between open and close is
`Files`' business. Used under the file system's lock; the coroutines wait as described in `steps`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable
from functools import partial

from acpfs.backing.calls import CallPool
from acpfs.filesystem.admission import Admission
from acpfs.filesystem.attribute_calls import AttributeCalls
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.close_states import CloseEvent, CloseState
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content.body import UNSEEN, Writing
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.content.warming import Warming
from acpfs.filesystem.content.writable import Writable
from acpfs.filesystem.doubtful_closes import DoubtfulCloses
from acpfs.filesystem.durations import Durations
from acpfs.filesystem.file_writers import FileWriters, Opening
from acpfs.filesystem.kept_handles import Handle, KeptHandles
from acpfs.filesystem.lane_use import LaneUse
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.last_close import Close, Left, Openers
from acpfs.filesystem.loads import Loads
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.names import Names, fail
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.pages_ahead import ReadyMemory
from acpfs.filesystem.records import Caller, Lane, OpenFile
from acpfs.filesystem.steps import unlocked, wait
from acpfs.logger import get_logger, shown
from acpfs.types import HandleId, Ino, Seq
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.log.stages import Aside, Step

log = get_logger(__name__)
LAST_CLOSE_WAIT_S = 5.0
"""So long the kernel's RELEASE, which follows a close within microseconds, is waited for before it
is asked who has a copy.

It decides when that is asked, and never what the answer is.
"""
MAPPED_LOOKS_S = (0.0, 0.001, 0.004, 0.016)
"""When it is looked, after RELEASE, whether a mapping lives on: the kernel may let go of the file a
moment after it has sent that.
"""
TURN_OPS_MAX = 1024
"""So far it is looked which closes hold up the order."""


class OpenFiles:
    """The table of open files, and their lives."""

    def __init__(
        self,
        table: NodeTable,
        lanes: Lanes,
        lane_use: LaneUse,
        names: Names,
        attributes: AttributeCalls,
        view: LowerView,
        changes: Changes,
        contents: Contents,
        writable: Writable,
        admission: Admission,
        outgrown: OutgrownFiles,
        warming: Warming,
        log: OperationLog,
        kept: KeptHandles,
        closing: Callable[[int], Closing],
        openers: Openers,
        threads: CallPool,
        durations: Durations,
        loads: Loads,
        ready: ReadyMemory,
        writers: FileWriters,
        closes: DoubtfulCloses,
    ) -> None:
        """`closing`: how a thread comes to close what it has open; `ready`: told of who is about to
        write.

        `openers`: what is known of the processes that open files, which `threads` ask.
        """
        self._now = threads.clock.now
        self._ready = ready
        self._table = table
        self._lanes = lanes
        self._lane_use = lane_use
        self._names = names
        self._attributes = attributes
        self._view = view
        self._changes = changes
        self._contents = contents
        self._writable = writable
        self._admission = admission
        self._outgrown = outgrown
        self._warming = warming
        self._log = log
        self._closing = closing
        self._openers = openers
        self._threads = threads
        self._durations = durations
        self._loads = loads
        self._kept = kept
        self._writers = writers
        self._closes = closes
        self._handles: dict[HandleId, Handle] = {}
        self._of_users: Counter[int] = Counter()
        """User → how many they have open."""
        self._last_handle = kept.first_number
        self._closed_at_the_end = set[HandleId]()
        """Those whose latest close was that of their file, as it was told when nobody could write
        any more (`settle_at_the_end`), whatever they have written since.
        """
        self._mapped: dict[HandleId, Handle] = {}
        """Those that were released, and may be written to through a mapping."""
        self._unanswered: dict[int, Handle] = {}
        """Request → open file of the last worker that it opened; some of these requests come
        again.
        """

    def handle(self, number: HandleId) -> Handle:
        """The open file of a number.

        Raises:
            OSError: EBADF when there is none.
        """
        handle = self._handles.get(number)
        if handle is None:
            raise fail(errno.EBADF)
        return handle

    def find(self, number: HandleId) -> Handle | None:
        """The open file of a number, if there is one."""
        return self._handles.get(number)

    def writes_to_storage(self, number: HandleId) -> bool:
        """Whether what is written through it goes to its staging file."""
        handle = self._handles.get(number)
        return handle is not None and handle.node.body.is_overflowed

    def is_open(self, number: HandleId) -> bool:
        """Whether there is an open file of that number."""
        return number in self._handles

    def files_of(self, uid: int) -> tuple[int, int]:
        """How many files a user has open, and all users together."""
        return self._of_users[uid], len(self._handles)

    def open_nodes(self) -> set[Node]:
        """Nodes that somebody has open."""
        return {handle.node for handle in self._handles.values()}

    def mapped_in_kernel(self) -> set[Node]:
        """Those whose tier file somebody may change through a mapping, beside others whom the
        kernel serves.
        """
        return {handle.node for handle in self._handles.values() if handle.unseen}

    def writers_of(self, node: Node) -> list[int]:
        """Processes that opened the file to write, as far as they are known."""
        writing = (one for one in self._handles.values() if one.node is node and one.writable)
        return sorted({one.process or one.pid for one in writing} - {0})

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
        """Open an existing regular file; close-to-open: its attributes are renewed first.

        What truncates it and what makes the handle known to the next worker is one step: a worker
        that dies between them has done neither. Where it is not (others have the file in the
        kernel, or the lane is waited for), the next one finds a half, which is none as soon as the
        request comes again; it may not, where its caller is gone.
        """
        node = self._names.node(ino)
        opening = Opening(self._now(), caller.pid)
        if self._unanswered:
            self._forget_unanswered(caller.unique)
        await self._view.renew(node)
        # from here on its content may not be evicted; counted before the waits below, which let
        # others in
        node.handles += 1
        truncates = bool(flags & os.O_TRUNC)
        if truncates:
            self._writers.begins(node, opening)
        try:
            opened = await self._open_ready(node, flags, caller, opening)
        except BaseException as error:
            if truncates:
                self._writers.has_opened(node, opening)
            await self._not_opened(node, opening, error)
            raise
        if truncates:
            self._writers.has_opened(node, opening)
        return opened

    async def _open_ready(
        self, node: Node, flags: int, caller: Caller, opening: Opening
    ) -> OpenFile:
        if flags & os.O_TRUNC and node.kernel_writers:
            self._contents.kernel.look(node)
        opening.size = node.size
        opening.place = self._loads.place(node)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            node.writer_pid = caller.pid
        if flags & os.O_TRUNC:
            # what cannot be opened is not truncated
            await self._outgrown.closed_in_the_kernel(node)
            opening.was_modified = node.modified and not node.interrupted
            opening.found_half = node.interrupted
            has_taken = await self._writable.truncate(node, 0, opens=True)
            if has_taken or opening.found_half:
                opening.has_truncated = True
                self._leave_half(node)
        elif flags & os.O_ACCMODE != os.O_RDONLY:
            await self._writable.bring_up(node)
        else:
            await self._warming.before_reading(node)
        opened = await self._opened(node, flags, caller, opening, wrote=bool(flags & os.O_TRUNC))
        if flags & os.O_TRUNC:
            # it is this one's from now on, whoever had left a half of it meanwhile
            self._contents.go_on(node)
        return opened

    async def _opened(
        self,
        node: Node,
        flags: int,
        caller: Caller,
        opening: Opening,
        *,
        wrote: bool,
        created: bool = False,
    ) -> OpenFile:
        """Give the file its handle; where that fails, its caller says `_not_opened`."""
        await self._outgrown.closed_in_the_kernel(node)
        self._last_handle += 1
        handle = Handle(
            HandleId(self._last_handle),
            node,
            flags,
            pid=caller.pid,
            process=0
            if flags & os.O_ACCMODE == os.O_RDONLY
            else self._openers.process_of(caller.pid),
            uid=caller.uid,
            unique=caller.unique,
        )
        if wrote:
            handle.take(CloseEvent.WROTE)
        handle.created = created
        handle.former_bytes = opening.size
        handle.opened_at = opening.at
        handle.place = opening.place
        if handle.writable:
            self._ready.give_back()
        if handle.writable and handle.may_map and not node.size and node.names:
            handle.begun_as = self._table.path(node.ino)
        try:
            backing_fd = await self._lane_use.take(handle)
        except BaseException:
            node.bound_handles -= handle.bound
            self._view.reads.left(handle)
            raise
        try:
            self._kept.opened(handle)
        except OSError:
            # no page is left for its record: a file that the next worker would not know is not
            # opened
            self._lane_use.leave(handle)
            self._view.reads.left(handle)
            raise
        self._add(handle)
        self._table.needed(node)
        keep = node.keep_cache
        node.keep_cache = True
        self._contents.retention.settle(node)
        if handle.writable and node.names:
            self._attributes.foresee_fsync(self._table[node.names[0][0]])
        return OpenFile(handle.number, keep, handle.lane, backing_fd)

    async def _open_new(self, node: Node, flags: int, caller: Caller) -> OpenFile:
        """Open a file that the call has made."""
        opening = Opening(self._now(), caller.pid)
        self._writers.begins(node, opening)
        try:
            opened = await self._opened(node, flags, caller, opening, wrote=True, created=True)
        except BaseException as error:
            self._writers.has_opened(node, opening)
            await self._not_opened(node, opening, error)
            raise
        self._writers.has_opened(node, opening)
        return opened

    async def _not_opened(self, node: Node, opening: Opening, error: BaseException) -> None:
        """It failed, and is at the file no more: who closed that meanwhile may have waited for it.

        What it has truncated is nobody's finished work: where nobody writes to the file who goes on
        with it, it replaces nothing.
        """
        is_lost = opening.has_truncated and not self._is_written_on(node, opening)
        if not node.modified:
            pass  # all of it is in a version that counts: somebody has synced it
        elif is_lost:
            self._leave_half(node)
        elif isinstance(error, OSError):  # else the worker is about to end
            if opening.has_truncated or not opening.found_half:
                self._contents.go_on(node)
            if not self._writers.is_anybody_at_it(node):
                await self._mark(node)
            self.publish_if_done(node)
            self._outgrown.seal_taken_up(node)
        self.closed(node)

    def _is_written_on(self, node: Node, opening: Opening) -> bool:
        """Whether somebody else goes on with what a failed open has truncated, or has done so and
        closed it.

        That is who has written since then: what is written to a half makes it none. Or who has
        written before, and is not done: in the kernel, too, where who only has the file open has
        not, though it has changed: it was changed here. Who is about to open it does not count: his
        open may fail as well, and if not, it ends the half.
        """
        if node.kernel_writers:
            self._contents.kernel.look(node)
        if not node.interrupted or self._writers.has_anybody_written(node):
            return True
        return opening.was_modified and self._writers.is_anybody_writing(node)

    def _leave_half(self, node: Node) -> None:
        """What the file has is nobody's finished work: no open that is under way, and no copy of a
        descriptor whose writer left an earlier half, ends this one by failing, or being closed.
        """
        for opening in self._writers.opening(node):
            opening.found_half = True
        for handle in self._writers.of(node):
            if handle.killed:
                handle.killed = False
                self._kept.changed(handle)
        self._contents.interrupt(node)
        if node.kernel_writers:  # what others write from now on shows that somebody goes on
            self._contents.kernel.note_as_is(node)

    async def _mark(self, node: Node) -> None:
        """Mark what the kernel writes for others, for somebody who must go on whatever becomes of
        that.

        Where it fails (no descriptor is left), or whoever asked is killed meanwhile, the file
        counts as written to in this moment. So its next version is looked at again when it is
        copied, with a mark then.
        """
        if not node.kernel_writers:
            return
        body = node.body
        try:
            await self._contents.mark(node)
        except OSError:
            if node.body is body:
                self._contents.kernel.note(node, UNSEEN)

    def _add(self, handle: Handle) -> None:
        self._handles[handle.number] = handle
        self._count(handle, 1)

    def _count(self, handle: Handle, change: int) -> None:
        self._of_users[handle.uid] += change
        if not self._of_users[handle.uid]:
            del self._of_users[handle.uid]
        if handle.writable:
            self._contents.writers += change
            handle.node.open_writers += change
            if change > 0:
                self._writers.add(handle)
            else:
                self._writers.remove(handle)

    def refuse_passthrough(self, number: HandleId) -> None:
        """The kernel would not take the file: the handle goes on in the daemon's lane."""
        handle = self.handle(number)
        self._lane_use.refused(handle)
        self._kept.changed(handle)

    async def create(
        self, parent_ino: Ino, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[OpenFile, Node]:
        """Make and open a regular file; one that exists is opened, unless O_EXCL."""
        parent = self._names.node(parent_ino)
        again = self._created_before(caller.unique) if self._unanswered else None
        if again is not None:
            return again
        hands_on = await self._view.handed_on(parent)
        # before the look: nothing may come between that and the birth of the name
        await self._names.check_own(parent, name)
        look = self._names.taken_by if flags & os.O_EXCL else self._view.child
        ino = await look(parent, name)
        if ino and not flags & os.O_EXCL:
            opened = await self.open(ino, flags, caller)
            node = self._table[ino]
        else:
            self._names.check_vacant(parent, name, ino)
            rights = stat.S_IFREG | stat.S_IMODE(mode)
            node = self._names.new_node(parent, rights, caller, hands_on)
            node.handles += 1
            node.writer_pid = caller.pid
            self._names.give_birth(parent, name, node)
            opened = await self._open_new(node, flags, caller)
        node.lookups += 1
        return opened, node

    async def tmpfile(
        self, parent_ino: Ino, mode: int, flags: int, caller: Caller
    ) -> tuple[OpenFile, Node]:
        """O_TMPFILE: a file without a name, until linkat gives it one."""
        parent = self._names.node(parent_ino)
        again = self._created_before(caller.unique) if self._unanswered else None
        if again is not None:
            return again
        hands_on = await self._view.handed_on(parent)
        node = self._names.new_node(parent, stat.S_IFREG | stat.S_IMODE(mode), caller, hands_on)
        node.handles += 1
        self._contents.create(node)
        opened = await self._open_new(node, flags, caller)
        node.lookups += 1
        return opened, node

    async def flush(self, number: HandleId, pid: int) -> None:
        """close(2) of one descriptor: what it wrote is complete, if no copy of the descriptor (dup,
        fork) is open elsewhere.

        The place in the order is taken now; whether it was the last close, RELEASE tells, which
        comes in the background, or, where it does not come, what becomes of the descriptors of who
        opened the file (`last_close`). What somebody who was killed has not finished is a half: it
        is `interrupted`, and its older version stays. Tells writers what the backing directory
        refused for good. Not readers: a program that only reads treats an error from close as bytes
        that it must not trust, and these are good.
        """
        handle = self.handle(number)
        # before the waits below, which a killed writer does not live to see
        closer = self._openers.process_of(pid) if pid and handle.process else 0
        if await self._is_half(handle, pid or handle.pid, closer):
            return
        if await self._is_of_copy(handle, closer):  # it does not wait for what others write
            self.report_refusal(handle.node)
            return
        if handle.writable and handle.node.kernel_writers:
            # Who only reads fixes nothing, and does not wait for a write that is under way.
            await self._contents.mark(handle.node)
        if handle.writable and handle.node.body.is_outgrown:
            await self._outgrown.check(handle.node)
            await self._contents.mark(handle.node)  # again: others may have written during the wait
        op = self.complete(handle)
        if op is not None and handle.opened_at and not handle.closed_at:
            self._durations.save.observe(self._now() - handle.opened_at)
        if op is not None or handle.store is None:
            handle.closed_at = self._now()
        is_by_opener = closer > 0 and closer == handle.process
        if op is not None:
            handle.by_opener = is_by_opener
        else:
            handle.by_opener = handle.by_opener or is_by_opener
        if handle.writable:
            self._kept.changed(handle)
            self.report_refusal(handle.node)

    async def _is_half(self, handle: Handle, pid: int, closer: int) -> bool:
        """Whether what was written through the descriptor is not finished: its writer was killed,
        and nobody has gone on.

        `closer`: the process that closes; 0: not told.
        """
        node = handle.node
        if handle.writes_unseen:
            self._lane_use.look(handle)
        if not self._may_be_half(handle, closer):
            return False
        closing = await unlocked(self._closing, pid)
        if closing is Closing.KILL and not node.interrupted and self._may_be_half(handle, closer):
            if await self._opener_has_it(handle, closer):
                return False  # who was killed had a copy by chance
            self._closes.went_on(handle)  # so what it closed before was a copy
            log.warning(
                "its writer was killed: not published, until it is written anew or `acpfs-ctl "
                "retry`",
                path=shown(self._table.path(node.ino)),
            )
            self._leave_half(node)
            handle.killed = True
            self._kept.changed(handle)
        elif closing is Closing.CALL and handle.killed and await self._is_opener(handle, closer):
            self.goes_on(handle)
        return node.interrupted

    def _may_be_half(self, handle: Handle, closer: int) -> bool:
        """Whether what its writer leaves is not finished, if that one is killed.

        So is what it closed before, as long as nothing is known of that: what it has had until now
        was another copy.
        """
        node = handle.node
        may_be_its = handle.may_be_writer(closer)
        waits_for_its = handle.state is CloseState.WAITING and may_be_its
        if node.modified and (handle.wrote or waits_for_its):
            return not self.is_log(node)
        return handle.is_in_doubt and may_be_its and not self._was_log(node)

    async def _opener_has_it(self, handle: Handle, closer: int) -> bool:
        """Whether somebody else closes than who opened the file, and that one has a descriptor of
        it still.
        """
        if not handle.process or closer == handle.process or not (closer or handle.has_copies):
            return False
        left = await unlocked(self._openers.left, handle.process, handle.node.ino)
        return left is Left.SOME

    async def _is_opener(self, handle: Handle, closer: int) -> bool:
        """Whether it may be who opened the file that closes."""
        if closer or not handle.process:
            return closer == handle.process
        left = await unlocked(self._openers.left, handle.process, handle.node.ino)
        return left is not Left.GONE

    async def _is_of_copy(self, handle: Handle, closer: int) -> bool:
        """Whether a copy of the descriptor was closed, and who opened the file has one still: then
        nothing is complete.

        Asked where there is something to complete, and a reason to: what a poller starts while a
        file is being written would each time hold up the order for a while.
        """
        if not handle.wrote or not await self._opener_has_it(handle, closer):
            return False
        handle.has_copies = True
        return True

    def writes(self, handle: Handle, pid: int) -> None:
        """A thread writes through it that did not do so last."""
        handle.writer = pid
        process = self._openers.process_of(pid)
        if process:
            handle.wrote_by.add(process)
        if not handle.others_wrote and process != handle.process:
            handle.others_wrote = True
            self._kept.changed(handle)

    def goes_on(self, handle: Handle) -> None:
        """A copy of the descriptor is in other hands than those that were killed, and these sync
        it: it is what they say it is.
        """
        if handle.killed and not handle.node.body.is_cold:
            handle.node.body.interrupted = False

    async def settle_closes(self) -> None:
        """Find out about closes after which the kernel's RELEASE has not come.

        Those that were the close of their file count. The others are withdrawn when it is their
        turn in the order, or when somebody waits for them, and come again with their real close.
        """
        closed_before = self._now() - LAST_CLOSE_WAIT_S
        doubtful = [
            handle
            for handle in self._handles.values()
            if self._is_in_doubt(handle) and handle.closed_at <= closed_before
        ]
        for handle in doubtful:
            op = handle.store
            close = self._close(handle)
            counts = await wait(self._threads.submit("closes", self._openers.counts, close))
            if handle.store is not op or handle.number not in self._handles:
                continue  # written to meanwhile, or released
            if self._close(handle) != close or not self._is_in_doubt(handle):
                continue  # closed once more, by somebody else: asked anew
            if counts:
                self._has_ended(handle)
                self.publish_if_done(handle.node)
                self._outgrown.seal_taken_up(handle.node)
            elif op is not None and op.seq in self._in_the_way():
                handle.has_copies = True
                self._closes.went_on(handle)

    def _has_ended(self, handle: Handle) -> None:
        """Its close was that of the file, as far as /proc tells."""
        if handle.store is None:
            handle.take(CloseEvent.ENDED)
        elif self._wrote_unseen(handle):
            self._closes.went_on(handle)
        else:
            self._closes.ended(handle)
        self._kept.changed(handle)

    def _is_in_doubt(self, handle: Handle) -> bool:
        """Whether a close of it was heard, and something depends on whether that was the last
        one.
        """
        if handle.store is not None:
            return True
        if not handle.closed_at or handle.node.open_writers < 2 or not handle.writes_unseen:
            return False
        return not handle.wrote and self._writers.is_at_it(handle)

    def settle_at_the_end(self) -> None:
        """Nobody can write any more, and nothing more is heard of closes: those that were the close
        of their file count, and no other.
        """
        for handle in self._handles.values():
            counts = handle.state is CloseState.OVER
            if handle.writable and handle.closed_at:
                counts = self._openers.counts(self._close(handle, ended=True))
            if handle.store is not None:
                counts = counts and not self._wrote_unseen(handle)
                if counts:
                    self._closes.ended(handle)
                else:
                    self._closes.went_on(handle)
            elif handle.state is CloseState.CLEAN and counts:
                handle.take(CloseEvent.ENDED)
            elif handle.state is CloseState.OVER and not counts:
                handle.take(CloseEvent.WENT_ON)
            if counts:
                self._closed_at_the_end.add(handle.number)

    def _close(self, handle: Handle, *, ended: bool = False) -> Close:
        """What is known of its close."""
        return Close(
            handle.node.ino,
            handle.process,
            by_opener=handle.by_opener,
            others_wrote=handle.others_wrote,
            sees_writers=handle.lane is Lane.DIRECT and not handle.writes_unseen,
            ended=ended,
        )

    def _wrote_unseen(self, handle: Handle) -> bool:
        """Of one of which /proc shows that who opened it has closed it: whether the kernel wrote
        for it since then, which is no part of its version (interleaving 10).

        Nobody has said so in passthrough. Where others write to the file in the kernel, these did.
        """
        if not self._writers.may_have_written(handle):
            return False
        others = any(self._writers.is_at_it(one) for one in self._writers.beside(handle))
        return handle.unseen or not others

    def _in_the_way(self) -> set[Seq]:
        """Closes of which something waits to be known more: what stands behind them in the order,
        or somebody who asked.
        """
        found = self._changes.awaited_closes()
        for op in self._log.line(TURN_OPS_MAX):
            if op.tentative:
                found.add(op.seq)
            elif op.aside is not Aside.HELD:
                break
        return found

    def changes(self, handle: Handle) -> None:
        """A call through the handle is about to change the content; `changed` says that it has
        ended.
        """
        if handle.store is not None:
            self._closes.went_on(handle)
        handle.changing += 1
        self._wrote(handle)

    def changed(self, handle: Handle) -> None:
        """The call has ended. Its writer is at it again, also where a close came meanwhile."""
        handle.changing -= 1
        self._wrote(handle)

    def wrote_mapped(self, handle: Handle, offset: int, size: int) -> None:
        """What is about to be written through the handle may have been changed through a mapping of
        another one.
        """
        handle.only_written = False
        for one in self._writers.mapped_beside(handle, offset, size):
            one.only_written = False
            if one.store is not None:
                self._closes.went_on(one)
            self._wrote(one)

    def _wrote(self, handle: Handle) -> None:
        if not handle.wrote:
            handle.take(CloseEvent.WROTE)
            self._kept.changed(handle)

    def fix(self, handle: Handle) -> None:
        """Fix the content as it is, whoever else is at it: somebody says that it is good
        (fsync).
        """
        if not self._take_up(handle):
            return
        handle.take(CloseEvent.FIXED)
        self._kept.changed(handle)
        self._closes.fix(handle.node, quiet=True)

    def complete(self, handle: Handle) -> Op | None:
        """Fix what was written through the handle, which was closed, if nobody else is at the
        file.
        """
        if not self._take_up(handle):
            return None
        handle.take(CloseEvent.CLOSED)
        self._kept.changed(handle)
        return self.publish_if_done(handle.node)

    def _take_up(self, handle: Handle) -> bool:
        """Learn what was written through the handle; whether anything was."""
        if handle.writes_unseen:
            self._lane_use.look(handle)
        if handle.wrote:
            self._closes.went_on(handle)  # the kernel wrote after the first close
            self._admission.learn(handle.node)
            self._learn_use(handle)
        return handle.wrote

    def at_it(self, node: Node) -> list[int]:
        """Processes of those who are, as far as they are known."""
        return self._writers.at_it(node)

    def _learn_use(self, handle: Handle) -> None:
        if handle.maps_unseen and self._contents.kernel.may_be_mapped(handle.node):
            handle.only_written = False
        self._admission.learn_use(handle)

    def is_half(self, node: Node) -> bool:
        """Whether nobody goes on with what its writer has left, as one would who is about to open
        it and truncates it.
        """
        return node.interrupted and not self._writers.is_opening(node)

    def is_anybody_at_it(self, node: Node) -> bool:
        """Whether somebody has the file open who has written to it, or may have, and is not
        done.
        """
        return self._writers.is_anybody_at_it(node)

    def publish_if_done(self, node: Node, *, is_still: bool = False) -> Op | None:
        """Fix the content, unless somebody is at it, or it is a half; what becomes of a log is good
        at any moment.

        In doubt as long as somebody who has closed it may have a copy of the descriptor.
        `is_still`: nobody was at it before the call, and until that is answered the kernel holds
        back who writes: what is new is the caller's.
        """
        if is_still:
            at_it = self._writers.is_opening(node) or self._writers.has_anybody_written(node)
        else:
            at_it = self._writers.is_anybody_at_it(node)
        if node.interrupted or (at_it and not self.is_log(node)):
            return None
        op = self._changes.freeze(node, quiet=is_still)
        for one in self._writers.of(node):
            if one.state is not CloseState.WAITING:
                continue
            if op is None:
                one.take(CloseEvent.UNCHANGED)
            else:
                op.take(Step.CLOSED)
                one.take(CloseEvent.PUBLISHED, op)
            self._kept.changed(one)
        return op

    def report_refusal(self, node: Node) -> None:
        """Tell the application what cannot be stored.

        Raises:
            OSError: of a write that failed, or that the backing directory refused for good.
        """
        if node.body.failed:
            raise fail(node.body.failed)
        for op in self._log.pending_of(node.ino):
            if op.parked and op.last_error and not op.withheld:
                raise fail(op.last_error)

    async def goes_on_mapped(self, number: HandleId) -> bool:
        """Before `release`: whether a mapping that was made through an open file may live on, so
        that it is not over.

        In passthrough the kernel maps the tier file itself. The mapping keeps that open, and not
        the mount's file: RELEASE comes when the descriptor is closed, and nothing is heard of what
        is written after that. The file stays open here until the mapping is gone
        (`settle_mappings`).
        """
        handle = self._handles.get(number)
        if handle is None or not handle.maps_unseen:
            return False
        if handle.leaves_trace and not self._contents.kernel.may_be_mapped(handle.node):
            return False
        for delay_s in MAPPED_LOOKS_S:
            if delay_s:
                await wait(self._threads.clock.after(delay_s))
            if number not in self._handles or not self._contents.is_mapped(handle.node):
                return False
        handle.is_released = True
        self._mapped[number] = handle
        self._kept.changed(handle)
        return True

    async def settle_mappings(self) -> None:
        """Release what was mapped, and is not any more.

        Who has the file open to write still may be one who mapped it.
        """
        for handle in list(self._mapped.values()):
            if handle.number not in self._mapped:
                continue
            reader = partial(self._contents.open_kernel_target, handle.node)
            self._view.notices.mapped(handle.number, reader)
            if not self._contents.is_mapped(handle.node):
                # Before another open can give the node another file, which the kernel would not
                # get.
                self._view.notices.forgotten(handle.number)
                await self.release(handle.number)

    async def release(self, number: HandleId) -> None:
        """The last reference of an open file is gone; the clean-up must not depend on FLUSH, which
        may be missing after an I/O error.
        """
        handle = self._handles.pop(number, None)
        if handle is None:
            return
        self._mapped.pop(number, None)
        if self._unanswered:
            self._unanswered.pop(handle.unique, None)
        if handle.opened_at and not handle.writable:
            self._loads.closed(handle.node, handle.opened_at, handle.place)
        if handle.writable:
            await self._mark(handle.node)
        self._learn_use(handle)
        self._count(handle, -1)  # not before: until here it is one of those who may have written
        self._lane_use.leave(handle)
        if handle.wrote:
            self._closes.went_on(handle)
        else:
            self._closes.ended(handle)
        self._kept.closed(handle)
        self._view.reads.left(handle)
        node = handle.node
        if handle.writable and node.modified:
            # No FLUSH came, or a shared mapping wrote after the last one, or others waited for this
            # one.
            self.publish_if_done(node)
        if handle.writable and not node.kernel_writers and not node.interrupted:
            await self._outgrown.finish(node)
        self._changes.let_go_of_half(node)
        self.closed(node)
        if self._outgrown.is_lost(node):
            self._changes.discard(node)

    async def finish_outgrown(self, node: Node) -> None:
        """What came in an earlier daemon before its last close could be finished."""
        node.handles += 1
        await self._outgrown.finish(node)
        self.closed(node)

    # -- after a takeover

    def restore(self) -> None:
        """Open files of the session's last worker go on; before anything is served or streamed."""
        for handle, tentative in self._kept.restore(self._table):
            node = handle.node
            if handle.writable:
                node.writer_pid = handle.pid
            self._add(handle)
            if handle.is_released:
                self._mapped[handle.number] = handle
            self._unanswered[handle.unique] = handle
            node.handles += 1
            self._lane_use.restored(handle)
            op = self._log.last_of(node.ino) if tentative else None
            if op is not None and self._is_closed_since(op, tentative):
                op.take(Step.CLOSED)
                handle.take(CloseEvent.FOUND, op)
                # 0: an earlier acpfs has recorded it
                handle.closed_at = handle.closed_at or self._now()
        for former, seq in self._kept.former():
            self._settle_former(former, Seq(seq))

    @staticmethod
    def _is_closed_since(op: Op, seq: int) -> bool:
        """Whether it is by a close that came with that number, or after another one which that
        withdrew as the worker died.
        """
        return op.kind is OpKind.STORE and op.seq >= seq and not op.begun

    def _settle_former(self, close: Close, seq: Seq) -> None:
        """A close of a session that ended before it was known whether it was that of the file."""
        op = self._log.last_of(close.ino)
        if op is None or not self._is_closed_since(op, seq):
            return
        if not self._openers.counts(close):
            op.take(Step.CLOSED)
            self._changes.withdraw(op)

    def is_log(self, node: Node) -> bool:
        """Whether the file only grew as a log does since its last version, so that it may be
        published as it is.
        """
        return (
            not node.body.is_cold
            and node.body.writing is Writing.APPENDING
            and not node.kernel_rewriters
            and (self._was_log(node) or not self._writers.is_version_in_doubt(node))
        )

    @staticmethod
    def _was_log(node: Node) -> bool:
        """Whether that was so of the last version, should it be withdrawn."""
        return node.body.last_writing is Writing.APPENDING and not node.kernel_rewriters

    def was_closed(self, node: Node) -> bool:
        """At the end (`settle_at_the_end`): whether of those who have the file open for writing one
        has closed it, and nobody is at it.
        """
        writers = self._writers.of(node)
        others = [one for one in writers if one.number not in self._closed_at_the_end]
        return len(others) < len(writers) and not any(map(self._writers.is_at_it, others))

    def comes_again(self, unique: int) -> bool:
        """Whether the last worker opened something for that request, and did not answer it."""
        return unique in self._unanswered

    def _created_before(self, unique: int) -> tuple[OpenFile, Node] | None:
        """The answer to a request that made and opened a file, which the last worker carried out
        and did not give.
        """
        handle = self._unanswered.get(unique)
        if handle is None or not handle.created:
            return None
        del self._unanswered[unique]
        node = handle.node
        node.lookups += 1
        fd = (
            self._contents.opened(node.body)
            if handle.lane is Lane.PASSTHROUGH and not node.body.is_cold
            else -1
        )
        return OpenFile(handle.number, keep_cache=False, lane=handle.lane, backing_fd=fd), node

    def _forget_unanswered(self, unique: int) -> None:
        """What the last worker opened for a request that comes again is opened anew: the kernel
        never learned that number.
        """
        handle = self._unanswered.pop(unique, None)
        if handle is not None and self._handles.pop(handle.number, None) is not None:
            self._lane_use.leave(handle)
            self._kept.forgotten(handle)
            self._count(handle, -1)
            self._view.notices.forgotten(handle.number)
            handle.node.handles -= 1

    def closed(self, node: Node) -> None:
        """One user of the node less."""
        node.handles -= 1
        if node.handles == 0:
            self._table.needed_no_more(node)
            if node.modified and not node.interrupted:
                self._changes.freeze(
                    node
                )  # by a call that was broken off, and whose handle never heard of it
            self._warming.closed(node)
            self._contents.closed(node)
            self._view.nameless.closed(node)
            self._view.reap(node)
