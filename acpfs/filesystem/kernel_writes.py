"""What the kernel writes to tier files without the daemon: noticing it, and versions whose bytes it
may still change.

Writers in the passthrough lane and shared mappings leave only a new size and mtime of the tier
file, mappings not even that. An mtime alone is no proof: the kernel's clock ticks every few
milliseconds, and one write takes its time after it set the mtime. So the tier file is marked: its
mtime is set to a value that no clock gives (`mark_file`), under its inode lock, so that writes
under way are done and every later one replaces the mark. Marks outlive the worker (`marks`). Here
is also known, and told to the tier, which files the kernel writes: an application can hold up
whoever takes the inode lock of those.

Knows tier files, nodes and the log; does not know handles, room or lanes. Used under the file
system's lock, but for `mark_file`; nothing here waits.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from acpfs.filesystem.content.body import UNSEEN, Body, Writing
from acpfs.filesystem.fullness import STAMPS, Fullness
from acpfs.filesystem.marks import Marks
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.tier import BLOCK_BYTES, HUGE_PAGE_BYTES, UNREAD_NS, Tier, set_atime, set_mtime
from acpfs.runtime.clock import Clock
from acpfs.types import Ino, TierId, VersionId
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Version

MARKS_NS = 16 * STAMPS
"""Marks upon marks."""
_numbers = itertools.count()


def _blocks_max(size: int) -> int:
    """Of what was written. Pages that were taken ahead of it (`pages_ahead`) are nobody's
    business.
    """
    return -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES // BLOCK_BYTES


def mark_file(fd: int) -> tuple[int, int]:
    """Mark a tier file; what it looks like as long as nobody writes to it (`UNSEEN`: somebody has
    again).

    Waits for the write that is under way, which its application may hold up for ever. So of a file
    that the kernel writes it is called in that file's own thread (`RamFileCalls`), unless the
    kernel holds back whoever writes until a call is answered.
    """
    st = os.fstat(fd)
    mark = st.st_mtime_ns + 1 + next(_numbers) % STAMPS
    set_mtime(fd, mark)
    st = os.fstat(fd)
    return (mark, st.st_size) if st.st_mtime_ns == mark else UNSEEN


@dataclass(slots=True)
class WriteGuard:
    """A version of a file that the kernel may still write to: its bytes are good as long as the
    tier file looks like this.
    """

    seen: tuple[int, int]
    appended: bool = False
    """Whoever could write to the file when the version was made appends; who opens it later to do
    else has the version moved away first.
    """
    marking: Future[tuple[int, int]] | None = None
    """The file is being marked anew."""


class Looked(Protocol):
    """What is told of each look: the node has its size and blocks."""

    def __call__(self, node: Node, *, is_mapped: bool) -> None:
        """`is_mapped`: whether somebody may have mapped the file to write."""


class KernelWrites:
    """Looks at tier files for what the kernel did to them."""

    def __init__(
        self,
        tier: Tier,
        log: OperationLog,
        table: NodeTable,
        opened: Callable[[Body], int],
        marks: Marks,
        renewed: Callable[[Version], None],
        clock: Clock,
        looked: Looked,
    ) -> None:
        """`opened`: the descriptor of a content, to look at it and to set its times.

        `renewed`: called when a version had to become what its file is now. `looked`: called with
        each look at a file.
        """
        self._looked = looked
        self._now = clock.now
        self._renewed = renewed
        self._tier = tier
        self._log = log
        self._table = table
        self._opened = opened
        self._marks = marks
        self._fullness = Fullness(tier, table, clock)
        self._guards: dict[VersionId, WriteGuard] = {}
        self._mappable: set[VersionId] = set()
        """Versions that share, or have shared, their bytes with a file that could be mapped to
        write.
        """
        self._of_dead: set[VersionId] = set()
        """Those with a file that programs of an earlier session could write."""

    def look(self, node: Node) -> bool:
        """Take over what the kernel wrote to the tier file since it was marked; whether it wrote
        anything.
        """
        body = node.body
        if body.is_cold or not body.tier:
            return False
        moment = self._fullness.moment() if node.kernel_writers else None
        st = self._tier.settle_fd(body.tier, self._opened(body))
        if moment is not None:
            self._fullness.judge(node, st, moment)
        if (st.st_mtime_ns, st.st_size) == body.seen:
            self._looked(node, is_mapped=self.has_trace(st))
            if self._may_store(node, st):
                self.assume_changed(node)
            return False
        node.size = st.st_size
        node.blocks = self._blocks(node, st)
        self._looked(node, is_mapped=self.has_trace(st))
        if body.interrupted and body.seen != UNSEEN:  # somebody goes on writing to it
            body.interrupted = False
            self._table.changed(node)
        only_marked = (
            body.seen == UNSEEN and 0 <= st.st_mtime_ns - node.mtime_ns <= MARKS_NS
        )  # by a worker that died before it said so
        if not only_marked:
            node.mtime_ns = st.st_mtime_ns
            node.ctime_ns = st.st_mtime_ns
        if node.kernel_rewriters and body.seen != UNSEEN and body.writing is not Writing.WHOLE:
            # Not only while such a writer is there: what he leaves is no log either. (`UNSEEN`: it
            # may have been the daemon.)
            body.writing = Writing.WHOLE
            self._table.changed(node)
        self.assume_changed(node)
        return True

    def has_written(self, node: Node) -> bool:
        """Whether the kernel was seen to write to a content in RAM since that was marked."""
        st = os.fstat(self._opened(node.body))
        return (st.st_mtime_ns, st.st_size) != node.body.seen

    def _may_store(self, node: Node, st: os.stat_result) -> bool:
        """Of a file that looks as it did: whether somebody may store to it through a mapping, at
        any moment.

        Then it counts as changed until that is over. But no write was seen: the file is not marked
        for it, which others would take for one, and a half stays a half. Not where all who may map
        it are of the daemon's lane, opened beside a writer: these keep back nothing before they
        write.
        """
        if not node.kernel_mappers or node.body.interrupted:
            return False
        return self.has_trace(st)

    def has_trace(self, st: os.stat_result) -> bool:
        """Whether the tier file may have been mapped since `expect_mappings`; so it is, too, where
        the kernel tells no more.
        """
        return st.st_atime_ns != UNREAD_NS or not self._tier.tells_of_mappings()

    @staticmethod
    def _blocks(node: Node, st: os.stat_result) -> int:
        return st.st_blocks if node.body.reserved else min(st.st_blocks, _blocks_max(st.st_size))

    def mark(self, node: Node) -> None:
        """Mark the tier file, at once: the kernel holds back whoever writes to the file."""
        if self.look(node):
            self.note(node, mark_file(self._opened(node.body)))

    def expect(self, node: Node) -> None:
        """From now on somebody may write unseen.

        Marks the tier file, unless it holds something unfrozen anyway.
        """
        if not node.kernel_writers and not node.body.is_cold:
            assert not self._tier.calls.is_handed_over(node.body.tier), node.ino
            if not node.body.modified or node.body.interrupted:
                node.body.seen = mark_file(self._opened(node.body))
            self._marks.set(
                node.ino,
                UNSEEN if node.body.modified and not node.body.interrupted else node.body.seen,
            )
            moment = self._fullness.moment()
            self._fullness.judge(node, os.fstat(self._opened(node.body)), moment)
        node.kernel_writers += 1
        self._table.tell(node)
        self._tier.calls.hand_over(node.body.tier)

    def expect_mappings(self, node: Node) -> None:
        """From now on somebody may map the file to write, who is the first to have it open in the
        kernel.

        Before `expect`: later an application may have the inode lock that this takes.
        """
        assert not node.in_kernel, node.ino
        assert not self._tier.calls.is_handed_over(node.body.tier), node.ino
        set_atime(self._opened(node.body), UNREAD_NS)

    def may_be_mapped(self, node: Node) -> bool:
        """Whether the kernel may have mapped the tier file since `expect_mappings`; or somebody has
        read it in the kernel.

        mmap and read set the atime, and nothing else does: what the daemon reads leaves no trace.
        """
        tier_id = node.kernel_target
        if not tier_id or self._tier.is_lost(tier_id):
            return False
        return self.has_trace(self._tier.stat(tier_id))

    def left(self, node: Node) -> None:
        """One less may write unseen.

        The kernel says so when every write(2) of that one has returned.
        """
        assert node.kernel_target is not None
        node.kernel_writers -= 1
        self._table.tell(node)
        self._tier.calls.take_back(node.kernel_target)

    def note(self, node: Node, seen: tuple[int, int]) -> None:
        """The tier file looks like this, and everything in it is known."""
        node.body.seen = seen
        self._table.changed(
            node
        )  # the next worker believes the row where the mark fits: size and times come with it
        if node.kernel_writers:
            self._marks.set(node.ino, seen)
            self._fullness.marked(node.ino, seen[0])

    def marked(self, node: Node, seen: tuple[int, int]) -> None:
        """The tier file was marked behind a write that may have gone on after the last look.

        What it wrote since is seen by no later look: that finds the mark, and nothing new.
        """
        if seen != UNSEEN:
            node.blocks = self._blocks(
                node, self._tier.settle_fd(node.body.tier, self._opened(node.body))
            )
            node.size = seen[1]
            if not 0 <= seen[0] - node.mtime_ns <= MARKS_NS:
                node.mtime_ns = seen[0]
                node.ctime_ns = seen[0]
            self.assume_changed(node)
        self.note(node, seen)

    def note_as_is(self, node: Node) -> None:
        """All of the tier file is known, but for a write under way: nobody waits to set a mark."""
        st = os.fstat(self._opened(node.body))
        self.note(node, (st.st_mtime_ns, st.st_size))

    def mark_behind(self, tier_id: TierId) -> Future[tuple[int, int]]:
        """Mark a tier file in its own thread, as soon as the write that is under way is done."""
        return self._tier.calls.submit(tier_id, self._mark, tier_id)

    def _mark(self, tier_id: TierId) -> tuple[int, int]:
        try:
            fd = self._tier.open(tier_id)
        except FileNotFoundError:
            return UNSEEN
        try:
            return mark_file(fd)
        finally:
            os.close(fd)

    def assume_changed(self, node: Node) -> None:
        """The kernel may have written through a mapping, which leaves no trace."""
        body = node.body
        if not body.is_cold and not body.modified:
            body.modified = True
            body.interrupted = False
            body.modified_since = self._now()
            self._table.changed(node)

    def set_times(self, node: Node) -> None:
        """The file's times were set: the tier file shows them too, so that the change is not taken
        for a write.
        """
        body = node.body
        if body.is_cold or not (
            node.kernel_writers or (body.modified and body.is_whole_in_ram and node.handles)
        ):
            return
        fd = self._opened(body)
        set_mtime(fd, node.mtime_ns)
        if node.kernel_writers:
            # else whoever opens the file to write unseen finds the times that were set, and no
            # others
            st = os.fstat(fd)
            self.note(node, (st.st_mtime_ns, st.st_size))

    # -- after the end of a worker

    def resume(self, node: Node) -> None:
        """Take over what was written to the tier file since the node's row was: by the worker, or
        by the kernel until now.
        """
        st = self._tier.stat(node.body.tier)
        if not self._is_as_recorded(node, node.body, st):
            self.look(node)
        elif node.ino in self._marks:
            node.body.seen = (st.st_mtime_ns, st.st_size)

    def _is_as_recorded(self, node: Node, body: Body, st: os.stat_result) -> bool:
        """But for a mark that the worker did not live to record: then the row's times are right,
        also those that were set.
        """
        mark = self._marks.get(node.ino)
        if mark is not None and not (body.modified and mark == UNSEEN):
            return st.st_size == mark[1] and 0 <= st.st_mtime_ns - mark[0] <= MARKS_NS
        if body.modified:
            return st.st_size == node.size and st.st_mtime_ns <= node.ctime_ns + MARKS_NS
        return st.st_size == node.size or body.is_outgrown

    def restored(self, node: Node) -> None:
        """The file was open for writing with an earlier worker, and still is.

        The tmpfs is as that one left it: only workers free pages.
        """
        assert node.kernel_target is not None
        node.kernel_writers += 1
        self._table.tell(node)
        self._tier.calls.hand_over(node.kernel_target)
        moment = self._fullness.moment()
        written = self.look(node) or node.body.modified
        if node.body.interrupted:
            self.note_as_is(node)  # what is written from now on shows that somebody goes on with it
        self._fullness.judge_found(node, moment, written=written)

    def left_open(self) -> Iterator[tuple[Ino, TierId]]:
        """Nodes, with their tier files, that somebody could write unseen when the last worker
        ended, and of whom this one knows nothing.
        """
        for ino in self._marks:
            node = self._table.get(ino)
            if node is not None and not node.kernel_writers and node.body.tier:
                yield ino, node.body.tier

    def watch_again(self, versions: Iterable[Version], *, mappable: bool) -> None:
        """The kernel has been writing all the time.

        What the versions looked like is not known any more: they are streamed again. `mappable`:
        somebody may have their file mapped.
        """
        for version in versions:
            self._guards[version.vid] = WriteGuard(UNSEEN)
            if mappable:
                self._mappable.add(version.vid)

    # -- versions that it may still change

    def guard(self, version: Version, node: Node) -> None:
        """The version shares its bytes with a file that the kernel may go on writing to."""
        self._guards[version.vid] = WriteGuard(node.body.seen, appended=not node.kernel_rewriters)
        if node.kernel_mappers or node.bound_handles:
            self._mappable.add(version.vid)

    def only_appended(self, version: Version) -> bool:
        guard = self._guards.get(version.vid)
        return guard is not None and guard.appended

    def forget(self, version: Version) -> None:
        """Nobody needs the version any more."""
        self._guards.pop(version.vid, None)
        self._mappable.discard(version.vid)
        self._of_dead.discard(version.vid)

    def is_changing(self, version: Version) -> bool:
        """Whether its file is being marked behind a write that is under way."""
        return self.when_still(version) is not None

    def when_still(self, version: Version) -> Future[tuple[int, int]] | None:
        """Done when the mark is set; None: its file is not being marked."""
        guard = self._guards.get(version.vid)
        marking = None if guard is None else guard.marking
        return None if marking is None or marking.done() else marking

    def may_have_changed(self, version: Version) -> bool:
        """Whether somebody may have changed the version's bytes without a trace, through a mapping
        or with a session that is over; also when nobody has the file open any more.
        """
        return version.vid in self._of_dead or (
            version.vid in self._mappable and self.has_trace(self._tier.stat(version.tier_id))
        )

    def of_dead_session(self, versions: Iterable[Version]) -> None:
        """Programs of an earlier session may have written to these since they were made."""
        self._of_dead.update(version.vid for version in versions)

    def still_frozen(self, version: Version) -> bool:
        """Whether the version's bytes are what they were.

        If not, the version is the content as it is now, and has to be streamed anew.

        What was read before the file was marked again may be of several moments; so a version is
        read at least once after that.
        """
        guard = self._guards.get(version.vid)
        if guard is None:
            return True
        st = self._tier.stat(version.tier_id)
        if (st.st_mtime_ns, st.st_size) == guard.seen:
            return True
        if guard.marking is None:
            guard.seen = UNSEEN
            guard.marking = self.mark_behind(version.tier_id)
        elif guard.marking.done():
            guard.seen = guard.marking.result()
            guard.marking = None
        if not version.is_staged:  # what is placed has the length it was staged with
            version.size = st.st_size
        self.renew(version)
        return False

    def renew(self, version: Version) -> None:
        """Its file may have other bytes than what was read of it."""
        version.digest = ""
        version.renewals += 1
        self._log.save_version(version)
        self._renewed(version)

    def ended(self, node: Node, versions: Iterable[Version]) -> None:
        """Nobody writes unseen any more: what versions see now stays as it is."""
        self._marks.forget(node.ino)
        self._fullness.ended(node.ino)
        for version in versions:
            self.still_frozen(version)
            self._guards.pop(version.vid, None)
