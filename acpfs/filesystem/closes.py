"""When the content of an open file is complete: from FLUSH to a version that counts.

Decides when a file's content is fixed (a version): FLUSH of a descriptor that wrote, and RELEASE
when the kernel sent no FLUSH, unless somebody else is at the file (`file_writers`). What is in
doubt meanwhile, `DoubtfulCloses` settles; what killed writers leave is a half. Used under the file
system's lock; the coroutines wait as described in `steps`.
"""

from __future__ import annotations

from acpfs.filesystem.changes import Changes
from acpfs.filesystem.close_states import CloseEvent, CloseState
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content.body import UNSEEN, Writing
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.doubtful_closes import DoubtfulCloses
from acpfs.filesystem.file_writers import Opening
from acpfs.filesystem.handles import Handles
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.lane_use import LaneUse
from acpfs.filesystem.last_close import Callers, Close, Left
from acpfs.filesystem.names import fail
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import Lane
from acpfs.filesystem.steps import unlocked, wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.logger import get_logger, shown
from acpfs.types import HandleId, Seq
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.log.stages import Aside, Step

log = get_logger(__name__)
LAST_CLOSE_WAIT_S = 5.0
"""So long the kernel's RELEASE, which follows a close within microseconds, is waited for before it
is asked who has a copy.

It decides when that is asked, and never what the answer is.
"""
TURN_OPS_MAX = 1024
"""So far it is looked which closes hold up the order."""


