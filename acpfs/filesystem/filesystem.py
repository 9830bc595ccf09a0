"""The file system: what every call means, independent of the transport that brings it.

Puts the parts of this package together and offers the calls by number (node, handle), as the kernel makes them. Coroutines wait
as described in `steps`; run them through `FileSystem.steps`. Plain functions never wait and must be called under `FileSystem.lock`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import astuple, dataclass
from threading import RLock

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower, LowerStat, SpaceInfo
from acpfs.config import FsyncMode, Settings
from acpfs.filesystem.admission import Admission
from acpfs.filesystem.attributes import AttributeCalls
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.content import ContentStatistics
from acpfs.filesystem.contents import Contents
from acpfs.filesystem.directories import Directories
from acpfs.filesystem.expectations import Expectations
from acpfs.filesystem.files import LAST_CLOSE_WAIT_S, Files
from acpfs.filesystem.hold import HeldReport, Hold
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.lowerview import LowerView, LowerViewStatistics
from acpfs.filesystem.mending import Mending
from acpfs.filesystem.names import Names, fail
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.overflow import Overflow
from acpfs.filesystem.records import AttributeChange, Attributes, Caller, DirEntry, FileReport, OpenFile
from acpfs.filesystem.reports import Reports
from acpfs.filesystem.spill import Spills
from acpfs.filesystem.steps import Steps, wait
from acpfs.ram.kept import Kept
from acpfs.ram.memory import headroom_bytes
from acpfs.ram.shortage import Shortage, available_bytes
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier, TierStatistics
from acpfs.types import ROOT, HandleId, Ino, Seq
from acpfs.writeback.log import OperationLog
from acpfs.writeback.lower_tree import LowerTree

SPACE_MAX_AGE_S = 2.0
"""statfs answers from memory up to this age, and beyond when the backing directory does not answer."""


@dataclass(frozen=True, slots=True)
class FileSystemStatistics:
    """What `status`, the metrics and the tests see; gauges of a file system at rest are zero."""

    nodes: int
    open_files: int
    interrupted_files: int
    waiting_writers: int
    overflowed_files: int
    """Files that did not fit into the RAM tier and were written straight to the backing directory."""
    open_lanes: dict[str, int]
    """Lane → open files that use it; every lane of this mount is there."""
    lane_choices: dict[str, int]
    """Why opens went the way they went → how many."""
    held: tuple[HeldReport, ...]
    """Files whose passthrough writers wait for room."""
    tier: TierStatistics
    content: ContentStatistics
    lower_view: LowerViewStatistics


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
        headroom: Callable[[int], int | None] = headroom_bytes,
        unknown_bytes: int | None = None,
        available: Callable[[], int] = available_bytes,
        kept: Kept | None = None,
    ) -> None:
        """`calls`: threads for calls on the backing directory; `copies`: threads for copies inside the RAM tier.

        `headroom` and `unknown_bytes`: as `Admission` has them; `available`: as `Shortage` has it.
        `kept`: records for, and from, other workers of the kernel session.
        """
        self.settings = settings
        self.lock = RLock()
        self.steps = Steps(self.lock, state.commit)
        self._state = state
        self._tier = tier
        self._log = log
        self.kept = Kept() if kept is None else kept
        """What the next worker of the session will need; transports keep theirs here too."""
        self._lower = lower
        self._calls = calls
        tier.when_safe = state.after_commit
        self._table = NodeTable(state)
        self._overflow = Overflow(lower, calls, tier, settings.backing_timeout_s)
        self._contents = Contents(tier, log, self._table, copies, self._overflow, settings.when_full)
        self._view = LowerView(settings, lower, calls, tree, log, self._table, self._contents, tier, self.lock)
        self.changes = Changes(self._table, log, self._contents, self._view, self.steps)
        self._names = Names(self._table, self._view, self.changes, self._contents)
        self._attributes = AttributeCalls(settings, self._table, self._view, self.changes, self._contents)
        self.lanes = Lanes()
        admission = Admission(self._table, self._contents, tier, Expectations(state), headroom, unknown_bytes)
        self.hold = Hold(self._contents, admission, tier, settings.when_full, Shortage(available), self._table.path)
        self._spills = Spills(lower, calls, tier, self._contents, self._table, log, state, admission, self.hold, self.lock)
        self._files = Files(
            self._table,
            self.lanes,
            self._names,
            self._attributes,
            self._view,
            self.changes,
            self._contents,
            self._overflow,
            admission,
            self.hold,
            self._spills,
            tier,
            log,
            self.kept,
        )
        self._directories = Directories(self._table, self._names, self._attributes, self._view, self.kept)
        self.mending = Mending(self._table, log, self._contents, self.changes, tier)
        self._reports = Reports(self._table, log, self._contents, self._files)
        self._space: SpaceInfo | None = None
        self._space_at = 0.0
        self._space_asked = False

    # -- start

    async def start(self) -> None:
        """Learn the top of the backing directory; sort out what an earlier daemon left. Asks the backing directory twice.

        Over a session that another worker has left: go on where it was, without asking the backing directory, which may hang.

        Raises:
            OSError: the backing directory does not answer.
        """
        if self.kept.taken_over:
            self._space = SpaceInfo(*self.kept.fact("space"))
        else:
            top: LowerStat = await self._view.call("lstat top", self._lower.lstat, ())
            self._space = await self._view.space()
            self._space_at = time.monotonic()
            if ROOT not in self._table:
                self._table.found_root(top)
            self._view.compare(self._table[ROOT], top)
            self.kept.record("space", astuple(self._space))
        self._table[ROOT].lookups = 1
        self._files.restore()
        self._directories.restore()
        for _slot, (ino, count) in self.kept.references:
            node = self._table.get(Ino(ino))
            if node is not None:
                node.lookups = max(node.lookups, count)
        interrupted = set(self.kept.fact("interrupted") or ())
        for node in self._table:
            self._take_over(node, interrupted)
        self.kept.record("interrupted", [node.ino for node in self._table if node.interrupted])

    def _take_over(self, node: Node, interrupted: Container[Ino]) -> None:
        """A node that an earlier worker knew. Without a takeover nobody has it open now, and the kernel does not know it."""
        if node.nlink == 0 or (node.unlogged and not node.names):
            node.nlink = 0
        elif node.kernel_writers:
            self._contents.watch_again(node, versions_too=not self._files.appending_only(node))
        elif node.content is not None and node.content.modified and not node.handles:
            if self.kept.taken_over and node.ino not in interrupted:
                self.changes.freeze(node)  # its last RELEASE was under way
            else:
                node.content.interrupted = True
        if node.content is not None:
            self._contents.settle_state(node)
        self._finish_spilled(node)
        self._view.reap(node)

    def watch_outside(self, changed: Callable[[Ino], None], lost: Callable[[Ino, bytes, Ino], None]) -> None:
        """Be told of nodes that others changed on the backing directory, and of names (parent, name, node) that they removed.

        Called under the lock, from any thread, and only for what the kernel knows.
        """
        self._view.tell_changed, self._view.tell_lost = changed, lost

    def _finish_spilled(self, node: Node) -> None:
        """The last close of a file that outgrew RAM came in an earlier daemon, or was decided now: the rest follows in the background."""
        if node.content is not None and node.content.spill is not None and not node.kernel_writers and not node.interrupted:
            self.steps.start(self._files.finish_spilled(node), lambda _value, _error: None)

    # -- names

    async def lookup(self, parent: Ino, name: bytes) -> Attributes:
        """Takes a kernel reference."""
        return self._attributes.of(await self._names.lookup(parent, name))

    def forget(self, references: Iterable[tuple[Ino, int]]) -> None:
        """The kernel drops references: (node, how many). Takes the lock."""
        with self.lock:
            for ino, count in references:
                node = self._table.get(ino)
                if node is not None:
                    node.lookups = max(0, node.lookups - count)
                    self._view.reap(node)
            self._state.commit()

    async def readlink(self, ino: Ino) -> bytes:
        """Target of a symlink."""
        return await self._view.load_target(self._names.node(ino))

    async def mknod(self, parent: Ino, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:
        """Takes a kernel reference."""
        return self._attributes.of(await self._names.mknod(parent, name, mode, rdev, caller))

    async def mkdir(self, parent: Ino, name: bytes, mode: int, caller: Caller) -> Attributes:
        """Takes a kernel reference."""
        return self._attributes.of(await self._names.mkdir(parent, name, mode, caller))

    async def symlink(self, parent: Ino, name: bytes, target: bytes, caller: Caller) -> Attributes:
        """Takes a kernel reference."""
        return self._attributes.of(await self._names.symlink(parent, name, target, caller))

    async def link(self, ino: Ino, parent: Ino, name: bytes) -> Attributes:
        """Takes a kernel reference."""
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

    async def setxattr(self, ino: Ino, name: bytes, value: bytes, flags: int = 0) -> None:
        """Set an extended attribute; flags XATTR_CREATE (1), XATTR_REPLACE (2)."""
        await self._attributes.setxattr(self._names.node(ino), name, value, flags)

    async def removexattr(self, ino: Ino, name: bytes) -> None:
        """Remove an extended attribute."""
        await self._attributes.removexattr(self._names.node(ino), name)

    # -- files

    async def open(self, ino: Ino, flags: int, caller: Caller) -> OpenFile:
        """Open a regular file."""
        return await self._files.open(ino, flags, caller)

    async def create(self, parent: Ino, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[OpenFile, Attributes]:
        """Make and open a regular file; takes a kernel reference."""
        opened, node = await self._files.create(parent, name, mode, flags, caller)
        return opened, self._attributes.of(node)

    async def tmpfile(self, parent: Ino, mode: int, flags: int, caller: Caller) -> tuple[OpenFile, Attributes]:
        """O_TMPFILE; takes a kernel reference."""
        opened, node = await self._files.tmpfile(parent, mode, flags, caller)
        return opened, self._attributes.of(node)

    def is_open(self, handle: HandleId) -> bool:
        """Whether there is an open file of that number."""
        return self._files.is_open(handle)

    def refuse_passthrough(self, handle: HandleId) -> None:
        """The kernel would not take the descriptor of an open that was answered with the passthrough lane. Takes the lock."""
        with self.lock:
            self._files.refuse_passthrough(handle)

    async def read(self, handle: HandleId, offset: int, size: int) -> bytes:
        """Up to `size` bytes."""
        return await self._files.read(handle, offset, size)

    async def write(self, handle: HandleId, offset: int, data: bytes | memoryview) -> int:
        """Write all bytes; returns how many."""
        return await self._files.write(handle, offset, data)

    async def flush(self, handle: HandleId) -> None:
        """One descriptor of the open file was closed."""
        await self._files.flush(handle)

    async def release(self, handle: HandleId) -> None:
        """The open file is gone."""
        await self._files.release(handle)

    async def fsync(self, handle: HandleId, datasync: bool) -> None:
        """Fix the content in the order, and more by the mode of mount and directory."""
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

    async def readdir(self, handle: HandleId, offset: int, *, with_attributes: bool) -> list[DirEntry]:
        """Entries from an offset on; with attributes each entry but `.` and `..` carries a kernel reference."""
        return await self._directories.readdir(handle, offset, with_attributes=with_attributes)

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
        assert self._space is not None
        if time.monotonic() - self._space_at > SPACE_MAX_AGE_S and not self._space_asked:
            self._space_asked = True
            future = self._calls.submit("statfs", self._lower.space)
            future.add_done_callback(lambda f: self._learn_space(None if f.exception() else f.result()))
        return self._space

    def _learn_space(self, space: SpaceInfo | None) -> None:
        with self.lock:
            self._space_asked = False
            if space is not None:
                self._space, self._space_at = space, time.monotonic()

    def tick(self) -> float:
        """Look after writers that the daemon does not see; under the lock; returns after how many seconds to do it again."""
        try:
            return self.hold.tick()
        finally:
            self._state.commit()

    def freeze_all(self) -> int:
        """Fix the content of every open file as of now; under the lock; returns how many."""
        self._files.confirm_older_than(0.0)
        frozen = self._files.freeze_older_than(0.0)
        self._state.commit()
        return frozen

    async def mark_old(self) -> None:
        """Before `freeze_old`, without the lock: have writes in the passthrough lane that are under way done."""
        if self.settings.max_dirty_age_s:
            await self._files.mark_older_than(self.settings.max_dirty_age_s)

    def freeze_old(self) -> int:
        """Commit long-open files as of now (promise 13); under the lock; returns how many."""
        self._files.confirm_older_than(LAST_CLOSE_WAIT_S)
        frozen = self._files.freeze_older_than(self.settings.max_dirty_age_s) if self.settings.max_dirty_age_s else 0
        self._state.commit()
        return frozen

    # -- for control; all under the lock, but for those that say otherwise

    def files_report(self, prefix: bytes = b"") -> list[FileReport]:
        """State of each file in RAM or in the log, below a path relative to the mount point."""
        return self._reports.files(prefix)

    def complete_until(self, paths: Iterable[bytes] = ()) -> Seq:
        """The number up to which the log must be done so that all complete content below the paths is persisted; 0: nothing pending."""
        return self._reports.complete_until(paths)

    def resume_interrupted(self, path: bytes) -> int:
        """Store interrupted files below a path as they are; returns how many."""
        nodes = self._reports.interrupted(path)
        for node in nodes:
            self.changes.freeze(node)
            self._finish_spilled(node)
        self._state.commit()
        return len(nodes)

    def discard_interrupted(self, path: bytes) -> int:
        """Drop interrupted files below a path: the backing directory's content, if any, is shown again; returns how many."""
        nodes = self._reports.interrupted(path)
        for node in nodes:
            self.changes.discard(node)
        self._state.commit()
        return len(nodes)

    def before_writers(self, call: Callable[[], None]) -> None:
        """Have `call` called whenever a file is about to be opened for writing, under the lock; it must not wait."""
        self._contents.on_writer = call

    def statistics(self) -> FileSystemStatistics:
        """A record of everything that can be counted."""
        return FileSystemStatistics(
            nodes=len(self._table),
            open_files=len(self._files),
            interrupted_files=len(self._reports.interrupted(b"")),
            waiting_writers=self._tier.waiting(),
            overflowed_files=self._overflow.files + self._spills.files,
            open_lanes=self._files.open_lanes(),
            lane_choices=dict(self.lanes.reasons),
            held=self.hold.statistics(),
            tier=self._tier.statistics(),
            content=self._contents.statistics(),
            lower_view=self._view.statistics(),
        )
