"""The file system: what every call means, independent of the transport that brings it.

Offers the calls by number (node, handle), as the kernel makes them, and nothing else: its parts
(`construction`) are its own. Coroutines wait as described in `steps`; run them through
`FileSystem.steps`. Plain functions never wait and must be called under `FileSystem.lock`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from acpfs.backing.lower import LowerStat, SpaceInfo
from acpfs.config import WhenFull
from acpfs.filesystem.admission import Net
from acpfs.filesystem.construction import FileSystemParts
from acpfs.filesystem.content.body import ContentStatistics
from acpfs.filesystem.content.fill import WarmStatistics
from acpfs.filesystem.content.spilling import MovedOut, Unmirrored
from acpfs.filesystem.directories import Fitting
from acpfs.filesystem.hold import HeldReport, Holder
from acpfs.filesystem.lowerview import LowerViewStatistics
from acpfs.filesystem.names import fail
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import (
    AttributeChange,
    Attributes,
    Caller,
    DirEntry,
    FileReport,
    IncompleteFile,
    Lane,
    OpenFile,
    WaitingWriter,
    WrittenFile,
)
from acpfs.filesystem.steps import wait
from acpfs.ram.tier import TierStatistics
from acpfs.ram.waiting import NO_OWNER
from acpfs.types import ROOT, HandleId, Ino, Seq, TierId
from acpfs.writeback.sources.spill import SpillStatistics


@dataclass(frozen=True, slots=True)
class FileSystemStatistics:
    """What `status`, the metrics and the tests see; gauges of a file system at rest are zero."""

    nodes: int
    open_files: int
    interrupted_files: int
    waiting: tuple[WaitingWriter, ...]
    """Who waits for room in RAM: first the queue, in the order of turns."""
    overflowed_files: int
    """Files that did not fit into the RAM tier and were written straight to the backing
    directory.
    """
    open_lanes: dict[str, int]
    """Lane → open files that use it; every lane of this mount is there."""
    lane_choices: dict[str, int]
    """Why opens went the way they went → how many."""
    pins: tuple[bytes, ...]
    """Paths whose files do not leave RAM."""
    pinned_bytes: int
    is_pinned_full: bool
    """Pins keep more of the budget than a pin may be made for."""
    held: tuple[HeldReport, ...]
    """Files whose passthrough writers wait for room."""
    tier: TierStatistics
    content: ContentStatistics
    lower_view: LowerViewStatistics
    spill: SpillStatistics | None
    """None: there is no spill tier."""
    spilled: MovedOut
    """Files and bytes that left RAM for the spill directory."""
    warm: WarmStatistics
    unmirrored: Unmirrored | None
    """None: no files are mirrored."""


class FileSystem:
    """Every call of every transport."""

    def __init__(self, parts: FileSystemParts) -> None:
        self.settings = parts.settings
        self.lock = parts.lock
        self.steps = parts.steps
        self._parts = parts
        self._names = parts.names
        self._attributes = parts.attributes
        self._directories = parts.directories
        self._handles = parts.handles
        self._opens = parts.opens
        self._closes = parts.closes
        self._open = parts.open_files
        self._files = parts.files
        self._syncing = parts.syncing
        self._table = parts.table
        self._view = parts.lower_view
        self._state = parts.state
        self.attributes_at_once = parts.at_once.attributes
        self.entry_at_once = parts.at_once.entry
        self.never_kept_at_once = parts.at_once.never_kept

    @property
    def has_acls(self) -> bool:
        """Whether the backing directory has POSIX ACLs; known as soon as it was probed."""
        return self._parts.lower.features.acls

    def follow_kernel_times(self) -> None:
        """The kernel sets times of files, too, by its own clock."""
        self._table.change_clock.follow_kernel()

    def hear_time(self, set_ns: int) -> None:
        """Somebody, perhaps the kernel, set a file's mtime to this."""
        self._table.change_clock.hear(set_ns)

    # -- start

    async def start(self, space: SpaceInfo | None = None) -> SpaceInfo:
        """Learn the top of the backing directory; sort out what an earlier daemon left.

        Asks the backing directory twice.

        `space`: what an earlier worker of this mount has learned; then the backing directory, which
        may hang, is not asked. The answer is for the next one.

        Raises:
            OSError: the backing directory does not answer.
        """
        if space is not None and ROOT in self._table:
            self._parts.space.learn(space, of_earlier_worker=True)
        else:
            top: LowerStat = await self._view.questions.call(
                "lstat top", self._parts.lower.lstat, ()
            )
            self._parts.space.learn(
                await self._view.questions.call("statfs", self._parts.lower.space)
            )
            if ROOT not in self._table:
                self._table.found_root(top)
            self._view.compare(self._table[ROOT], top)
        self._table[ROOT].lookups = 1
        self._view.ahead.taken_over()
        self._open.restore()
        self._directories.restore()
        earlier = self._parts.contents.earlier
        self._parts.contents.find_earlier_writers(self._handles.kept.former_targets())
        for node in self._table:
            node.lookups = max(node.lookups, self._parts.kept.references_of(node.ino))
        for node in self._table:
            if node.ino in self._table:  # else it has gone with one that it was kept for
                self._take_over(node)
        self._table.took_over_open_files()
        self._parts.contents.retention.begin()
        if self._parts.spilling is not None:
            self._parts.spilling.begin()
        await earlier.begin()
        return self._parts.space.known

    def _take_over(self, node: Node) -> None:
        """A node that an earlier worker knew.

        Without a takeover nobody has it open now, and the kernel does not know it.
        """
        if not node.names and node.ino != ROOT:
            # deleted, or never named: nobody else will ask for what it had, but for what was logged
            # behind it, where its last RELEASE was under way: `finish_outgrown` goes on with that
            if not (self._parts.kept.taken_over and self._was_closed(node)):
                self._parts.changes.let_go_of_half(node)
        elif node.kernel_writers:
            self._parts.contents.watch_again(node, versions_too=node.kernel_rewriters > 0)
        elif node.body.modified and not node.handles:
            if self._parts.kept.taken_over and self._was_closed(node):
                self._parts.changes.freeze(node)  # its last RELEASE was under way
            else:
                self._parts.contents.interrupt(node)
        elif not node.handles:
            self._parts.contents.forget_vain_write(node)
        self._parts.ahead.found(node)
        if not (node.kernel_writers or self._parts.contents.earlier.may_write(node.body.tier)):
            self._parts.contents.kernel_ended(node)
        if not node.body.is_cold:
            self._parts.contents.retention.settle_again(node)
        self._parts.finish_outgrown(node)
        self._view.reap(node)

    @staticmethod
    def _was_closed(node: Node) -> bool:
        """Whether nobody has it open, and nobody who had was killed or failed."""
        return not (node.handles or node.body.interrupted or node.body.failed)

    def watch_outside(
        self, changed: Callable[[Ino], None], lost: Callable[[Ino, bytes, Ino], None]
    ) -> None:
        """Be told of nodes that others changed on the backing directory, and of names (parent,
        name, node) that they removed.

        Called under the lock, from any thread, and only for what the kernel knows.
        """
        self._view.notices.pass_on(changed, lost)

    def watch_forgotten(self, forgotten: Callable[[HandleId], None]) -> None:
        """Be told of open files that are given up without the kernel's RELEASE."""
        self._view.notices.pass_on_forgotten(forgotten)

    def watch_mapped(self, mapped: Callable[[HandleId, Callable[[], int]], None]) -> None:
        """Be told of open files that the kernel has released, each time before it is asked who has
        them mapped: `Notices.mapped`.
        """
        self._view.notices.pass_on_mapped(mapped)

    # -- names

    async def lookup(self, parent: Ino, name: bytes, *, waits: bool = True) -> Attributes:
        """Takes a kernel reference.

        `waits`: for a name that another member is about to persist, where that is asked for.
        """
        return self._attributes.of(await self._names.lookup(parent, name, waits=waits))

    def forget(self, references: Iterable[tuple[Ino, int]]) -> None:
        """The kernel drops references: (node, how many). Takes the lock."""
        with self.lock, self._state.step():
            for ino, count in references:
                node = self._table.get(ino)
                if node is not None:
                    node.lookups = max(0, node.lookups - count)
                    self._view.reap(node)

    def _check_space(self, unique: int = 0) -> None:
        """Before anything is changed; not for a request that comes again, and may have been carried
        out.

        Raises:
            OSError: ENOSPC: what is left for the state is for what was promised.
        """
        if self._state.space.is_short() and not self._handles.comes_again(unique):
            raise fail(errno.ENOSPC)

    async def readlink(self, ino: Ino) -> bytes:
        return await self._view.load_target(self._names.node(ino))

    async def mknod(
        self, parent: Ino, name: bytes, mode: int, rdev: int, caller: Caller
    ) -> Attributes:
        """Takes a kernel reference."""
        self._check_space()
        return self._attributes.of(await self._names.mknod(parent, name, mode, rdev, caller))

    async def mkdir(self, parent: Ino, name: bytes, mode: int, caller: Caller) -> Attributes:
        """Takes a kernel reference."""
        self._check_space()
        return self._attributes.of(await self._names.mkdir(parent, name, mode, caller))

    async def symlink(self, parent: Ino, name: bytes, target: bytes, caller: Caller) -> Attributes:
        """Takes a kernel reference."""
        self._check_space()
        return self._attributes.of(await self._names.symlink(parent, name, target, caller))

    async def link(self, ino: Ino, parent: Ino, name: bytes, pid: int = 0) -> Attributes:
        """Takes a kernel reference. `pid`: the thread that calls; 0: it cannot be told."""
        self._check_space()
        return self._attributes.of(await self._names.link(ino, parent, name, pid))

    async def unlink(self, parent: Ino, name: bytes) -> None:
        await self._names.unlink(parent, name)

    async def rmdir(self, parent: Ino, name: bytes) -> None:
        await self._names.rmdir(parent, name)

    async def rename(
        self,
        parent: Ino,
        name: bytes,
        new_parent: Ino,
        new_name: bytes,
        flags: int,
        pid: int = 0,
    ) -> None:
        """As renameat2, with RENAME_NOREPLACE and RENAME_EXCHANGE. `pid`: as `link` has it."""
        await self._names.rename(parent, name, new_parent, new_name, flags, pid)

    # -- attributes

    async def getattr(self, ino: Ino, handle: HandleId | None = None) -> Attributes:
        """Attributes; of an open file also after it was deleted."""
        return await self._attributes.getattr(self._names.node(ino))

    async def setattr(
        self, ino: Ino, change: AttributeChange, handle: HandleId | None, caller: Caller
    ) -> Attributes:
        """chmod, chown, utimens, truncate."""
        node = self._names.node(ino)
        if change.size is not None:
            await self._view.renew(node)
            await self._files.truncate(node, change.size, handle)
        if any(
            v is not None
            for v in (change.mode, change.uid, change.gid, change.atime_ns, change.mtime_ns)
        ):
            await self._attributes.setattr(node, change)
        elif change.size is None:
            await self._view.renew(node)
            node.ctime_ns = self._table.change_clock.now_ns(
                node.ctime_ns
            )  # chown(-1, -1) changes nothing else
        return self._attributes.of(node)

    async def getxattr(self, ino: Ino, name: bytes) -> bytes:
        return await self._attributes.getxattr(self._names.node(ino), name)

    async def listxattr(self, ino: Ino, uid: int = 0) -> list[bytes]:
        return await self._attributes.listxattr(self._names.node(ino), uid)

    async def setxattr(
        self,
        ino: Ino,
        name: bytes,
        value: bytes,
        flags: int = 0,
        uid: int = 0,
        *,
        kills_set_gid: bool | None = None,
    ) -> None:
        """Set an extended attribute; flags XATTR_CREATE (1), XATTR_REPLACE (2).

        `uid`: the caller's.

        `kills_set_gid`: whether that takes set-gid away (of an ACL); None: the kernel does not say.
        """
        self._check_space()
        await self._attributes.setxattr(
            self._names.node(ino), name, value, flags, uid, kills_set_gid=kills_set_gid
        )

    async def removexattr(self, ino: Ino, name: bytes, uid: int = 0) -> None:
        await self._attributes.removexattr(self._names.node(ino), name, uid)

    # -- files

    async def open(self, ino: Ino, flags: int, caller: Caller) -> OpenFile:
        self._parts.descriptors.before_open(*self._handles.files_of(caller.uid))
        return await self._opens.open(ino, flags, caller)

    async def create(
        self, parent: Ino, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[OpenFile, Attributes]:
        """Make and open a regular file; takes a kernel reference."""
        self._check_space(caller.unique)
        self._parts.descriptors.before_open(*self._handles.files_of(caller.uid))
        opened, node = await self._opens.create(parent, name, mode, flags, caller)
        return opened, self._attributes.of(node)

    async def tmpfile(
        self, parent: Ino, mode: int, flags: int, caller: Caller
    ) -> tuple[OpenFile, Attributes]:
        """O_TMPFILE; takes a kernel reference."""
        self._check_space(caller.unique)
        self._parts.descriptors.before_open(*self._handles.files_of(caller.uid))
        opened, node = await self._opens.tmpfile(parent, mode, flags, caller)
        return opened, self._attributes.of(node)

    def writes_to_storage(self, handle: HandleId) -> bool:
        """Whether what is written through it goes to the storage, which may keep it waiting.

        A hint: without the lock.
        """
        return self._handles.writes_to_storage(handle)

    def is_open(self, handle: HandleId) -> bool:
        """Whether there is an open file of that number."""
        return handle in self._handles

    def refuse_passthrough(self, handle: HandleId) -> None:
        """The kernel would not take the descriptor of an open that was answered with the
        passthrough lane. Takes the lock.
        """
        with self.lock:
            self._opens.refuse_passthrough(handle)

    async def read(self, handle: HandleId, offset: int, size: int) -> bytes:
        """Up to `size` bytes."""
        return await self._files.read(handle, offset, size)

    async def write(
        self,
        handle: HandleId,
        offset: int,
        data: bytes | memoryview,
        pid: int = 0,
        *,
        is_durable: bool = False,
        is_mapped: bool | None = None,
    ) -> int:
        """Write all bytes; returns how many. `pid`: the thread that does; 0: it cannot be told.

        `is_durable`: this write is persisted when it returns, as those of a descriptor with
        O_DSYNC. `is_mapped`: the kernel writes the pages of a mapping back, through whichever
        descriptor was mapped; None: that is not told.
        """
        return await self._files.write(
            handle, offset, data, pid, is_durable=is_durable, is_mapped=is_mapped
        )

    async def flush(self, handle: HandleId, pid: int = 0) -> None:
        """One descriptor of the open file was closed, by the thread `pid`; 0: who opened it, for
        all that is known.
        """
        await self._closes.flush(handle, pid)

    async def goes_on_mapped(self, handle: HandleId) -> bool:
        """Whether a mapping outlives the open file that is to be released; then `release` is not
        for the caller to call.
        """
        return await self._open.goes_on_mapped(handle)

    async def settle_mappings(self) -> None:
        """Release open files that were kept for the mappings made through them, where those are
        gone.
        """
        await self._open.settle_mappings()

    async def release(self, handle: HandleId) -> None:
        await self._open.release(handle)

    async def fsync(self, handle: HandleId, datasync: bool) -> None:
        """Fix the content in the order, and more by the mode of mount and directory."""
        with self._parts.durations.fsync.measured():
            await self._syncing.fsync(handle)

    async def fallocate(self, handle: HandleId, mode: int, offset: int, length: int) -> None:
        """Allocate or punch, as the system call of that name."""
        await self._files.fallocate(handle, mode, offset, length)

    async def copy_range(
        self, source: HandleId, source_offset: int, handle: HandleId, offset: int, size: int
    ) -> int:
        """copy_file_range; returns how many bytes, possibly fewer than asked for."""
        return await self._files.copy_range(source, source_offset, handle, offset, size)

    async def hold_taken(self, ino: Ino) -> Attributes:
        """A file's inode lock is had, by a call that changes nothing; keeps it as long as writers
        must wait. Always ends with an error.

        Raises:
            OSError: EAGAIN: take it again at once. ECANCELED: no more.
        """
        until = self._parts.hold.taken(ino)
        if until is None:
            raise fail(errno.ECANCELED)
        try:
            again = await wait(until)
        except InterruptedError:
            self._parts.hold.lost(ino, until)
            raise
        raise fail(errno.EAGAIN if again else errno.ECANCELED)

    async def lseek(self, handle: HandleId, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE."""
        return await self._files.lseek(handle, offset, whence)

    # -- directories

    async def opendir(self, ino: Ino, unique: int = 0) -> HandleId:
        """Open a directory; `unique`: as `Caller.unique`."""
        return self._directories.opendir(ino, unique)

    async def readdir(
        self,
        handle: HandleId,
        offset: int,
        *,
        with_attributes: bool,
        without_fails: bool = False,
        fitting: Fitting = len,
    ) -> list[DirEntry]:
        """Entries from an offset on; with attributes each entry but `.` and `..` carries a kernel
        reference.

        Those whose attributes the backing directory does not tell soon have none; with
        `without_fails` they are waited for. `fitting`: how many of the next names, the dots
        included, the answer has room for.
        """
        return await self._directories.readdir(
            handle,
            offset,
            with_attributes=with_attributes,
            without_fails=without_fails,
            fitting=fitting,
        )

    async def releasedir(self, handle: HandleId) -> None:
        self._directories.releasedir(handle)

    async def fsyncdir(self, handle: HandleId) -> None:
        """fsync of a directory: the order is fixed already; in durable mode, wait until its names
        are persisted.
        """
        await self._syncing.fsync_directory(self._directories.node(handle))

    # -- the whole

    async def statfs(self, uid: int = NO_OWNER) -> SpaceInfo:
        """Space of the backing file system; where that does not answer, as it was (S43).

        Where a full RAM refuses writes, not more than is left there for files of that user.
        """
        space = await self._parts.space.left()
        room = self._parts.room
        if room.when_full is not WhenFull.ERROR:
            return space
        left = self._parts.contents.retention.left_bytes(uid) // max(1, space.block_bytes)
        return replace(space, blocks_available=max(0, min(space.blocks_available, left)))

    def offer_lanes(self, daemon: Lane, *, passthrough: bool) -> None:
        """As `Lanes.offer`: what the transport has."""
        self._parts.lanes.offer(daemon, passthrough=passthrough)

    def offer_holder(self, holder: Holder | None, net: Net = Net.NONE) -> None:
        """As `Hold.offer`; under the lock."""
        self._parts.hold.offer(holder, net)

    def watched_writers(self) -> list[Ino]:
        """Files with writers that the daemon does not see; under the lock."""
        return self._parts.hold.watched()

    def held_files(self) -> list[Ino]:
        """Files whose writers are held, or are to be; under the lock."""
        return self._parts.hold.held()

    def holder_lost(self) -> None:
        """As `Hold` has it; under the lock."""
        self._parts.hold.holder_lost()

    def tick(self) -> float:
        """Look after writers that the daemon does not see; under the lock; returns after how many
        seconds to do it again.
        """
        with self._state.step():
            return self._parts.hold.tick()

    def freeze_all(self) -> int:
        """At the end, under the lock: fix the content of open files that somebody closed, and of
        logs; returns how many.
        """
        with self._state.step():
            self._closes.settle_at_the_end()
            return self._syncing.freeze_the_closed()

    async def settle_closes(self) -> None:
        """Find out which closes were the close of their file, and who of an earlier session can
        write no more; before `freeze_old`.
        """
        await self._open.settle_mappings()
        await self._closes.settle_closes()
        earlier = self._parts.contents.earlier
        for tier_id in earlier.settle():
            self.steps.start(earlier.leave(tier_id), lambda _value, _error: None)

    def freeze_old(self) -> int:
        """Commit long-open logs as of now (S12); under the lock; returns how many.

        Those that the kernel writes come by themselves, each as soon as the write that is under way
        is done: none of them holds up the others.
        """
        age_s = self.settings.max_dirty_age_s
        marked = 0
        frozen = 0
        if age_s:
            for node in self._syncing.due_older_than(age_s):
                if node.kernel_writers and not node.body.marking:
                    marked += 1
                    self.steps.start(self._syncing.freeze_marked(node), lambda _value, _error: None)
        with self._state.step():
            if age_s:
                frozen = self._syncing.freeze_older_than(age_s)
            if self._parts.spilling is not None:
                self._parts.spilling.look()
        return frozen + marked

    def look_after_waiting(self) -> None:
        """Every second, under the lock: what those who wait for room waited for may be parked by
        now; foreign groups may be short of it.
        """
        with self._state.step():
            self._parts.urgent.look()
            self._parts.room.look_again()
            self._parts.payers.look()

    def look_up_all_anew(self) -> None:
        """Ask the backing directory anew for all names and attributes, however young; under the
        lock.
        """
        self._view.trusted_since = self._parts.upper.runtime.clock.now()

    def change_when_full(self, when_full: WhenFull) -> None:
        """Another policy from now on, also for those who wait; under the lock."""
        with self._state.step():
            self._parts.room.change_policy(when_full)
            self._parts.hold.look_soon()

    # -- for control; all under the lock, but for those that say otherwise

    def has_directory(self, end: bytes) -> bool:
        """Whether the kernel has a directory whose path ends so, in whole names."""
        with self.lock:
            return self._parts.reports.has_directory(end)

    def files_report(self, prefix: bytes = b"") -> list[FileReport]:
        """State of each file in RAM or in the log, below a path relative to the mount point."""
        return self._parts.reports.files(prefix)

    def closes_known(self, paths: Collection[bytes] = ()) -> Future[None]:
        """Done when of each close until now, of a file below the paths, is known whether it was the
        last; at once for nearly all.
        """
        return self._parts.changes.closes_known(self._parts.reports.operations(paths))

    def complete_until(self, paths: Iterable[bytes] = ()) -> Seq:
        """The number up to which the log must be done so that all complete content below the paths
        is persisted; 0: nothing pending.
        """
        return self._parts.reports.complete_until(paths)

    def incomplete(self, paths: Collection[bytes]) -> list[IncompleteFile]:
        """Files at and below the paths of which what they have now has no place in the order, as
        their writers are at it or were lost.
        """
        with self._state.step():
            self._syncing.look_at_writers()
            for node in self._parts.reports.changed_in_kernel(paths):
                self._parts.contents.kernel.assume_changed(node)
            return self._parts.reports.incomplete(paths)

    def being_written(self, limit: int) -> list[WrittenFile]:
        """Files that somebody writes, those first that have been so for longest."""
        with self.lock:
            return self._parts.reports.being_written(limit)

    def maybe_mapped(self, paths: Collection[bytes]) -> dict[Ino, bytes]:
        """Files at and below the paths that may have been changed through a mapping, of which only
        the kernel knows; and a path of each.
        """
        with self.lock:
            return self._parts.reports.maybe_mapped(paths)

    def keep_deleted(self, kept: dict[Ino, int], keep: Callable[[Ino, list[int]], None]) -> None:
        """Go on with the last worker's descriptors of deleted files that are still open
        (`Nameless`), and have `keep` keep new ones.
        """
        with self.lock:
            self._view.notices.pass_on_kept(keep)
            for ino, fd in kept.items():
                node = self._table.get(ino)
                if node is not None:
                    self._view.nameless.restore(node, fd)
                else:
                    self._view.nameless.give_back(ino, fd)

    def writers_of(self, tier_ids: Collection[TierId]) -> list[tuple[bytes, list[int]]]:
        """Paths of the files that are, or were when they were opened, in these tier files; and who
        has them open to write.
        """
        if not tier_ids:
            return []
        with self.lock:
            return [
                (self._table.path(node.ino), self._handles.writers_of(node))
                for node in self._table
                if node.body.tier in tier_ids or node.kernel_target in tier_ids
            ]

    def statistics(self) -> FileSystemStatistics:
        """A record of everything that can be counted."""
        parts = self._parts
        spilling = self._parts.spilling
        return FileSystemStatistics(
            nodes=len(self._table),
            open_files=len(self._handles),
            interrupted_files=len(parts.reports.interrupted(b"")),
            waiting=parts.room.statistics(self._table.path) + parts.hold.not_queued(),
            overflowed_files=parts.overflow.files + parts.outgrown.files,
            open_lanes=self._handles.open_lanes(),
            lane_choices=dict(parts.lanes.reasons),
            pins=tuple(parts.eviction.pins()),
            pinned_bytes=parts.eviction.pinned_bytes(),
            is_pinned_full=parts.eviction.is_pinned_full(),
            held=parts.hold.statistics(),
            tier=parts.tier.statistics(),
            content=parts.contents.statistics(),
            lower_view=self._view.statistics(),
            spill=None if parts.spill is None else parts.spill.statistics(),
            unmirrored=spilling.unmirrored()
            if spilling is not None and spilling.spill.mirror is not None
            else None,
            spilled=MovedOut() if spilling is None else replace(spilling.moved),
            warm=parts.warming.counts,
        )
