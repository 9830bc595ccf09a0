"""RAM tier: numbered files on a tmpfs, and how many bytes of the budget they take.

Owns the tier files and the accounting, and does not know what the bytes mean or who may leave: the
file system decides that (`filesystem.content.retention`). Thread-safe where stated; the accounting
is used under the file system's lock.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from acpfs.config import RESERVE_PERCENT_MAX, share_of
from acpfs.ram.file_calls import RamFileCalls
from acpfs.ram.ladder import Ladder
from acpfs.ram.shares import Shares
from acpfs.ram.waiting import NOBODY, Applicant, Turns, Waiting
from acpfs.runtime.given import Runtime
from acpfs.types import NO_INO, Ino, TierId

COPY_CHUNK_BYTES = 64 << 20
BLOCK_BYTES = 512
HUGE_PAGE_BYTES = 2 << 20
LOOKS_MAX = 4
"""At a copy that is being made while others write: one that they changed each time is given up."""
UNCOUNTED_BYTES_MAX = 64 << 10
"""Small writes are not counted for turns: that would cost more than the bytes are worth (1 us of
24).
"""
HELD = "held"
"""A directory among the tier files: what this member holds for others."""
UNREAD_NS = 1
"""The atime of a tier file that was neither read nor mapped since it was set. So old a one is
replaced by the first that comes, also where atimes are kept as rarely as with `relatime`.
"""
_CACHESTAT = 451
"""The number of the system call, on every machine."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Bytes of the RAM tier; used = sum over all tier files of their allocated pages, also of
    removed ones that somebody still reads.
    """

    budget_bytes: int
    used_bytes: int
    reserved_bytes: int
    files: int
    leaving_bytes: int
    """Among the used ones: removed, and still read by somebody."""
    peak_bytes: int
    """The most that was used at any time since this object was made."""


class Tier:
    """Files `data/<number>` below a directory that only acpfs can enter."""

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        runtime: Runtime,
        *,
        ladder: Ladder | None = None,
        large_pages: bool = True,
        when_safe: Callable[[Callable[[], None]], None] = lambda unlink: unlink(),
        lend: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over what lies there. `budget_bytes`: most bytes that tier files may take together.

        `ladder`: how room is made when the budget does not hold what is wanted.
        `large_pages`: whether pages that are allocated ahead are larger than those that a small
        write gets. `when_safe`: puts the end of a tier file off until no state that a next worker
        could find names it: `StateDatabase.after_commit`. `lend`: see `lend_slack`.
        """
        self._lend = lend
        self.large_pages = large_pages
        self.ladder = Ladder() if ladder is None else ladder
        self.directory = directory
        self.shares = Shares()
        """Of the budget, for the files of one owner."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.held_bytes = 0
        """What is held for other members, and is in no tier file."""
        self.withheld_bytes = 0
        """Part of the budget that must not be used now, because the machine has not got it."""
        self.urgent_bytes = 0
        """The last part of the budget, which only urgent files get."""
        self._urgent_wanted: int | str = 0
        self._data = directory / "data"
        self._data.mkdir(mode=0o700, exist_ok=True)
        self._dir_fd = os.open(self._data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._allocated: dict[TierId, int] = {}
        self._lost: set[TierId] = set()
        self._readers: Counter[TierId] = Counter()
        self._leaving: dict[TierId, int] = {}
        self._kept_back: dict[TierId, int] = {}
        self._turns = Turns(runtime.clock)
        self._peak_bytes = 0
        self._last_id = 0
        self._fulls = 0
        self._tells_of_mappings: bool | None = None
        self._when_safe = when_safe
        self.calls = RamFileCalls(runtime.threads)
        """Those on files that applications may hold up."""
        for name in os.listdir(self._dir_fd):
            if name == HELD:
                continue
            self.settle(TierId(int(name)))
            self._last_id = max(self._last_id, int(name))
        self.look_full()

    # -- files

    def create(self) -> TierId:
        """A new, empty tier file."""
        tier_id, fd = self.create_open()
        os.close(fd)
        return tier_id

    def create_open(self) -> tuple[TierId, int]:
        """A new, empty tier file and a read-write descriptor, which the caller closes."""
        self._last_id += 1
        tier_id = TierId(self._last_id)
        fd = os.open(
            str(tier_id),
            os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOATIME | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
            dir_fd=self._dir_fd,
        )
        self._allocated[tier_id] = 0
        return tier_id, fd

    def open(self, tier_id: TierId) -> int:
        """A read-write descriptor, reading by which leaves no trace; the caller closes it.

        Thread-safe.

        Raises:
            OSError: EIO: its bytes are lost.
        """
        self._check(tier_id)
        flags = os.O_RDWR | os.O_NOATIME | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(str(tier_id), flags, dir_fd=self._dir_fd)

    def open_to_read(self, tier_id: TierId) -> int:
        """A descriptor that only reads, and leaves no trace of that; the caller closes it.

        Thread-safe.

        Raises:
            OSError: EIO: its bytes are lost.
        """
        self._check(tier_id)
        flags = os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(str(tier_id), flags, dir_fd=self._dir_fd)

    def has_writers(self, tier_id: TierId) -> bool:
        """Whether anybody has a tier file open to write, or mapped through such a descriptor.

        The kernel counts the open files of an inode that can write, and a mapping keeps the one
        that it was made through. It tells of that count only whether it is zero: to whoever asks
        for a lease to read. What the caller himself has open to write counts, too. Where it cannot
        be told (`fs.leases-enable=0`): False where it never could, and True where it was told
        before.
        """
        fd = self.open_to_read(tier_id)
        try:
            # Whoever of this process opens the file in between waits until the lease is given back,
            # and the process gets a signal: SIGIO would end it, SIGURG is ignored.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return error.errno in (errno.EAGAIN, errno.ENOMEM) or bool(self._tells_of_mappings)
        finally:
            os.close(fd)
        return False

    def tells_of_mappings(self) -> bool:
        """Whether this kernel and this file system tell that a file was mapped, and when that is
        over; tried once.

        A person may mount the file system anew with `noatime` at any time, so that is asked each
        time.
        """
        if self._tells_of_mappings is None:
            self._tells_of_mappings = self._try_mapping()
        return self._tells_of_mappings and not os.fstatvfs(self._dir_fd).f_flag & os.ST_NOATIME

    def _try_mapping(self) -> bool:
        tier_id, fd = self.create_open()
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            os.close(fd)
            fd = os.open(str(tier_id), os.O_RDWR | os.O_CLOEXEC, dir_fd=self._dir_fd)
            set_atime(fd, UNREAD_NS)
            before = os.fstat(fd).st_atime_ns
            with mmap.mmap(fd, mmap.PAGESIZE):
                after = os.fstat(fd).st_atime_ns
                os.close(fd)
                fd = -1
                was_told = self.has_writers(tier_id)
            return before == UNREAD_NS != after and was_told and not self.has_writers(tier_id)
        except (OSError, ValueError):
            return False
        finally:
            if fd >= 0:
                os.close(fd)
            self.remove(tier_id)

    def stat(self, tier_id: TierId) -> os.stat_result:
        """Size, blocks and times of a tier file. Thread-safe."""
        self._check(tier_id)
        return os.stat(str(tier_id), dir_fd=self._dir_fd, follow_symlinks=False)

    def lose(self, tier_id: TierId) -> None:
        """A file is gone that somebody needs: it counts as one of no bytes that cannot be read."""
        self._lost.add(tier_id)
        self._allocated[tier_id] = 0
        self.shares.resized(tier_id, 0)
        self._last_id = max(self._last_id, tier_id)

    def is_lost(self, tier_id: TierId) -> bool:
        """Whether its bytes are lost."""
        return tier_id in self._lost

    def _check(self, tier_id: TierId) -> None:
        if tier_id in self._lost:
            raise OSError(errno.EIO, "its bytes are gone from the RAM tier")

    def ids(self) -> list[TierId]:
        """All tier files."""
        return list(self._allocated)

    def remove(self, tier_id: TierId) -> None:
        """Delete a tier file, as soon as `when_safe` lets it, and give its bytes back to the budget
        once no reader keeps them.
        """
        taken = self._allocated.pop(tier_id)
        self.shares.resized(tier_id, 0)
        self._lost.discard(tier_id)
        # unlink waits for the inode lock of the file with that of the directory in its hands,
        # without which no file can be made
        self._when_safe(partial(self.calls.when_back, tier_id, partial(self._unlink, tier_id)))
        if self._readers[tier_id]:
            self._leaving[tier_id] = taken
        else:
            self.used_bytes -= taken
            self._wake()

    def discard(self, tier_id: TierId) -> None:
        """`remove` a file that never became a content.

        Its pages are free at once, also where a thread that hangs has it open.
        """
        assert not self.calls.is_handed_over(tier_id), tier_id
        self._truncate(tier_id, 0)
        self.remove(tier_id)

    def cut(self, tier_id: TierId, size: int) -> None:
        """Keep only the first bytes of a tier file, as soon as `when_safe` lets it, and give the
        rest back to the budget.
        """
        freed = max(0, self._allocated[tier_id] - size)
        self._allocated[tier_id] -= freed
        self.shares.resized(tier_id, self._allocated[tier_id])
        self.used_bytes -= freed
        self._when_safe(partial(self.calls.when_back, tier_id, partial(self._cut, tier_id, size)))
        self._wake()

    def _cut(self, tier_id: TierId, size: int) -> None:
        if tier_id in self._allocated:
            self._truncate(tier_id, size)
            self.settle(tier_id)

    def _truncate(self, tier_id: TierId, size: int) -> None:
        self.look_full()
        os.truncate(f"/proc/self/fd/{self._dir_fd}/{tier_id}", size)

    def read_long(self, tier_id: TierId) -> int:
        """`open_to_read` for somebody who may keep it for long, in a thread that hangs.

        The bytes count until `read_done`, come what may.
        """
        fd = self.open_to_read(tier_id)
        self._readers[tier_id] += 1
        return fd

    def read_done(self, tier_id: TierId, fd: int) -> None:
        """The reader has what it wanted."""
        self.look_full()
        os.close(fd)
        self._readers[tier_id] -= 1
        if not self._readers[tier_id]:
            del self._readers[tier_id]
            if tier_id in self._leaving:
                self.used_bytes -= self._leaving.pop(tier_id)
                self._wake()

    def keep_back(self, tier_id: TierId) -> None:
        """Processes that nobody tells of can write the file, and may have its inode lock for as
        long as they like: its bytes count, and no version's are read, until `bring_back`.
        """
        self._kept_back[tier_id] = self.read_long(tier_id)
        self.calls.hand_over(tier_id)

    def bring_back(self, tier_id: TierId) -> None:
        """They cannot any more."""
        self.read_done(tier_id, self._kept_back.pop(tier_id))
        self.calls.take_back(tier_id)

    def is_kept_back(self, tier_id: TierId) -> bool:
        """Whether processes that nobody tells of can write the file."""
        return tier_id in self._kept_back

    def _unlink(self, tier_id: TierId) -> None:
        self.look_full()
        with suppress(FileNotFoundError):
            os.unlink(str(tier_id), dir_fd=self._dir_fd)

    def copy(self, source: TierId, target: TierId, size: int) -> None:
        """Copy the first `size` bytes; slow, thread-safe; the caller has reserved the bytes and
        settles afterwards.

        Nobody who writes to the source holds that up. Holes stay holes.
        """
        read_fd = self.open_to_read(source)
        write_fd = self.open(target)
        try:
            is_sparse = os.fstat(read_fd).st_blocks * BLOCK_BYTES < size
            copy = _copy_data if is_sparse else _copy_all
            copy(read_fd, write_fd, size)
            os.ftruncate(write_fd, size)
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def copy_steady(self, source: TierId, target: TierId) -> int | None:
        """`copy` of all of a file that others may be writing to; its length in bytes, or None where
        the copy is not of one moment.

        What is read twice and is the same was so in between: so where all of it is, and the length,
        after all of it was copied, the copy is what the file was then. That goes for mappings, too,
        which leave no trace. What was changed and changed back meanwhile is not seen.
        """
        read_fd = self.open_to_read(source)
        write_fd = self.open(target)
        try:
            size = os.fstat(read_fd).st_size
            self.copy(source, target, size)
            for _ in range(LOOKS_MAX):
                renewed = _renew_copy(read_fd, write_fd, size)
                before = size
                # Behind what was read: who appends first and says so at the start has done both.
                size = os.fstat(read_fd).st_size
                if not renewed and size == before:
                    return size
                os.ftruncate(write_fd, size)
            return None
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def end_of_pages(self, tier_id: TierId) -> int:
        """Where the last of the pages ends that somebody has allocated behind a file's end
        (fallocate); 0: there are none.

        To look for holes (SEEK_HOLE) takes the inode lock; to ask the page cache (cachestat, since
        Linux 6.5) does not. 0 as well where that cannot be asked.
        """
        fd = self.open_to_read(tier_id)
        try:
            known = -(-os.fstat(fd).st_size // mmap.PAGESIZE)
            # Mostly they lie side by side: then there is nothing at the first place that is asked.
            ahead = _pages_from(fd, known)
            count = ahead
            if not count:
                return 0
            while _pages_from(fd, known + ahead):
                known += ahead
                ahead *= 2
            # The last one is not before `known`, and before `known + ahead`.
            while ahead > 1:
                half = ahead // 2
                if _pages_from(fd, known + half):
                    known += half
                    ahead -= half
                else:
                    ahead = half
            return (known + 1) * mmap.PAGESIZE
        finally:
            os.close(fd)

    # -- budget

    def allocated_bytes(self, tier_id: TierId) -> int:
        """Bytes of RAM that a tier file takes, as last settled."""
        return self._allocated.get(tier_id, 0)

    def free_bytes(self, *, urgent: bool = False) -> int:
        """What the budget still holds; for all but urgent files without what is kept for those, so
        that it may be less than nothing.
        """
        free = self.budget_bytes - self.used_bytes - self.reserved_bytes
        free -= self.held_bytes + self.withheld_bytes
        return free if urgent else free - self.urgent_bytes

    def most_bytes(self, *, urgent: bool = False) -> int:
        """What the budget has when nothing is in RAM."""
        return self.budget_bytes if urgent else self.budget_bytes - self.urgent_bytes

    def keep_for_urgent(self, wanted: int | str) -> None:
        """The last part of the budget, bytes or percent, is for urgent files from now on.

        What others have of it, they keep.
        """
        self._urgent_wanted = wanted
        self.urgent_bytes = min(
            share_of(wanted, self.budget_bytes), self.budget_bytes * RESERVE_PERCENT_MAX // 100
        )
        self._wake()

    def tell_urgent(self, is_urgent: Callable[[Ino], bool]) -> None:
        """Which files are urgent has changed: serve who waits by that."""
        self._turns.tell_urgent(is_urgent)
        self._wake()

    def space_left_bytes(self) -> int:
        """What the tmpfs itself still takes: budget and slack, or less where others use it too."""
        info = os.fstatvfs(self._dir_fd)
        return info.f_bavail * info.f_frsize

    def lend_slack(self) -> None:
        """Nobody stops those who write unseen: the tmpfs takes more for a while, where that can
        be.
        """
        self._lend()

    def look_full(self) -> int:
        """How often the tmpfs was seen full, with this look.

        Whatever frees pages looks first, so that no such moment ends unseen.
        """
        self._fulls += self.space_left_bytes() < HUGE_PAGE_BYTES
        return self._fulls

    def reserve_nowait(self, size: int, applicant: Applicant = NOBODY) -> bool:
        """Take `size` bytes of the budget before they are written; False when they are not there,
        or others wait for them.
        """
        if self.take_free(size, applicant):
            return True
        missing = size - self.free_bytes(urgent=applicant.urgent)
        if missing <= 0 or self.shares.short_by(size, applicant) > 0:
            return False
        self.ladder.make_room(missing)
        return self.take_free(size, applicant)

    def take_free(self, size: int, applicant: Applicant) -> bool:
        """`reserve_nowait` of what is there, for which nothing has to leave."""
        if not self._is_free(size, applicant):
            return False
        if self.shares.limit_bytes and self.shares.short_by(size, applicant) > 0:
            return False
        self._take(size, applicant)
        return True

    def take_for_stores(self, size: int, applicant: Applicant) -> bool:
        """`take_free`, whatever the owner's share has left: nobody can hold who stores through a
        mapping, and where the tmpfs is full a store ends the program.
        """
        if not self._is_free(size, applicant):
            return False
        self._take(size, applicant)
        return True

    def _is_free(self, size: int, applicant: Applicant) -> bool:
        urgent = applicant.urgent
        # who wants none of the budget, but a part of his share, waits for nobody else
        return (not size and applicant.dirties_bytes > 0) or (
            self.free_bytes(urgent=urgent) >= size
            and not self._turns.before(self._may_have, urgent=urgent)
        )

    def _take(self, size: int, applicant: Applicant) -> None:
        self.reserved_bytes += size
        if self.shares.limit_bytes:
            self.shares.reserve(applicant, size)
        if size > UNCOUNTED_BYTES_MAX:
            self._turns.had(applicant, size, self.budget_bytes)

    def _may_have(self, waiting: Waiting) -> bool:
        """Whether the owner's share has room for it: who waits for that stands in nobody's way."""
        return self.shares.short_by(waiting.size, waiting.applicant) <= 0

    def reserve_slack(self, size: int, applicant: Applicant, left: int) -> bool:
        """Take bytes beyond the budget; False where the tmpfs would have less than `left` when all
        that is reserved is written.
        """
        if self.space_left_bytes() - self.reserved_bytes < size + left:
            return False
        self._take(size, applicant)
        return True

    def reserve(self, size: int, applicant: Applicant = NOBODY) -> Future[None]:
        """Like `reserve_nowait`, but the answer comes when the bytes are there and it is the
        applicant's turn.
        """
        if self.reserve_nowait(size, applicant):
            given: Future[None] = Future()
            given.set_result(None)
            return given
        waiting = self._turns.add(applicant, size, self.budget_bytes)
        self._wake()
        return waiting.room

    def had(self, applicant: Applicant, size: int) -> None:
        """The applicant has got bytes without waiting, or has written them unseen: its next turn
        comes the later.
        """
        if size > UNCOUNTED_BYTES_MAX:
            self._turns.had(applicant, size, self.budget_bytes)

    def turn(self, applicant: Applicant) -> float:
        """Smaller for who has had less than others that compete."""
        return self._turns.turn(applicant)

    def release(self, size: int, ino: Ino = NO_INO) -> None:
        """Give a reservation back, after the bytes were written and settled (or were not
        written).

        `ino`: of the applicant that it was made for.
        """
        self.settled(size, ino)
        self._wake()

    def settled(self, size: int, ino: Ino = NO_INO) -> None:
        """`release` of what was written and is accounted for: nothing is free by that, and nobody
        is served.
        """
        self.reserved_bytes -= size
        if self.shares.limit_bytes:
            self.shares.release(ino, size)

    def hold(self, size: int, *, force: bool = False) -> bool:
        """Take bytes for what is held for another member; False where our own want them.

        `force`: they are taken already.
        """
        if not force:
            if self._turns.before(self._may_have, urgent=False):
                return False
            if (missing := size - self.free_bytes()) > 0:
                self.ladder.make_room(missing)
            if self.free_bytes() < size:
                return False
        self.held_bytes += size
        return True

    def let_held_go(self, size: int) -> None:
        """They are free again."""
        self.held_bytes -= size
        self._wake()

    def keep(self, size: int, applicant: Applicant) -> None:
        """Reserve what a file has just freed, for itself: nobody else had it meanwhile."""
        self.reserved_bytes += size
        self.shares.reserve(applicant, size)

    def settle(self, tier_id: TierId) -> None:
        """Account for what a tier file takes now."""
        self._account(tier_id, self.stat(tier_id))

    def settle_fd(self, tier_id: TierId, fd: int) -> os.stat_result:
        """`settle` through an open descriptor; returns its stat."""
        st = os.fstat(fd)
        self._account(tier_id, st)
        return st

    def _account(self, tier_id: TierId, st: os.stat_result) -> None:
        taken = st.st_blocks * BLOCK_BYTES
        self.used_bytes += taken - self._allocated.get(tier_id, 0)
        self._allocated[tier_id] = taken
        if self.shares.limit_bytes:
            self.shares.resized(tier_id, taken)
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)

    def change_budget(self, budget_bytes: int) -> None:
        """Another budget from now on: what may leave does at once where it is smaller, and who
        waits is served where it is larger.
        """
        self.budget_bytes = budget_bytes
        self.shares.budget_changed(budget_bytes)
        self.keep_for_urgent(self._urgent_wanted)
        self.room_changed()

    def room_changed(self) -> None:
        """Something may have become evictable, or the budget has changed: look again whether it
        holds, and whether waiting writers fit.
        """
        if self.free_bytes(urgent=True) < 0:
            self.ladder.make_room(
                -self.free_bytes(urgent=True)
            )  # nobody asks for room now, and yet there is to be some
        self._wake()

    def fail_waiting(self, number: int, in_vain: Iterable[Waiting]) -> None:
        """No room will ever come for these: answer them with that errno.

        Then it is the turn of those behind them.
        """
        given_up = self._turns.give_up(in_vain)
        for one in given_up:
            if one.room.set_running_or_notify_cancel():
                one.room.set_exception(OSError(number, os.strerror(number)))
        if given_up:
            self._wake()

    def waiting(self, *, urgent: bool = False) -> int:
        """How many wait for room that may have it; with `urgent` only those who go before somebody
        who is.
        """
        return self._turns.before(self._may_have, urgent=urgent)

    def has_waiting(self) -> bool:
        """Whether anybody waits, be it for a share."""
        return len(self._turns) > 0

    def queue(self) -> Sequence[Waiting]:
        """Who waits for room, in the order in which they are served."""
        return list(self._turns)

    def _wake(self) -> None:
        while (first := self._turns.first(self._may_have)) is not None:
            if not self._is_enough_for(first):
                self.ladder.make_room(first.size - self.free_bytes(urgent=first.urgent))
            if self._turns.first(self._may_have) is not first:
                continue  # what left made room, and was woken for, on the way
            if not self._is_enough_for(first):
                return
            self._turns.serve(first)
            if first.room.set_running_or_notify_cancel():
                self.reserved_bytes += first.size
                self.shares.reserve(first.applicant, first.size)
                first.room.set_result(None)

    def _is_enough_for(self, waiting: Waiting) -> bool:
        return not waiting.size or self.free_bytes(urgent=waiting.urgent) >= waiting.size

    def statistics(self) -> TierStatistics:
        """What `status`, the metrics and the tests see."""
        return TierStatistics(
            self.budget_bytes,
            self.used_bytes,
            self.reserved_bytes,
            len(self._allocated),
            leaving_bytes=sum(self._leaving.values()),
            peak_bytes=self._peak_bytes,
        )

    def close(self) -> None:
        """Let go of the directory; the files stay."""
        os.close(self._dir_fd)


def _pages_from(fd: int, page: int) -> int:
    """How many pages the page cache has of a file from that one on, behind its end, too; 0 where
    that cannot be asked.
    """
    extent = (ctypes.c_uint64 * 2)(page * mmap.PAGESIZE, 0)
    counts = (ctypes.c_uint64 * 5)()
    number = ctypes.c_long(_CACHESTAT)
    return counts[0] if _libc.syscall(number, fd, extent, counts, 0) == 0 else 0


def _copy_all(read_fd: int, write_fd: int, size: int) -> None:
    done = 0
    while done < size:
        count = os.copy_file_range(
            read_fd, write_fd, min(COPY_CHUNK_BYTES, size - done), done, done
        )
        if count == 0:
            break
        done += count


def _copy_data(read_fd: int, write_fd: int, size: int) -> None:
    """But what is zeros: to ask for holes (SEEK_DATA) takes the inode lock, which a writer may
    keep.
    """
    zeros = bytes(HUGE_PAGE_BYTES)
    piece = memoryview(bytearray(HUGE_PAGE_BYTES))
    for start in range(0, size, HUGE_PAGE_BYTES):
        count = os.preadv(read_fd, [piece[: size - start]], start)
        if piece[:count] != zeros[:count]:
            os.pwrite(write_fd, piece[:count], start)


def _renew_copy(read_fd: int, write_fd: int, size: int) -> int:
    """Copy once more what is different by now; returns in how many pieces anything was.

    Holes are read as zeros: they stay holes where nothing was written to them.
    """
    renewed = 0
    for start in range(0, size, HUGE_PAGE_BYTES):
        count = min(HUGE_PAGE_BYTES, size - start)
        now = os.pread(read_fd, count, start).ljust(count, b"\0")
        if os.pread(write_fd, count, start) != now:
            os.pwrite(write_fd, now, start)
            renewed += 1
    return renewed


FALLOC_KEEP_SIZE = 1
FALLOC_PUNCH_HOLE = 2
FALLOC_ZERO_RANGE = 16


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give back the pages of a range, which reads as zeros then; the file is as long as before."""
    fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, offset, length)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_UTIME_OMIT = (1 << 30) - 2


def _set_times(fd: int, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    times = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
    if _libc.futimens(fd, times) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def set_mtime(fd: int, time_ns: int) -> None:
    """Set a tier file's mtime, and leave its atime alone, which tells whether it was read or mapped
    since.

    `os.utime` sets both: what the kernel sets in between would be lost.
    """
    _set_times(fd, (0, _UTIME_OMIT), divmod(time_ns, 10**9))


def set_atime(fd: int, time_ns: int) -> None:
    """Set a tier file's atime alone."""
    _set_times(fd, divmod(time_ns, 10**9), (0, _UTIME_OMIT))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """The system call of that name; Python has only posix_fallocate."""
    if _libc.fallocate(fd, ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