class Closes:
    """What was written through open files, and is or is not complete."""

    def __init__(
        self,
        upper: UpperLayer,
        handles: Handles,
        doubtful: DoubtfulCloses,
        changes: Changes,
        contents: Contents,
        outgrown: OutgrownFiles,
        lane_use: LaneUse,
        callers: Callers,
    ) -> None:
        self._now = upper.runtime.clock.now
        self._table = upper.table
        self._log = upper.log
        self._handles = handles
        self._writers = handles.writers
        self._doubtful = doubtful
        self._changes = changes
        self._contents = contents
        self._outgrown = outgrown
        self._lane_use = lane_use
        self._openers = callers.openers
        self._closing = callers.closing_of
        self._threads = callers.threads
        self._closed_at_the_end = set[HandleId]()
        """Those whose latest close was that of their file, as it was told when nobody could write
        any more (`settle_at_the_end`), whatever they have written since.
        """

    # -- writing

    def changes(self, handle: Handle) -> None:
        """A call through the handle is about to change the content; `changed` says that it has
        ended.
        """
        if handle.store is not None:
            self._doubtful.went_on(handle)
        handle.changing += 1
        handle.is_shared_or_synced |= handle.was_synced
        if not handle.wrote:
            self._wrote(handle)

    def changed(self, handle: Handle) -> None:
        """The call has ended. Its writer is at it again, also where a close came meanwhile."""
        handle.changing -= 1
        if not handle.wrote:
            self._wrote(handle)

    def was_read(self, handle: Handle) -> None:
        """Somebody reads through it, or maps it."""
        if handle.only_written:
            handle.only_written = False
            if handle.begun_as:  # else nobody asks
                self._handles.changed(handle)

    def wrote_mapped(self, handle: Handle, offset: int, size: int) -> None:
        """What is about to be written through the handle may have been changed through a mapping of
        another one.
        """
        self.was_read(handle)
        for one in self._writers.mapped_beside(handle, offset, size):
            self.was_read(one)
            if one.store is not None:
                self._doubtful.went_on(one)
            if not one.wrote:
                self._wrote(one)

    def writes(self, handle: Handle, pid: int) -> None:
        """A thread writes through it that did not do so last."""
        handle.writer = pid
        process = self._openers.process_of(pid)
        if process:
            handle.wrote_by.add(process)
        if not handle.others_wrote and process != handle.process:
            handle.others_wrote = True
            self._handles.changed(handle)

    def _wrote(self, handle: Handle) -> None:
        handle.take(CloseEvent.WROTE)
        self._handles.changed(handle)

    # -- closing

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
        handle = self._handles.handle(number)
        # before the waits below, which a killed writer does not live to see
        closer = self._openers.process_of(pid) if pid and handle.process else 0
        # Where it is not told who closes, it is asked of the process: the thread that opened the
        # file may have ended, or end before the one that closes what the process has.
        if await self._is_half(handle, pid or handle.process or handle.pid, closer):
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
        if op is not None:
            self._handles.was_saved(handle)
        if op is not None or handle.store is None:
            handle.closed_at = self._now()
        is_by_opener = closer > 0 and closer == handle.process
        if op is not None:
            handle.by_opener = is_by_opener
        else:
            handle.by_opener = handle.by_opener or is_by_opener
        if handle.writable:
            self._handles.changed(handle)
            self.report_refusal(handle.node)

    async def _is_half(self, handle: Handle, pid: int, closer: int) -> bool:
        """Whether what was written through the descriptor is not finished: its writer was killed,
        and nobody has gone on.

        `pid`: the thread that closes; or, where that is not told, the process that opened the file.
        `closer`: the process that closes; 0: not told.
        """
        node = handle.node
        if handle.writes_unseen:
            self._lane_use.look(handle)
        if not self._may_be_half(handle, closer):
            return False
        closing = await unlocked(self._closing, pid)
        if (
            closing is Closing.KILL
            and not node.body.interrupted
            and self._may_be_half(handle, closer)
        ):
            if await self._opener_has_it(handle, closer):
                return False  # who was killed had a copy by chance
            self._doubtful.went_on(handle)  # so what it closed before was a copy
            log.warning(
                "its writer was killed: not published, until it is written anew or `acpfs-ctl "
                "retry`",
                path=shown(self._table.path(node.ino)),
            )
            self.leave_half(node)
            handle.killed = True
            self._handles.changed(handle)
        elif closing is Closing.CALL and handle.killed and await self._is_opener(handle, closer):
            self.goes_on(handle)
        return node.body.interrupted

    def _may_be_half(self, handle: Handle, closer: int) -> bool:
        """Whether what its writer leaves is not finished, if that one is killed.

        So is what it closed before, as long as nothing is known of that: what it has had until now
        was another copy.
        """
        node = handle.node
        may_be_its = handle.may_be_writer(closer)
        waits_for_its = handle.state is CloseState.WAITING and may_be_its
        if node.body.modified and (handle.wrote or waits_for_its):
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

    def goes_on(self, handle: Handle) -> None:
        """A copy of the descriptor is in other hands than those that were killed, and these sync
        it: it is what they say it is.
        """
        if handle.killed and not handle.node.body.is_cold:
            handle.node.body.interrupted = False

    async def before_sync(self, handle: Handle) -> None:
        """As `DoubtfulCloses` has it."""
        await self._doubtful.before_sync(handle)

    def sync(self, handle: Handle) -> None:
        """Fix the content as it is, whoever else is at it: somebody says that it is good
        (fsync).
        """
        # What is written through a mapping in passthrough is not seen: so a second one counts, too.
        handle.is_shared_or_synced |= handle.was_synced and handle.writes_unseen
        handle.was_synced = True
        if not self._take_up(handle):
            return
        handle.take(CloseEvent.FIXED)
        self._handles.changed(handle)
        self._doubtful.fix(handle.node, quiet=True)

    def fix(self, node: Node) -> Op | None:
        """The same, of a file that nobody says anything of."""
        return self._doubtful.fix(node)

    def complete(self, handle: Handle) -> Op | None:
        """Fix what was written through the handle, which was closed, if nobody else is at the
        file.
        """
        if not self._take_up(handle):
            return None
        handle.take(CloseEvent.CLOSED)
        self._handles.changed(handle)
        return self.publish_if_done(handle.node)

    def _take_up(self, handle: Handle) -> bool:
        """Learn what was written through the handle; whether anything was."""
        if handle.writes_unseen:
            self._lane_use.look(handle)
        if handle.wrote:
            self._doubtful.went_on(handle)  # the kernel wrote after the first close
            self._lane_use.learn(handle)
        return handle.wrote

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
        if node.body.interrupted or (at_it and not self.is_log(node)):
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
            self._handles.changed(one)
        return op

    def publish_by_path(self, node: Node, *, is_still: bool) -> None:
        """The same after a change by path, with what has left RAM."""
        self.publish_if_done(node, is_still=is_still)
        self._outgrown.seal_taken_up(node)

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

    # -- closes of which it is not known whether they were the last

    async def settle_closes(self) -> None:
        """Find out about closes after which the kernel's RELEASE has not come.

        Those that were the close of their file count. The others are withdrawn when it is their
        turn in the order, or when somebody waits for them, and come again with their real close.
        """
        closed_before = self._now() - LAST_CLOSE_WAIT_S
        doubtful = [
            handle
            for handle in self._handles
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
                self._doubtful.went_on(handle)

    def _has_ended(self, handle: Handle) -> None:
        """Its close was that of the file, as far as /proc tells."""
        if handle.store is None:
            handle.take(CloseEvent.ENDED)
        elif self._wrote_unseen(handle):
            self._doubtful.went_on(handle)
        else:
            self._doubtful.ended(handle)
        self._handles.changed(handle)

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
        for handle in self._handles:
            counts = handle.state is CloseState.OVER
            if handle.writable and handle.closed_at:
                counts = self._openers.counts(self._close(handle, ended=True))
            if handle.store is not None:
                counts = counts and not self._wrote_unseen(handle)
                if counts:
                    self._doubtful.ended(handle)
                else:
                    self._doubtful.went_on(handle)
            elif handle.state is CloseState.CLEAN and counts:
                handle.take(CloseEvent.ENDED)
            elif handle.state is CloseState.OVER and not counts:
                handle.take(CloseEvent.WENT_ON)
            if counts:
                self._closed_at_the_end.add(handle.number)

    def was_closed(self, node: Node) -> bool:
        """At the end (`settle_at_the_end`): whether of those who have the file open for writing one
        has closed it, and nobody is at it.
        """
        writers = self._writers.of(node)
        others = [one for one in writers if one.number not in self._closed_at_the_end]
        return len(others) < len(writers) and not any(map(self._writers.is_at_it, others))

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

    @staticmethod
    def is_closed_since(op: Op, seq: int) -> bool:
        """Whether it is by a close that came with that number, or after another one which that
        withdrew as the worker died.
        """
        return op.kind is OpKind.STORE and op.seq >= seq and not op.begun

    def settle_former(self, close: Close, seq: Seq) -> None:
        """A close of a session that ended before it was known whether it was that of the file."""
        op = self._log.last_but_attributes_of(close.ino)
        if op is None or not self.is_closed_since(op, seq):
            return
        if not self._openers.counts(close):
            op.take(Step.CLOSED)
            self._changes.withdraw(op)

    # -- opens that fail, and halves

    async def not_opened(self, node: Node, opening: Opening, error: BaseException) -> None:
        """It failed, and is at the file no more: who closed that meanwhile may have waited for it.

        What it has truncated is nobody's finished work: where nobody writes to the file who goes on
        with it, it replaces nothing.
        """
        is_lost = opening.has_truncated and not self._is_written_on(node, opening)
        if not node.body.modified:
            pass  # all of it is in a version that counts: somebody has synced it
        elif is_lost:
            self.leave_half(node)
        elif isinstance(error, OSError):  # else the worker is about to end
            if opening.has_truncated or not opening.found_half:
                self._contents.go_on(node)
            if not self._writers.is_anybody_at_it(node):
                await self.mark(node)
            self.publish_if_done(node)
            self._outgrown.seal_taken_up(node)

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
        if not node.body.interrupted or self._writers.has_anybody_written(node):
            return True
        return opening.was_modified and self._writers.is_anybody_writing(node)

    def leave_half(self, node: Node) -> None:
        """What the file has is nobody's finished work: no open that is under way, and no copy of a
        descriptor whose writer left an earlier half, ends this one by failing, or being closed.
        """
        for opening in self._writers.opening(node):
            opening.found_half = True
        for handle in self._writers.of(node):
            if handle.killed:
                handle.killed = False
                self._handles.changed(handle)
        self._contents.interrupt(node)
        if node.kernel_writers:  # what others write from now on shows that somebody goes on
            self._contents.kernel.note_as_is(node)

    async def mark(self, node: Node) -> None:
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

    # -- who is at a file

    def at_it(self, node: Node) -> list[int]:
        """Processes of those who are, as far as they are known."""
        return self._writers.at_it(node)

    def is_half(self, node: Node) -> bool:
        """Whether nobody goes on with what its writer has left, as one would who is about to open
        it and truncates it.
        """
        return node.body.interrupted and not self._writers.is_opening(node)

    def is_anybody_at_it(self, node: Node) -> bool:
        """Whether somebody has the file open who has written to it, or may have, and is not
        done.
        """
        return self._writers.is_anybody_at_it(node)

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

    # -- the end of an open file

    async def closed_in_the_kernel(self, node: Node) -> None:
        """Before the file is opened: see `OutgrownFiles`."""
        await self._outgrown.closed_in_the_kernel(node)

    def released(self, handle: Handle) -> None:
        """The last reference of it is gone: that was its last close, unless it was written through
        since.
        """
        if handle.wrote:
            self._doubtful.went_on(handle)
        else:
            self._doubtful.ended(handle)

    def let_go_of_half(self, node: Node) -> None:
        """As `Changes` has it."""
        self._changes.let_go_of_half(node)

    def give_up_lost(self, node: Node) -> None:
        """What outgrew RAM, and of which everybody was told that it failed, is nobody's."""
        if self._outgrown.is_lost(node):
            self._changes.discard(node)
