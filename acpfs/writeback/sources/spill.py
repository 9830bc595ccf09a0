"""Spill tier: copies of complete versions in the spill directory, made in the background, read by
streams and by the mount.

Owns which version has a copy (a row each, with size and checksum of what RAM had), what the copies
take of their own budget, and whether the disk can be used; does not choose what is copied, nor what
becomes of the RAM copy (`content.spilling`). A copy counts when all bytes are on stable storage and
its row is written, in this order; it is read back against its checksum. A disk that fails, is full
or hangs is left alone for a while: nothing is lost, RAM still has the bytes. Used under the file
system's lock but for what threads of the pools do.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Protocol, TypeVar

from acpfs.backing.calls import CallPool
from acpfs.backing.filling import write_all
from acpfs.backing.health import CallInFlight, current_call
from acpfs.backing.progress import Progress
from acpfs.checksum import Checksum
from acpfs.config import SpillMode, share_of
from acpfs.errors import errno_name
from acpfs.logger import get_logger
from acpfs.ram.spill_directory import MIRROR_PREFIX
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.runtime.given import Runtime
from acpfs.types import TierId, VersionId
from acpfs.writeback.copies.copy_place import CopyFile, CopyPlace
from acpfs.writeback.copies.removals import Removals
from acpfs.writeback.evidence.verify import MisreadError
from acpfs.writeback.log.ops import Version
from acpfs.writeback.sources.mirror import Mirror, MirrorStatistics
from acpfs.writeback.sources.source import AbandonedError, Source

T = TypeVar("T")

COPY_THREADS = 4
"""Two large files at a time fill a local disk; small ones wait for its fsync, and four of them for
the same one.
"""
READ_THREADS = 16
PIECE_BYTES = 2 << 20
PATIENCE_S = 10.0
"""A read from a local disk that takes longer counts as failed; its stream is tried again later."""
RENEWALS_MAX = 3
"""A file that is being written while it is copied is copied again so often, then later."""
REST_MIN_S = 5.0
REST_MAX_S = 60.0
"""How long the disk is left alone after a failure; doubles from failure to failure."""
DDL = """
CREATE TABLE IF NOT EXISTS spilled (
  vid INTEGER PRIMARY KEY, name TEXT NOT NULL, size INTEGER NOT NULL, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spilled_before (
  vid INTEGER NOT NULL, name TEXT NOT NULL, size INTEGER NOT NULL, digest TEXT NOT NULL,
  PRIMARY KEY (vid, name));
CREATE TABLE IF NOT EXISTS spill_place (path TEXT NOT NULL);
"""

log = get_logger(__name__)


def recorded_place(state: StateDatabase) -> str | None:
    """Where an earlier mount, or worker, left copies (`CopyPlace.recorded`); None: nowhere."""
    state.create(DDL)
    rows = state.rows("SELECT path FROM spill_place WHERE EXISTS (SELECT 1 FROM spilled)")
    return str(rows[0][0]) if rows else None


def forget_copies(state: StateDatabase) -> None:
    """Nobody needs the copies that an earlier mount left: all bytes are here."""
    state.change("DELETE FROM spilled")
    state.change("DELETE FROM spilled_before")
    state.change("DELETE FROM spill_place")
    state.commit()


class SpillError(OSError):
    """The spill directory's, not the backing directory's; always EIO, so that whoever needs the
    bytes tries again.
    """


class UnsteadyError(Exception):
    """The file is being written; its version is copied later."""


@dataclass(frozen=True, slots=True)
class SpillStatistics:
    """What `status`, the metrics and the tests see."""

    directory: str
    mode: str
    state: str
    """ok, full (no room in its budget or on its disk), failing, stuck (a call does not return), or
    closed (only read until it is empty).
    """
    budget_bytes: int
    used_bytes: int
    """Of copies; `reserved_bytes`: of such as are being made."""
    reserved_bytes: int
    files: int
    copying_files: int
    copied_files: int
    copied_bytes: int
    failures: int
    mismatches: int
    """Copies that read back differently."""
    last_error: str
    mirror: MirrorStatistics | None
    """None: the mode is to move."""


@dataclass(slots=True)
class Copy:
    """A version's copy."""

    vid: VersionId
    name: str
    size: int
    digest: str
    place: str = ""
    """As `CopyPlace.recorded` was when it was made."""


class CopyListener(Protocol):
    """Had a copy begun. Called under the lock."""

    def still_frozen(self, version: Version) -> bool:
        """See `Listener`."""

    def copied(self, version: Version) -> None:
        """The version has a copy."""

    def not_copied(self, version: Version) -> None:
        """That came to nothing, though somebody still needs the version."""


class Making:
    """A copy that is being made."""

    def __init__(self, version: Version, listener: CopyListener) -> None:
        self.version = version
        self.listener = listener
        self.size = version.size
        self.abandoned = False
        self.call: CallInFlight | None = None

    def pause(self) -> None:
        """See `source.Reading`: here all that takes time is the disk."""

    def progress(self) -> None:
        """The disk answered."""
        if self.call is not None:
            self.call.progress()


class _File:
    """An open copy, read with patience."""

    def __init__(self, spill: Spill, fd: int) -> None:
        self._spill = spill
        self._fd = fd
        self._hung: Future[bytes] | None = None

    def read(self, buffer: memoryview, position: int) -> int:
        """Into the caller's buffer, from one of its own: a read that comes back too late must find
        nobody else's bytes to write over.
        """
        future = self._spill.reads.submit("read", os.pread, self._fd, len(buffer), position)
        try:
            data = self._spill.patient(future)
        except SpillError:
            if not future.done() and not future.cancel():
                self._hung = future
            raise
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """At once, or when the read that hangs comes back: the number must not become another
        file's before.
        """
        if self._hung is None:
            os.close(self._fd)
        else:
            self._hung.add_done_callback(lambda _done: os.close(self._fd))


@dataclass(slots=True)
class CopyCounts:
    """Since the worker began."""

    files: int = 0
    bytes: int = 0
    failures: int = 0
    mismatches: int = 0


@dataclass(frozen=True, slots=True)
class SpillPools:
    """Threads for calls on the spill directory."""

    copies: CallPool
    reads: CallPool

    @classmethod
    def make(cls, runtime: Runtime) -> SpillPools:
        """With one health."""
        copies = CallPool("spill", COPY_THREADS, runtime)
        return cls(copies, CallPool("spill reads", READ_THREADS, runtime, copies.health))


@dataclass(frozen=True, slots=True)
class SpillRules:
    """What is put there, and how much."""

    mode: SpillMode
    budget: int | str
    """Bytes, or a share of what is free."""
    closed: bool = False
    """Make no new copies."""
    rest_min_s: float = REST_MIN_S
    rest_max_s: float = REST_MAX_S
    """How long the place is left alone after a failure; doubles from failure to failure."""


class Spill:
    """All copies."""

    def __init__(
        self,
        directory: CopyPlace,
        state: StateDatabase,
        tier: Tier,
        lock: RLock,
        rules: SpillRules,
        pools: SpillPools,
        *,
        mirror: Mirror | None = None,
    ) -> None:
        """Load what the last worker knew; touches no disk.

        `mirror`: the journal, where copies are to survive a reboot.
        """
        self.directory = directory
        self.mode = rules.mode
        self._state = state
        self._tier = tier
        self._lock = lock
        self._budget = rules.budget
        self._rules = rules
        self.calls = pools.copies
        self.reads = pools.reads
        self._removals = Removals(directory, pools.copies)
        self.budget_bytes = 0
        self._ready = False
        self._is_looking = False
        self._is_full = False
        self._closed = rules.closed
        self.making: dict[VersionId, Making] = {}
        self._fresh: set[str] = set()
        self._forgotten: list[VersionId] = []
        self._counts = CopyCounts()
        self._failed_in_a_row = 0
        self._rest_until = 0.0
        self._last_error = ""
        self._is_telling = False
        self.mirror = mirror
        self._when_safe = state.after_commit if mirror is None else mirror.when_safe
        """Puts the end of a copy off until no state that a next worker could find names it."""
        state.create(DDL)
        rows = state.rows("SELECT vid, name, size, digest FROM spilled")
        self.copies = {
            VersionId(vid): Copy(VersionId(vid), name, size, digest)
            for vid, name, size, digest in rows
        }
        self.used_bytes = sum(copy.size for copy in self.copies.values())
        self.moved = {
            VersionId(vid): Copy(VersionId(vid), name, size, digest)
            for vid, name, size, digest in state.rows(
                "SELECT vid, name, size, digest FROM spilled_before"
            )
        }
        """With copies at an earlier place, or of what they were before the kernel wrote on: whoever
        adopts, or mounts where RAM was lost, finds those.
        """
        self._outdated: dict[VersionId, Copy] = {}
        """Of `moved` those at the present place."""
        if directory.frees_ram:
            self._record_place()
            self._state.commit()

    def _record_place(self) -> None:
        self._state.change("DELETE FROM spill_place")
        self._state.change("INSERT INTO spill_place VALUES (?)", (self.directory.recorded,))

    # -- the disk

    def start(self) -> None:
        """Look at the disk, behind whoever starts: it may hang.

        Once at a time: the answer to an older look would be taken for news of a disk that has
        failed since, and its list of names for all that are there.
        """
        with self._lock:
            if self._is_looking:
                return
            self._is_looking = True
        self.calls.submit("look", self._begin).add_done_callback(
            lambda done: self._begun(done.exception())
        )

    def _begin(self) -> None:
        """What earlier workers left and no row names goes; then the budget.

        The journal that counts may be an earlier worker's, too.
        """
        self.directory.begin()
        found = self.directory.names()
        with self._lock, self._state.step():
            if not self.directory.frees_ram:
                self._forget_all_but(found)
                self._record_place()
            self.directory.lacks |= bool(self._forgotten)
            self.directory.settled()
            self._find_outdated(found)
            kept = (*self.copies.values(), *self._outdated.values())
            needed = {copy.name for copy in kept} | self._fresh
            left = [
                name for name in found if name not in needed and not name.startswith(MIRROR_PREFIX)
            ]
            if self.mirror is not None:
                for name in left:
                    self._when_safe(partial(self._removals.add, name))
        if self.mirror is None:
            self.directory.remove(left)
        self.set_budget(self._budget)

    def _forget_all_but(self, found: Collection[str]) -> None:
        """Copies that are not there any more, with their place, are to be made again.

        Where they were is written down as long as their versions are needed: that place may be the
        one that counts still (`copies.member_journals`), and whoever adopts finds them there.
        """
        there = set(found)
        for copy in [one for one in self.copies.values() if one.name not in there]:
            self.used_bytes -= copy.size
            self._move(copy)
            self._forgotten.append(copy.vid)
        for copy in [one for one in self._outdated.values() if one.name not in there]:
            self.used_bytes -= copy.size
            del self._outdated[copy.vid]  # its row stays, as those of the others do

    def _move(self, copy: Copy) -> None:
        """It is no copy of what its version is here and now, and better than none."""
        del self.copies[copy.vid]
        self._state.change("DELETE FROM spilled WHERE vid = ?", (copy.vid,))
        self._state.change(
            "INSERT OR REPLACE INTO spilled_before VALUES (?, ?, ?, ?)",
            (copy.vid, copy.name, copy.size, copy.digest),
        )
        self.moved[copy.vid] = copy

    def _find_outdated(self, found: Collection[str]) -> None:
        """Those that an earlier worker left: they go with their versions, or with the next copies
        of these.
        """
        there = set(found)
        for vid, copy in self.moved.items():
            if copy.name in there and vid not in self._outdated:
                self._outdated[vid] = copy
                self.used_bytes += copy.size

    def take_forgotten(self) -> list[VersionId]:
        """Versions whose copies are gone since this was asked last."""
        forgotten = self._forgotten
        self._forgotten = []
        return forgotten

    def set_budget(self, budget: int | str) -> None:
        """Bytes, or a share of what is free now and what is used already. Asks the disk."""
        free_bytes = self.directory.free_bytes()
        with self._lock:
            self._budget = budget
            self.budget_bytes = share_of(budget, free_bytes + self.used_bytes)

    def _begun(self, error: BaseException | None) -> None:
        with self._lock:
            self._is_looking = False
            if error is None:
                self._ready = True
                self._failed_in_a_row = 0
                self._rest_until = 0.0
            else:
                self._failed(error)

    def usable(self) -> bool:
        """Whether new copies may be made now; looks again at a disk that failed, when its rest is
        over.
        """
        is_resting = self._is_looking or self.calls.clock.now() < self._rest_until
        if self._closed or is_resting or self.calls.health.is_stuck():
            return False
        if self._ready and not self.directory.is_broken:
            return True
        self.start()
        return False

    def takes(self, size: int) -> bool:
        """Whether a copy of that size may be made now."""
        if not self.usable():
            return False
        needed = self.used_bytes + self.reserved_bytes + size
        self._is_full = needed > self.budget_bytes
        if self._is_full:
            self.directory.is_too_small(needed)
        return not self._is_full

    def is_moving(self) -> bool:
        """Whether copies are being made, by a disk that answers."""
        return self.directory.frees_ram and bool(self.making) and not self.calls.health.is_stuck()

    @property
    def reserved_bytes(self) -> int:
        """Of copies that are being made."""
        return sum(making.size for making in self.making.values())

    def _failed(self, error: BaseException) -> None:
        self._counts.failures += 1
        self._failed_in_a_row += 1
        rest_s = min(
            self._rules.rest_max_s, self._rules.rest_min_s * 2 ** min(self._failed_in_a_row - 1, 10)
        )
        self._rest_until = self.calls.clock.now() + rest_s
        is_news = str(error) != self._last_error or self.directory.frees_ram
        self._last_error = str(error)
        if not is_news:
            return
        log.warning(
            "the place of copies failed: nothing is lost, acpfs goes on without it for a while",
            directory=self.directory.where,
            error=errno_name(error.errno) if isinstance(error, OSError) else type(error).__name__,
            detail=str(error),
            seconds=rest_s,
        )

    def begin_journal(self) -> None:
        """All tables of the state have been created.

        Takes the lock: threads may be at work already.
        """
        if self.mirror is not None:
            with self._lock:
                self.mirror.begin()

    # -- making copies

    def begin(self, version: Version, listener: CopyListener) -> None:
        """Copy a version in the background; `takes` has said yes."""
        making = Making(version, listener)
        self.making[version.vid] = making
        future = self.calls.submit("copy", self._copy, making)
        future.add_done_callback(lambda done: self._made(making, done))

    def _copy(self, making: Making) -> Copy:
        """In a thread of the pool."""
        making.call = current_call()
        place = self.directory.recorded
        vid = making.version.vid
        name = self.directory.new_name(making.version.vid)
        with self._lock:
            self._fresh.add(name)
        try:
            with contextlib.closing(self.directory.new_copy(name)) as file:
                digest, size = self._fill(making, file)
                file.finish(size)
                making.progress()
            self.directory.sync_names()
        except BaseException:
            with contextlib.suppress(OSError):
                self.directory.remove([name])
            with self._lock:
                self._fresh.discard(name)
            raise
        return Copy(vid, name, size, digest, place)

    def _fill(self, making: Making, file: CopyFile) -> tuple[str, int]:
        for _attempt in range(RENEWALS_MAX):
            with self._lock:
                renewals = making.version.renewals
                size = making.version.size
            digest = self._fill_once(making, file, size)
            with self._lock:
                if making.abandoned:
                    raise AbandonedError
                if (
                    making.listener.still_frozen(making.version)
                    and making.version.renewals == renewals
                ):
                    return digest, size
            file.clear()
        raise UnsteadyError

    def _fill_once(self, making: Making, file: CopyFile, size: int) -> str:
        hasher = Checksum()
        position = 0
        buffer = file.buffer(min(size, self.directory.piece_bytes))
        with contextlib.closing(Source(making, self._tier, self._lock, buffer, self)) as source:
            while position < size:
                count, is_hole = source.read(position, min(size - position, len(buffer)))
                piece = bytes(count) if is_hole else buffer[:count]
                hasher.update(piece)
                if not is_hole:
                    file.write(piece, position)
                position += count
                making.progress()
        return hasher.hexdigest()

    def _made(self, making: Making, done: Future[Copy]) -> None:
        version = making.version
        with self._lock, self._state.step():
            self.making.pop(version.vid, None)
            error = done.exception()
            if error is None:
                self._keep(making, done.result())
            elif not isinstance(error, (AbandonedError, UnsteadyError)):
                self._failed(error)
            if error is not None and not making.abandoned:
                making.listener.not_copied(version)

    def _keep(self, making: Making, copy: Copy) -> None:
        self._fresh.discard(copy.name)
        self._failed_in_a_row = 0
        if making.abandoned:
            self._removals.add(copy.name)
            return
        if copy.place != self.directory.recorded:  # what it was copied to counts no more
            making.listener.not_copied(making.version)
            return
        self._counts.files += 1
        self._counts.bytes += copy.size
        self._forget_outdated(copy.vid)
        self.copies[copy.vid] = copy
        self.used_bytes += copy.size
        self._state.change(
            "INSERT OR REPLACE INTO spilled VALUES (?, ?, ?, ?)",
            (copy.vid, copy.name, copy.size, copy.digest),
        )
        making.listener.copied(making.version)

    def forget(self, version: Version) -> None:
        """Nobody needs the version's copy (any more)."""
        self._abandon(version)
        self._forget_outdated(version.vid)
        if self.moved.pop(version.vid, None) is not None:
            self._state.change("DELETE FROM spilled_before WHERE vid = ?", (version.vid,))
        copy = self.copies.get(version.vid)
        if copy is not None:
            self._drop(copy)

    def _drop(self, copy: Copy) -> None:
        del self.copies[copy.vid]
        self.used_bytes -= copy.size
        self._state.change("DELETE FROM spilled WHERE vid = ?", (copy.vid,))
        self._when_safe(partial(self._removals.add, copy.name))

    def outdate(self, version: Version) -> None:
        """The kernel wrote on: another copy is to be made, and until that is recorded this one is
        all that is there if RAM is lost, and was told to be there.
        """
        self._abandon(version)
        copy = self.copies.get(version.vid)
        if copy is None:
            return
        if self.mirror is None or version.vid in self.moved:
            # what an earlier place has may be what counts still
            self._drop(copy)
        else:
            self._move(copy)
            self._outdated[copy.vid] = copy

    def _abandon(self, version: Version) -> None:
        making = self.making.get(version.vid)
        if making is not None:
            making.abandoned = True

    def _forget_outdated(self, vid: VersionId) -> None:
        copy = self._outdated.pop(vid, None)
        if copy is not None:
            self.used_bytes -= copy.size
            del self.moved[vid]
            self._state.change("DELETE FROM spilled_before WHERE vid = ?", (vid,))
            self._when_safe(partial(self._removals.add, copy.name))

    def tell_clock(self, clock: float) -> None:
        """See `CopyPlace`; behind whoever says so. Late is as good as not at all."""
        if not self._is_telling:
            self._is_telling = True
            self.calls.submit("clock", self.directory.tell_clock, clock).add_done_callback(
                self._told_clock
            )

    def _told_clock(self, _done: Future[None]) -> None:
        self._is_telling = False

    # -- reading

    def patient(self, future: Future[T]) -> T:
        """The result of a call in a thread, as long as the disk answers in time.

        Raises:
            SpillError: it did not, or what it answered.
        """
        try:
            return future.result(PATIENCE_S)
        except FutureTimeoutError:
            raise SpillError(errno.EIO, "the spill directory does not answer") from None
        except OSError as error:
            raise SpillError(errno.EIO, f"spill directory: {error.strerror}") from error

    def open(self, vid: VersionId) -> _File:
        """Open a copy for reading; waits in the caller's thread. Thread-safe.

        Raises:
            AbandonedError: the copy is gone, nobody needs the version any more.
            SpillError: the disk's.
        """
        with self._lock:
            copy = self.copies.get(vid)
        if copy is None:
            raise AbandonedError
        future = self.reads.submit("open", self.directory.open, copy.name)
        try:
            return _File(self, self.patient(future))
        except SpillError:
            if not future.cancel():
                future.add_done_callback(
                    lambda done: None if done.exception() else os.close(done.result())
                )
            raise

    def check(self, version: Version, digest: str) -> None:
        """That bytes that were read from a copy are those that RAM had. Thread-safe.

        Raises:
            MisreadError: they are not: the disk spoiled them.
        """
        with self._lock:
            copy = self.copies.get(version.vid)
            if copy is None:
                raise AbandonedError
            if copy.digest == digest:
                return
            self._counts.mismatches += 1
            self._last_error = f"version {version.vid} reads back differently"
        log.error(
            "a copy in the spill directory is not what was written: it is not stored",
            file=f"{self.directory.where}: {copy.name}",
            expected=copy.digest,
            found=digest,
        )
        raise MisreadError(errno.EIO, "the spill directory's copy reads back differently")

    def read(self, vid: VersionId, offset: int, size: int) -> Future[bytes]:
        """Bytes of a copy, shorter at its end; fails with EIO when the disk does, or does not
        answer in time.
        """
        copy = self.copies.get(vid)
        if copy is None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self.reads.patient(
            self.reads.submit("read", self._read, copy.name, offset, size), PATIENCE_S
        )

    def _read(self, name: str, offset: int, size: int) -> bytes:
        fd = self.directory.open(name)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def copy_back(self, vid: VersionId, target: TierId, progress: Progress) -> Future[None]:
        """Write a copy's bytes into a tier file, and compare its checksum.

        The thread opens that itself: its caller may be gone.

        Fails when the disk does not answer for `PATIENCE_S`.
        """
        call = self.reads.submit("copy back", self._fill_tier, target, self.filler(vid, progress))
        return self.reads.patient(call, PATIENCE_S, moved=progress.mark)

    def _fill_tier(self, target: TierId, fill: Callable[[int], None]) -> None:
        fd = self._tier.open(target)
        try:
            fill(fd)
        finally:
            os.close(fd)

    def filler(self, vid: VersionId, progress: Progress) -> Callable[[int], None]:
        """What writes a copy's bytes into a descriptor, in a thread.

        Raises:
            OSError: ESTALE: there is no such copy.
        """
        copy = self.copies.get(vid)
        if copy is None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return partial(self._copy_back, copy, progress)

    def _copy_back(self, copy: Copy, progress: Progress, fd: int) -> None:
        hasher = Checksum()
        position = 0
        source = self.directory.open(copy.name)
        try:
            while data := os.pread(source, PIECE_BYTES, position):
                progress.moved(len(data))
                hasher.update(data)
                write_all(fd, data, position)
                position += len(data)
        finally:
            os.close(source)
        if hasher.hexdigest() != copy.digest:
            raise MisreadError(errno.EIO, "the spill directory's copy reads back differently")

    # -- the whole

    def statistics(self) -> SpillStatistics:
        """Under the lock."""
        return SpillStatistics(
            directory=self.directory.where,
            mode=self.mode.value,
            state=self._state_word(),
            budget_bytes=self.budget_bytes,
            used_bytes=self.used_bytes,
            reserved_bytes=self.reserved_bytes,
            files=len(self.copies),
            copying_files=len(self.making),
            copied_files=self._counts.files,
            copied_bytes=self._counts.bytes,
            failures=self._counts.failures,
            mismatches=self._counts.mismatches,
            last_error=self._last_error,
            mirror=self.mirror.statistics() if self.mirror is not None else None,
        )

    def _state_word(self) -> str:
        if self.calls.health.is_stuck():
            return "stuck"
        if self._failed_in_a_row:
            return "failing"
        if self._closed:
            return "closed"
        return "full" if self._is_full else "ok"

    def close(self) -> None:
        """Let idle threads end; what is in flight goes on, nobody waits for it."""
        self.calls.close()
        self.reads.close()
