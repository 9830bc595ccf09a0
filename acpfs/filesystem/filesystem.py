"""The file system: what every call means, independent of the transport that brings it.

Puts the parts of this package together and offers the calls by number (node, handle), as the kernel makes them. Coroutines wait
as described in `steps`; run them through `FileSystem.steps`. Plain functions never wait and must be called under `FileSystem.lock`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import RLock

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower, LowerStat, SpaceInfo
from acpfs.backing.read_rate import ReadRate
from acpfs.checkpoints import Checkpoints
from acpfs.config import FsyncMode, Settings, WhenFull, WhenKilled
from acpfs.filesystem.admission import Admission
from acpfs.filesystem.at_once import AtOnce
from acpfs.filesystem.attribute_calls import AttributeCalls
from acpfs.filesystem.awaited_names import AwaitedNames
from acpfs.filesystem.backing_space import BackingSpace
from acpfs.filesystem.catalogue import Catalogue
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.closing import Closing, closing_of
from acpfs.filesystem.content.body import ContentStatistics
from acpfs.filesystem.content.changeable import Changeable
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.fill import Fills, WarmStatistics
from acpfs.filesystem.content.leaving import LeavingOrder
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.content.overflow import Overflow
from acpfs.filesystem.content.reads import Reads
from acpfs.filesystem.content.room import Room
from acpfs.filesystem.content.spilling import Spilling, Unmirrored
from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.content.warming import Warming
from acpfs.filesystem.directories import Directories, Fitting
from acpfs.filesystem.durations import Durations
from acpfs.filesystem.earlier_calls import EarlierCalls
from acpfs.filesystem.earlier_saves import EarlierSaves
from acpfs.filesystem.expectations import Expectations
from acpfs.filesystem.file_reports import Reports
from acpfs.filesystem.files import Files
from acpfs.filesystem.hold import HeldReport, Hold
from acpfs.filesystem.interrupted import InterruptedFiles
from acpfs.filesystem.invariants import Invariants
from acpfs.filesystem.keeping import Keeping
from acpfs.filesystem.known_files import KnownFiles
from acpfs.filesystem.lane_use import LaneUse
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.likely_sizes import LikelySizes
from acpfs.filesystem.loads import Loads
from acpfs.filesystem.lowerview import LowerView, LowerViewStatistics
from acpfs.filesystem.marks import Marks
from acpfs.filesystem.mending import Mending
from acpfs.filesystem.missing import Missing
from acpfs.filesystem.names import Names, fail
from acpfs.filesystem.needed_nodes import NeededNodes
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.open_files import LAST_CLOSE_WAIT_S, OpenFiles
from acpfs.filesystem.pages_ahead import NoReadyMemory, PagesAhead, ReadyMemory
from acpfs.filesystem.paths import Paths
from acpfs.filesystem.payers import Limits, Payers
from acpfs.filesystem.pins import Pins
from acpfs.filesystem.plenty import Plenty
from acpfs.filesystem.preloading import Preloading
from acpfs.filesystem.records import AttributeChange, Attributes, Caller, DirEntry, FileReport, OpenFile, WaitingWriter
from acpfs.filesystem.steps import Steps, wait
from acpfs.filesystem.urgent import UrgentFiles
from acpfs.ram.control_groups import limits_of_caller
from acpfs.ram.descriptor_limits import Reserve
from acpfs.ram.kept import Kept
from acpfs.ram.shortage import Shortage, available_bytes
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier, TierStatistics
from acpfs.types import ROOT, HandleId, Ino, Seq
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.sources.spill import Spill, SpillStatistics


@dataclass(frozen=True, slots=True)
class FileSystemStatistics:
    """What `status`, the metrics and the tests see; gauges of a file system at rest are zero."""

    nodes: int
    open_files: int
    interrupted_files: int
    waiting: tuple[WaitingWriter, ...]
    """Who waits for room in RAM: first the queue, in the order of turns."""
    overflowed_files: int
    """Files that did not fit into the RAM tier and were written straight to the backing directory."""
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
    spilled: tuple[int, int]
    """Files and bytes that left RAM for the spill directory."""
    warm: WarmStatistics
    unmirrored: Unmirrored | None
    """None: no files are mirrored."""


class FileSystem:
    """Every call of every transport. Its parts (`names`, `files`, …) are its own business; `changes` is the engine's listener."""

    def __init__(
        self,
        settings: Settings,
        state: StateDatabase,
        tier: Tier,
        log: OperationLog,
        tree: LowerTree,
        lower: Lower,
        calls: CallPool,
        copies: CallPool,
        *,
        limits: Limits = limits_of_caller,
        unknown_bytes: int | None = None,
        available: Callable[[], int] = available_bytes,
        kept: Kept | None = None,
        make_spill: Callable[[RLock], Spill] | None = None,
        fills: CallPool | None = None,
        closing: Callable[[int], Closing] = closing_of,
        ready: ReadyMemory | None = None,
    ) -> None:
        """`calls`: threads for calls on the backing directory; `copies`: threads for copies inside the RAM tier.

        `fills`: threads for reading cold files ahead (None: those of `calls`). `closing`: how a thread comes to close what it has open.
        `limits`: as `Payers` has them, `unknown_bytes`: as `Admission`; `available`: as `Shortage` has it.
        `kept`: records for, and from, other workers of the kernel session. `make_spill`: the spill tier, given the file system's lock.
        `ready`: memory that was made ready for writers.
        """
        self.settings, self.lock, self.durations = settings, RLock(), Durations()
        self.steps = Steps(self.lock, state)
        self._state, self._tier, self._log, self._lower, self._calls = state, tier, log, lower, calls
        self.kept = Kept() if kept is None else kept  # what the next worker of the session will need; transports keep theirs here too
        self._table = NodeTable(state, log, tree)
        self.missing, self.earlier_calls = Missing(self._table, log, tier), EarlierCalls()
        self._overflow = Overflow(lower, calls, tier, self.lock, settings.backing_timeout_s, self.earlier_calls)
        versions, self.urgent = Versions(tier, log), UrgentFiles(state, self._table, tier, settings.reserve)
        self._room = room = Room(tier, settings.when_full, versions.await_drain, self.urgent.covers)
        shapes, self._fills = Checkpoints(settings.checkpoint_patterns), Fills(tier)
        self.catalogue = Catalogue(state, self._table, log, shapes, verifies=settings.verify_after_write)
        self._contents = self._make_contents(copies, versions)
        self._view = LowerView(settings, lower, calls, tree, log, self._table, self._contents, tier, self.lock)
        self.changes = Changes(self._table, log, self._contents, self._view, self.steps, self.catalogue, self.durations)
        self.awaited = AwaitedNames(settings, self._table, self._view, log)
        self.expectations = Expectations(state)
        earlier = EarlierSaves(lower, calls, tree, self._table, self.lock, self.expectations, state.commit)
        self._names = Names(self._table, self._view, self.changes, self._contents, self.awaited, earlier)
        self._attributes = AttributeCalls(settings, self._table, self._view, self.changes, self._contents, NeededNodes(log.needs))
        self.at_once = AtOnce(settings, self._table, self._view, self._attributes, self.steps)
        self.lanes, self._payers = Lanes(), Payers(state, self._table, self._contents.retention, limits)
        plenty = Plenty(tier, room, self._contents.retention, Shortage(available))
        parts = (self._table, self._contents, tier, self.expectations, self._payers, LikelySizes(shapes), plenty, earlier)
        admission = Admission(*parts, self.urgent.covers, unknown_bytes)
        rest = (self._contents, self._table, log, state, admission, self.lock, self.earlier_calls)
        self._outgrown = OutgrownFiles(lower, calls, tier, *rest)
        self.hold = Hold(self._contents, admission, tier, room, plenty, self._table.path, self._outgrown.relieve)
        shared = (tier, calls, fills or calls, self.lock, state.commit, self._fills)
        self.warming = Warming(settings, self._table, self._contents, self._view, *shared)
        self.spilling = None if make_spill is None else self._spilling(make_spill(self.lock), versions, room)
        self.spill = None if self.spilling is None else self.spilling.spill
        changeable = self._changeable(room)
        places = (self._contents, self._overflow, self._outgrown, self.spill, self.warming, self._view.reads)
        self._reads = Reads(*places, changeable.persisting)
        self._open, self._files = self._regular_files(admission, changeable, closing, copies, ready or NoReadyMemory())
        self._directories = Directories(self._table, self._names, self._attributes, self._view, self.kept)
        self.paths = Paths(self._table, self._view, settings.mountpoint)
        self.preloading = Preloading(self._table, self._view, self._reads, self.warming, shapes, self._open.closed, self.paths)
        self.mending = Mending(self._table, log, self._contents, self.changes, tier, self._view)
        self.known_files, self.keeping = KnownFiles(self._table, log, tier), Keeping(self._table, log, tier, self._contents.retention)
        self.invariants, self._reports = Invariants(self._table, log, tier), Reports(self._table, log, self._contents, self._open)
        self.interrupted = InterruptedFiles(state, self._table, self._reports, self.changes, self._finish_outgrown)
        self._space, self._descriptors = BackingSpace(lower, calls, self.lock, self._files.learn_capacity), Reserve()

    def _regular_files(
        self, admission: Admission, changeable: Changeable, closing: Callable[[int], Closing], threads: CallPool, ready: ReadyMemory
    ) -> tuple[OpenFiles, Files]:
        """The calls on regular files, over the parts that are there."""
        closing = closing if self.settings.when_killed is WhenKilled.KEEP else lambda _pid: Closing.CALL
        self._ahead = PagesAhead(self._tier, self._contents, admission, threads, self.lock, ready)
        lane_use = LaneUse(self.lanes, self._contents, admission, self.hold, self._view, self.warming, self._ahead)
        parts = (self._contents, changeable, admission, self._outgrown, self.warming, self._log, self.kept, closing)
        self.loads = Loads(self._table, self.catalogue.recognise, self.durations.load)
        told = (self.durations, self.loads, ready)
        opened = OpenFiles(self._table, self.lanes, lane_use, self._names, self._attributes, self._view, self.changes, *parts, *told)
        return opened, Files(opened, self._attributes, self._reads, self.changes, self._contents, changeable, self._outgrown)

    def _spilling(self, spill: Spill, versions: Versions, room: Room) -> Spilling:
        return Spilling(spill, self._tier, self._log, self._table, self._contents, versions, room, self._overflow, self._state)

    def _changeable(self, room: Room) -> Changeable:
        bring_back = None if self.spilling is None else self.spilling.bring_back
        parts = (self._contents, self._overflow, self._outgrown, self._tier, room, self._log, self.warming, bring_back)
        return Changeable(self._table, self._view, *parts)

    def _make_contents(self, copies: CallPool, versions: Versions) -> Contents:
        order = LeavingOrder(self._table, self.catalogue, Pins(self._state), self.settings.keep_checkpoints)
        parts = (self._overflow, versions, self._room, order, Marks(self._state), self._fills)
        return Contents(self._tier, self._log, self._table, copies, *parts)

    # -- start

    async def start(self, space: SpaceInfo | None = None) -> SpaceInfo:
        """Learn the top of the backing directory; sort out what an earlier daemon left. Asks the backing directory twice.

        `space`: what an earlier worker of this mount has learned; then the backing directory, which may hang, is not asked. The answer is
        for the next one.

        Raises:
            OSError: the backing directory does not answer.
        """
        if space is not None and ROOT in self._table:
            self._space.learn(space, of_earlier_worker=True)
        else:
            top: LowerStat = await self._view.call("lstat top", self._lower.lstat, ())
            self._space.learn(await self._view.call("statfs", self._lower.space))
            if ROOT not in self._table:
                self._table.found_root(top)
            self._view.compare(self._table[ROOT], top)
        self._table[ROOT].lookups = 1
        self._view.ahead.taken_over()
        self._open.restore()
        self._directories.restore()
        for node in self._table:
            node.lookups = max(node.lookups, self.kept.references_of(node.ino))
        for node in self._table:
            self._take_over(node)
        return self._space.now()

    def _take_over(self, node: Node) -> None:
        """A node that an earlier worker knew. Without a takeover nobody has it open now, and the kernel does not know it."""
        if not node.names and node.ino != ROOT:
            pass  # deleted, or never named: nobody else will ask for what it had
        elif node.kernel_writers:
            self._contents.watch_again(node, versions_too=node.kernel_rewriters > 0)
        elif node.body.modified and not node.handles:
            if self.kept.taken_over and not node.interrupted and not node.body.failed:
                self.changes.freeze(node)  # its last RELEASE was under way
            else:
                self._contents.interrupt(node)
        self._ahead.found(node)
        if not node.kernel_writers:
            self._contents.kernel_ended(node)
        if not node.body.is_cold:
            self._contents.retention.settle(node)
        self._finish_outgrown(node)
        self._view.reap(node)

    def watch_outside(self, changed: Callable[[Ino], None], lost: Callable[[Ino, bytes, Ino], None]) -> None:
        """Be told of nodes that others changed on the backing directory, and of names (parent, name, node) that they removed.

        Called under the lock, from any thread, and only for what the kernel knows.
        """
        self._view.notices.pass_on(changed, lost)

    def watch_forgotten(self, forgotten: Callable[[HandleId], None]) -> None:
        """Be told of open files that are given up without the kernel's RELEASE."""
        self._view.notices.pass_on_forgotten(forgotten)

    def _finish_outgrown(self, node: Node) -> None:
        """The last close of a file that outgrew RAM came in an earlier daemon, or was decided now: the rest follows in the background."""
        if node.body.is_outgrown and not node.kernel_writers and not node.interrupted:
            self.steps.start(self._open.finish_outgrown(node), lambda _value, _error: None)

    # -- names

    async def lookup(self, parent: Ino, name: bytes, *, waits: bool = True) -> Attributes:
        """Takes a kernel reference. `waits`: for a name that another node is about to persist, where that is asked for."""
        return self._attributes.of(await self._names.lookup(parent, name, waits=waits))

    def forget(self, references: Iterable[tuple[Ino, int]]) -> None:
        """The kernel drops references: (node, how many). Takes the lock."""
        with self.lock:
            for ino, count in references:
                node = self._table.get(ino)
                if node is not None:
                    node.lookups = max(0, node.lookups - count)
                    self._view.reap(node)
            self._state.commit()

    def _check_space(self, unique: int = 0) -> None:
        """Before anything is changed; not for a request that comes again, and may have been carried out.

        Raises:
            OSError: ENOSPC: what is left for the state is for what was promised.
        """
        if self._state.space.is_short() and not self._open.comes_again(unique):
            raise fail(errno.ENOSPC)

    async def readlink(self, ino: Ino) -> bytes:
        """Target of a symlink."""
        return await self._view.load_target(self._names.node(ino))

    async def mknod(self, parent: Ino, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:
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

    async def link(self, ino: Ino, parent: Ino, name: bytes) -> Attributes:
        """Takes a kernel reference."""
        self._check_space()
        return self._attributes.of(await self._names.link(ino, parent, name))

    async def unlink(self, parent: Ino, name: bytes) -> None:
        """Remove a name of a file."""
        await self._names.unlink(parent, name)

    async def rmdir(self, parent: Ino, name: bytes) -> None:
        """Remove an empty directory."""
        await self._names.rmdir(parent, name)

    async def rename(self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int) -> None:
        """As renameat2, with RENAME_NOREPLACE and RENAME_EXCHANGE."""
        await self._names.rename(parent, name, new_parent, new_name, flags)

    # -- attributes

    async def getattr(self, ino: Ino, handle: HandleId | None = None) -> Attributes:
        """Attributes; of an open file also after it was deleted."""
        return await self._attributes.getattr(self._names.node(ino))

    async def setattr(self, ino: Ino, change: AttributeChange, handle: HandleId | None, caller: Caller) -> Attributes:
        """chmod, chown, utimens, truncate."""
        node = self._names.node(ino)
        if change.size is not None:
            await self._view.renew(node)
            await self._files.truncate(node, change.size, handle)
        if any(v is not None for v in (change.mode, change.uid, change.gid, change.atime_ns, change.mtime_ns)):
            await self._attributes.setattr(node, change)
        elif change.size is None:
            await self._view.renew(node)
            node.ctime_ns = time.time_ns()  # chown(-1, -1) changes nothing else
        return self._attributes.of(node)

    async def getxattr(self, ino: Ino, name: bytes) -> bytes:
        """Value of an extended attribute."""
        return await self._attributes.getxattr(self._names.node(ino), name)

    async def listxattr(self, ino: Ino) -> list[bytes]:
        """Names of the extended attributes."""
        return await self._attributes.listxattr(self._names.node(ino))

    async def setxattr(self, ino: Ino, name: bytes, value: bytes, flags: int = 0, uid: int = 0) -> None:
        """Set an extended attribute; flags XATTR_CREATE (1), XATTR_REPLACE (2). `uid`: the caller's."""
        self._check_space()
        await self._attributes.setxattr(self._names.node(ino), name, value, flags, uid)

    async def removexattr(self, ino: Ino, name: bytes, uid: int = 0) -> None:
        """Remove an extended attribute."""
        await self._attributes.removexattr(self._names.node(ino), name, uid)

    # -- files

    async def open(self, ino: Ino, flags: int, caller: Caller) -> OpenFile:
        """Open a regular file."""
        self._descriptors.before_open()
        return await self._open.open(ino, flags, caller)

    async def create(self, parent: Ino, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[OpenFile, Attributes]:
        """Make and open a regular file; takes a kernel reference."""
        self._check_space(caller.unique)
        self._descriptors.before_open()
        opened, node = await self._open.create(parent, name, mode, flags, caller)
        return opened, self._attributes.of(node)

    async def tmpfile(self, parent: Ino, mode: int, flags: int, caller: Caller) -> tuple[OpenFile, Attributes]:
        """O_TMPFILE; takes a kernel reference."""
        self._check_space(caller.unique)
        self._descriptors.before_open()
        opened, node = await self._open.tmpfile(parent, mode, flags, caller)
        return opened, self._attributes.of(node)

    def is_open(self, handle: HandleId) -> bool:
        """Whether there is an open file of that number."""
        return self._open.is_open(handle)

    def refuse_passthrough(self, handle: HandleId) -> None:
        """The kernel would not take the descriptor of an open that was answered with the passthrough lane. Takes the lock."""
        with self.lock:
            self._open.refuse_passthrough(handle)

    async def read(self, handle: HandleId, offset: int, size: int) -> bytes:
        """Up to `size` bytes."""
        return await self._files.read(handle, offset, size)

    async def write(self, handle: HandleId, offset: int, data: bytes | memoryview) -> int:
        """Write all bytes; returns how many."""
        return await self._files.write(handle, offset, data)

    async def flush(self, handle: HandleId, pid: int = 0) -> None:
        """One descriptor of the open file was closed, by the thread `pid`; 0: who opened it, for all that is known."""
        await self._open.flush(handle, pid)

    async def release(self, handle: HandleId) -> None:
        """The open file is gone."""
        await self._open.release(handle)

    async def fsync(self, handle: HandleId, datasync: bool) -> None:
        """Fix the content in the order, and more by the mode of mount and directory."""
        with self.durations.fsync.measured():
            await self._files.fsync(handle)

    async def fallocate(self, handle: HandleId, mode: int, offset: int, length: int) -> None:
        """Allocate or punch, as the system call of that name."""
        await self._files.fallocate(handle, mode, offset, length)

    async def copy_range(self, source: HandleId, source_offset: int, handle: HandleId, offset: int, size: int) -> int:
        """copy_file_range; returns how many bytes, possibly fewer than asked for."""
        return await self._files.copy_range(source, source_offset, handle, offset, size)

    async def hold_taken(self, ino: Ino) -> Attributes:
        """A file's inode lock is had, by a call that changes nothing; keeps it as long as writers must wait. Always ends with an error.

        Raises:
            OSError: EAGAIN: take it again at once. ECANCELED: no more.
        """
        until = self.hold.taken(ino)
        if until is None:
            raise fail(errno.ECANCELED)
        try:
            again = await wait(until)
        except InterruptedError:
            self.hold.lost(ino, until)
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
        self, handle: HandleId, offset: int, *, with_attributes: bool, without_fails: bool = False, fitting: Fitting = len
    ) -> list[DirEntry]:
        """Entries from an offset on; with attributes each entry but `.` and `..` carries a kernel reference.

        Those whose attributes the backing directory does not tell soon have none; with `without_fails` they are waited for.
        `fitting`: how many of the next names, the dots included, the answer has room for.
        """
        return await self._directories.readdir(
            handle, offset, with_attributes=with_attributes, without_fails=without_fails, fitting=fitting
        )

    async def releasedir(self, handle: HandleId) -> None:
        """Close a directory."""
        self._directories.releasedir(handle)

    async def fsyncdir(self, handle: HandleId) -> None:
        """fsync of a directory: the order is fixed already; in durable mode, wait until all that was logged is persisted."""
        node = self._directories.node(handle)
        if await self._attributes.fsync_mode_in(node) is FsyncMode.DURABLE and self._log.pending_in(node.ino):
            await wait(self._log.when_done(self._log.last_seq, node.ino))

    # -- the whole

    async def statfs(self) -> SpaceInfo:
        """Space of the backing file system, from memory; renewed behind the answer, so that `df` never waits."""
        return self._space.now()

    def tick(self) -> float:
        """Look after writers that the daemon does not see; under the lock; returns after how many seconds to do it again."""
        try:
            return self.hold.tick()
        finally:
            self._state.commit()

    def freeze_all(self) -> int:
        """At the end, under the lock: fix the content of open files that somebody closed, and of logs; returns how many."""
        self._open.confirm_older_than(0.0)
        frozen = self._files.freeze_the_closed()
        self._state.commit()
        return frozen

    async def mark_old(self) -> None:
        """Before `freeze_old`, without the lock: have writes in the passthrough lane that are under way done."""
        if self.settings.max_dirty_age_s:
            await self._files.mark_older_than(self.settings.max_dirty_age_s)

    def freeze_old(self) -> int:
        """Commit long-open logs as of now (S12); under the lock; returns how many."""
        self._open.confirm_older_than(LAST_CLOSE_WAIT_S)
        frozen = self._files.freeze_older_than(self.settings.max_dirty_age_s) if self.settings.max_dirty_age_s else 0
        if self.spilling is not None:
            self.spilling.look()
        self._state.commit()
        return frozen

    def look_after_waiting(self) -> None:
        """Every second, under the lock: what those who wait for room waited for may be parked by now; foreign groups may be short of it."""
        self.urgent.look()
        self._room.look_again()
        self._payers.look()
        self._state.commit()

    def look_up_all_anew(self) -> None:
        """Ask the backing directory anew for all names and attributes, however young; under the lock."""
        self._view.trusted_since = time.monotonic()

    def change_when_full(self, when_full: WhenFull) -> None:
        """Another policy from now on, also for those who wait; under the lock."""
        self._room.change_policy(when_full)
        self.hold.look_soon()
        self._state.commit()

    # -- for control; all under the lock, but for those that say otherwise

    def files_report(self, prefix: bytes = b"") -> list[FileReport]:
        """State of each file in RAM or in the log, below a path relative to the mount point."""
        return self._reports.files(prefix)

    def closes_known(self, paths: Collection[bytes] = ()) -> Future[None]:
        """Done when of each close until now, of a file below the paths, is known whether it was the last; at once for nearly all."""
        return self.changes.closes_known(self._reports.operations(paths))

    def complete_until(self, paths: Iterable[bytes] = ()) -> Seq:
        """The number up to which the log must be done so that all complete content below the paths is persisted; 0: nothing pending."""
        return self._reports.complete_until(paths)

    @property
    def read_rate(self) -> ReadRate:
        """How fast the backing directory was read for applications."""
        return self._view.read_rate

    def keep_deleted(self, kept: dict[Ino, int], keep: Callable[[Ino, list[int]], None]) -> None:
        """Go on with the last worker's descriptors of deleted files that are still open (`Nameless`), and have `keep` keep new ones."""
        with self.lock:
            self._view.notices.pass_on_kept(keep)
            for ino, fd in kept.items():
                node = self._table.get(ino)
                if node is not None:
                    self._view.nameless.restore(node, fd)
                else:
                    self._view.nameless.give_back(ino, fd)

    @property
    def open_writers(self) -> int:
        """Descriptors that are open for writing."""
        return self._contents.writers

    def statistics(self) -> FileSystemStatistics:
        """A record of everything that can be counted."""
        return FileSystemStatistics(
            nodes=len(self._table),
            open_files=len(self._open),
            interrupted_files=len(self._reports.interrupted(b"")),
            waiting=self._room.statistics(self._table.path) + self.hold.not_queued(),
            overflowed_files=self._overflow.files + self._outgrown.files,
            open_lanes=self._open.open_lanes(),
            lane_choices=dict(self.lanes.reasons),
            pins=tuple(self.keeping.pins()),
            pinned_bytes=self.keeping.pinned_bytes(),
            is_pinned_full=self.keeping.is_pinned_full(),
            held=self.hold.statistics(),
            tier=self._tier.statistics(),
            content=self._contents.statistics(),
            lower_view=self._view.statistics(),
            spill=self.spill.statistics() if self.spill is not None else None,
            unmirrored=self.spilling.unmirrored() if self.spilling is not None and self.spilling.spill.mirror is not None else None,
            spilled=(self.spilling.moved_files, self.spilling.moved_bytes) if self.spilling is not None else (0, 0),
            warm=self.warming.counts,
        )
