"""One cold file on its way from the backing directory into a tier file, in pieces, in whatever
order they are asked for.

Owns the pieces: which are there, which are being read and by whom, and the checksum, which follows
behind the first gap. Does not know nodes, budgets or why the file comes. What a request asks for is
read by the request's own call, at once, and everybody else who needs that piece waits for the same
one; reading ahead goes through threads of its own, so no request ever waits behind it. Thread-safe,
a lock of its own, never held over a system call; threads that hang on the backing directory hang
alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from acpfs.backing.calls import BackingTimeoutError, CallPool
from acpfs.backing.lower import Lower, LowerStat, Note
from acpfs.backing.progress import Progress
from acpfs.checksum import Checksum
from acpfs.exchange.exchange_records import GET_BYTES_MAX, PART_BYTES
from acpfs.filesystem.content.from_members import FromMembers
from acpfs.filesystem.content.lent import Lent
from acpfs.ram.ladder import Rung
from acpfs.ram.tier import Tier
from acpfs.types import TierId

PIECE_BYTES = 1 << 20
"""What one request of the kernel asks for at most."""
RUN_PIECES = 2
"""Read ahead in one call. Large enough for a storage that likes large requests, small enough that
four readers share the end of a file; `bench.warm_reads` holds the whole against dd.
"""
PART_PIECES = PART_BYTES // PIECE_BYTES
SHARED_RUN_PIECES = GET_BYTES_MAX // PIECE_BYTES
"""The same where other members may have them: a range costs them and us a few messages."""
READERS = 4
"""Threads that read one file ahead."""
_MISSING = 0
_BEING_READ = 1
_THERE = 2


@dataclass(slots=True)
class WarmStatistics:
    """What `status`, the metrics and the tests see; names as they are counted."""

    warmed_files: int = 0
    warmed_bytes: int = 0
    warmed_verified: int = 0
    warming_given_up: int = 0
    """Files that were not read on, changed, or had to make room."""
    warming: int = 0
    """Files on their way now."""


@dataclass(frozen=True, slots=True)
class FillSource:
    """What is read."""

    lower: Lower
    fd: int
    """Descriptor on the backing directory."""
    direct: bool
    """It takes aligned requests only."""


@dataclass(slots=True)
class _SharedFile:
    """A file that other members may have, or read, too."""

    members: FromMembers | None
    asked: set[int] = field(default_factory=set)
    """Pieces that others are asked for just now: nobody else may wait for those here, or two
    members would wait for each other.
    """
    own: list[int] = field(default_factory=list)
    """Where parts begin that others wait for; read ahead before all else."""
    own_as_of: int = -1


class Fill:
    """Pieces of one file. `done` tells the end: the checksum, or why there is none."""

    def __init__(
        self,
        source: FillSource,
        target: int,
        size: int,
        *,
        requests: CallPool,
        ahead: CallPool,
        progress: Progress,
        wanted: Callable[[], bool] = lambda: True,
        members: FromMembers | None = None,
    ) -> None:
        """`target`: descriptor on an empty tier file; that and the source's are closed here, when
        nobody uses them.

        `requests`: threads for what is asked for;
        `ahead`: for reading ahead. `progress`: of reading ahead. When that is given up, the bytes
        in the tier file count for nothing any more, and may go. `wanted`: asked before each run is
        read ahead, without a lock: whether the file is still the one that is wanted. `members`:
        asked before the storage is.
        """
        self.size = size
        self._wanted = wanted
        self._shared = _SharedFile(members)
        self.progress = progress
        self.done: Future[str] = Future()
        self.before: LowerStat | None = None
        """The file as it was before its first byte was read."""
        self.after: LowerStat | None = None
        """The same when all had been read; set before `done`."""
        self.note: Note | None = None
        """What acpfs noted at it when it was stored; set before `done`."""
        self.led = False
        """Whether it comes by itself, whatever is asked for."""
        self.asked_bytes = 0
        """How much was asked for so far; every piece counts once."""
        self._source = source
        self._target_fd = target
        self._map = mmap.mmap(target, size)
        self._view = memoryview(self._map)
        self._touching = threading.Lock()
        """Held where the mapping is touched by other means than a system call, or the tier file is
        written, and that not after the end: it may be cut off then, and a touch would be a SIGBUS.
        A read(2) that comes back so late fails with EFAULT.
        """
        self._requests = requests
        self._ahead = ahead
        self._count = max(1, -(-size // PIECE_BYTES))
        self._state = bytearray(self._count)
        self._being_read: dict[int, Future[None]] = {}
        self._there = 0
        self._hashed = 0
        self._next = 0
        self._hasher = Checksum()
        self._hashing = False
        self._ended = False
        self._readers = 0
        self._users = 1
        self._lock = threading.Lock()
        self._looked: Future[None] = Future()
        self._looked.set_running_or_notify_cancel()
        self.done.set_running_or_notify_cancel()
        self._submit(requests, "look", self._look, refused=self._looked.set_exception)

    # -- who uses the descriptors

    def use(self) -> bool:
        """Keep the descriptors open until `unuse`; False: they are closed."""
        with self._lock:
            if not self._users:
                return False
            self._users += 1
            return True

    def unuse(self) -> None:
        """The last one closes; on another thread, because closing may hang."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._view.release()
            self._map.close()
            os.close(self._target_fd)
            self._ahead.close_later(self._source.fd)

    def source_copy(self) -> int:
        """Another descriptor of the same file of the backing directory, while somebody `use`s this;
        -1: not for others.
        """
        return -1 if self._source.direct else os.dup(self._source.fd)

    # -- asking

    @property
    def members(self) -> FromMembers | None:
        """Who is asked before the storage is."""
        return self._shared.members

    @property
    def there_bytes(self) -> int:
        """How much is in the tier file."""
        return min(self.size, self._there * PIECE_BYTES)

    def parts_there(self) -> int:
        """Which parts others need not read: a bit for each that is there, the first one's is the
        lowest.
        """
        found = 0
        for part in range(-(-self._count // PART_PIECES)):
            pieces = self._state[part * PART_PIECES : (part + 1) * PART_PIECES]
            found |= (pieces.count(_THERE) == len(pieces)) << part
        return found

    @property
    def ended(self) -> bool:
        """Whether it is complete, has failed or was given up."""
        return self._ended

    def has(self, offset: int, size: int) -> bool:
        """Whether a range can be read from the tier file."""
        first, last = self._range(offset, size)
        asked = self._state[first : last + 1]
        return asked.count(_THERE) == len(asked)

    def _range(self, offset: int, size: int) -> tuple[int, int]:
        end = min(offset + size, self.size)
        return offset // PIECE_BYTES, max(offset, end - 1) // PIECE_BYTES

    def ask(self, offset: int, size: int) -> list[Future[None]]:
        """What to wait for until the range is there.

        Pieces that nobody reads yet are read by calls of their own, at once.
        """
        first, last = self._range(offset, size)
        waits = []
        begun = []
        with self._lock:
            if self._ended and self._there < self._count:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            for piece in range(first, min(last + 1, self._count)):
                if self._state[piece] == _MISSING:
                    begun.append(self._begin(piece))
                    self.asked_bytes += PIECE_BYTES
                if self._state[piece] == _BEING_READ:
                    waits.append(self._being_read[piece])
            self._next = min(last + 1, self._count)  # what is read ahead goes on from here
        for piece in begun:
            self._submit(
                self._requests, "read", self._fetch, piece, 1, refused=lambda _error: self.unuse()
            )
        return waits

    def give(self, offset: int, size: int) -> list[Future[None]] | None:
        """`ask` for another member: what is missing is read from the storage, whoever it belongs
        to. None: it does not come, or somebody else is asked for it just now.
        """
        first, last = self._range(offset, size)
        asked = range(first, min(last + 1, self._count))
        with self._lock:
            if self._ended:
                return [] if self._there == self._count else None
            if not self._shared.asked.isdisjoint(asked):
                return None
            missing = [piece for piece in asked if self._state[piece] == _MISSING]
            begun = [self._begin(piece) for piece in missing]
            waits = [self._being_read[piece] for piece in asked if piece in self._being_read]
        for piece in begun:
            self._submit(
                self._requests,
                "read",
                self._fetch_here,
                piece,
                refused=lambda _error: self.unuse(),
            )
        return waits

    def is_missing(self, offset: int, size: int) -> bool:
        """Whether nobody has begun to read any of the range."""
        first, last = self._range(offset, size)
        return not any(self._state[first : last + 1])

    def _begin(self, piece: int) -> int:
        self._state[piece] = _BEING_READ
        future: Future[None] = Future()
        # one impatient reader must not cancel it for the others
        future.set_running_or_notify_cancel()
        self._being_read[piece] = future
        self._users += 1
        return piece

    def read(self, offset: int, size: int) -> bytes | None:
        """Bytes of a range that is there; None: they are not any more."""
        data = os.pread(self._target_fd, min(size, self.size - offset), offset)
        return (
            data if self.progress.wanted else None
        )  # looked at last: it is given up before its bytes go

    # -- reading ahead

    def lead(self) -> None:
        """Read all that is missing, several ranges at a time, behind what was asked for last
        first.
        """
        with self._lock:
            self.led = True
            missing = 0 if self._ended else self._state.count(_MISSING)
            more = min(READERS, -(-missing // RUN_PIECES)) - self._readers
            self._readers += max(0, more)
            self._users += max(0, more)
            if not self._readers:
                self.progress.begin()  # nothing of it waits for a thread
        for _ in range(more):
            self._submit(
                self._ahead, "fill", self._read_ahead, refused=lambda _error: self._stop_reading()
            )

    def _read_ahead(self) -> None:
        try:
            self.progress.begin()
            while not self._ended:
                if not self._wanted():
                    self.give_up()
                    return
                self._look_for_own()
                first, count = self._next_run()
                if not count:
                    return
                self._fetch(first, count)
        finally:
            self._stop_reading()

    def _stop_reading(self) -> None:
        with self._lock:
            self._readers -= 1
        self.unuse()

    def _next_run(self) -> tuple[int, int]:
        """The next missing pieces that lie together: behind the last that were begun, else from the
        start.
        """
        with self._lock:
            if self._ended:
                return 0, 0
            first = self._next_own()
            first = self._state.find(_MISSING, self._next) if first < 0 else first
            first = self._state.find(_MISSING) if first < 0 else first
            if first < 0:
                return 0, 0
            end = first
            # not into the next part, which may belong to another member
            run = RUN_PIECES if self.members is None else SHARED_RUN_PIECES
            most = min(self._count, first + run, first - first % PART_PIECES + PART_PIECES)
            while end < most and self._state[end] == _MISSING:
                self._begin(end)
                end += 1
            self._next = end
            return first, end - first

    def _look_for_own(self) -> None:
        """Which parts others wait for, when that has changed."""
        members = self.members
        if members is None or self._shared.own_as_of == members.changes:
            return
        self._shared.own_as_of = members.changes
        own = members.own_parts(-(-self._count // PART_PIECES))
        with self._lock:
            self._shared.own = [part * PART_PIECES for part in own]

    def _next_own(self) -> int:
        """The first missing piece of a part that others wait for; -1: there is none."""
        while self._shared.own:
            begin = self._shared.own[0]
            first = self._state.find(_MISSING, begin, min(self._count, begin + PART_PIECES))
            if first >= 0:
                return first
            del self._shared.own[0]
        return -1

    # -- in a thread that may hang

    def _submit(
        self,
        pool: CallPool,
        label: str,
        function: Callable[..., None],
        *arguments: Any,
        refused: Callable[[BaseException], None],
    ) -> None:
        """Where so many calls hang that the pool takes no more, it ends here; `refused` does what
        the call would have at its end.
        """
        done = pool.submit(label, function, *arguments)
        error = done.exception() if done.done() else None
        if isinstance(error, BackingTimeoutError):
            refused(error)
            self._fail(error)

    def _look(self) -> None:
        try:
            self.before = self._source.lower.stat_fd(self._source.fd)
        except OSError as error:
            self._looked.set_exception(error)
            self._fail(error)
        else:
            self._looked.set_result(None)

    def _fetch(self, first: int, count: int) -> None:
        """Bring pieces; each was begun, and holds the descriptors."""
        try:
            self._looked.result()
            if not self._ended and not self._copy_from_members(first, count):
                self._copy(first * PIECE_BYTES, min(self.size, (first + count) * PIECE_BYTES))
            self._arrived(first, count)
        except BaseException as error:  # noqa: BLE001
            # whatever it was: bytes that did not come are never there
            self._fail(error)
        finally:
            for _ in range(count):
                self.unuse()

    def _fetch_here(self, piece: int) -> None:
        """`_fetch` from the storage, whoever the piece belongs to."""
        try:
            self._looked.result()
            if not self._ended:
                self._copy(piece * PIECE_BYTES, min(self.size, (piece + 1) * PIECE_BYTES))
            self._arrived(piece, 1)
        except BaseException as error:  # noqa: BLE001 - as there
            self._fail(error)
        finally:
            self.unuse()

    def _copy_from_members(self, first: int, count: int) -> bool:
        """Whether another member has given them."""
        before = self.before
        if self.members is None or before is None:
            return False
        pieces = range(first, first + count)
        with self._lock:
            self._shared.asked.update(pieces)
        try:
            start = first * PIECE_BYTES
            end = min(self.size, (first + count) * PIECE_BYTES)
            found = self.members.get(before, start, end - start)
            if found is None or self._ended:
                return False
            try:
                self._copy(start, end, partial(_read_memory, found.fd, start))
            finally:
                os.close(found.fd)
            self.members.took(found.node, end - start)
            return True
        finally:
            with self._lock:
                self._shared.asked.difference_update(pieces)

    def _copy(
        self, start: int, end: int, read: Callable[[memoryview, int], int] | None = None
    ) -> None:
        """`read(buffer, offset)`: from elsewhere than the storage."""
        read = read or partial(self._source.lower.read, self._source.fd)
        whole = end - end % mmap.PAGESIZE
        if start < whole:
            with self._view[start:whole] as run:
                self._read_into(read, run, start)
        if whole < end:
            # the source may have become longer: nothing may lie behind the end of the tier file, in
            # its last page
            with memoryview(mmap.mmap(-1, mmap.PAGESIZE)) as page:
                first = max(start, whole)
                self._read_into(read, page, first, end - first)
                with self._touching:
                    if (
                        not self._ended
                    ):  # by a system call: on a tmpfs that is full, a touch would be a SIGBUS
                        os.pwrite(self._target_fd, page[: end - first], first)

    def _read_into(
        self,
        read: Callable[[memoryview, int], int],
        target: memoryview,
        offset: int,
        count: int = 0,
    ) -> None:
        """`count` bytes at least, else all of the target, a multiple of pages."""
        done = 0
        while done < (count or len(target)) and not self._ended:
            with target[done:] as rest:
                got = read(rest, offset + done)
            self.progress.moved(got)
            if not got:
                raise OSError(errno.ESTALE, "the file became shorter while it was read")
            done += got

    def _arrived(self, first: int, count: int) -> None:
        with self._lock:
            futures = [
                self._being_read.pop(piece)
                for piece in range(first, first + count)
                if piece in self._being_read
            ]
            if not self._ended:
                self._state[first : first + count] = bytes([_THERE]) * count
                self._there += count
            hashing = self._hashing
            self._hashing = True
        for future in futures:
            future.set_result(None)
        if not hashing:
            self._hash()

    def _hash(self) -> None:
        """Follow the first gap; one thread at a time, the others go on reading."""
        try:
            while True:
                with self._lock:
                    if (
                        self._ended
                        or self._hashed == self._count
                        or self._state[self._hashed] != _THERE
                    ):
                        self._hashing = False
                        break
                    start = self._hashed * PIECE_BYTES
                with (
                    self._touching,
                    self._view[start : min(start + PIECE_BYTES, self.size)] as piece,
                ):
                    if not self._ended:
                        self._hasher.update(piece)
                self._hashed += 1
            if not self._ended and self._hashed == self._count:
                self._finish()
        except OSError as error:
            self._fail(error)

    def _finish(self) -> None:
        self.note = self._source.lower.noted(self._source.fd)
        self.after = self._source.lower.stat_fd(self._source.fd)
        if self.before is not None:
            with contextlib.suppress(OSError):
                os.utime(self._target_fd, ns=(self.before.atime_ns, self.before.mtime_ns))
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.done.set_result(self._hasher.hexdigest())

    # -- the end

    def give_up(self) -> None:
        """Not wanted any more: who waits is told, what is being read is not waited for.

        The tier file may be cut off when this returns.
        """
        self.progress.give_up()
        self._fail(OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)))
        with self._touching:
            pass

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            futures = list(self._being_read.values())
            self._being_read.clear()
        for future in futures:
            future.set_result(None)  # they look again, and find that they must read for themselves
        self.done.set_exception(error)


def _read_memory(fd: int, start: int, buffer: memoryview, offset: int) -> int:
    """From a range that begins at `start`."""
    return os.preadv(fd, [buffer], offset - start)


@dataclass(slots=True, eq=False)
class Coming:
    """One file on its way: its bytes count when all have come and are what was stored.

    Until then no row names the tier file.
    """

    fill: Fill
    tier_id: TierId
    identity: tuple[int, int, int, int]
    """Of the file on the backing directory."""
    settled: Future[str] = field(default_factory=Future)
    """How it ended: verified, unknown (nothing was noted to compare with), mismatch, changed,
    failed, given up.
    """
    asked_for: bool = False
    """By name: it does not go when its last reader closes."""
    sound: bool = False
    """All of it has come, and was looked at: it is the file, and not known to be damaged."""
    gone: bool = False

    def __post_init__(self) -> None:
        # one impatient reader must not cancel it for the others
        self.settled.set_running_or_notify_cancel()


class Fills:
    """All files on their way, and the room that is reserved for them.

    Used under the file system's lock.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._all: dict[Coming, None] = {}
        tier.ladder.gives(Rung.COMING, self.give_way)
        self.lent = Lent()
        self.counts = WarmStatistics()

    def begun(self, coming: Coming) -> None:
        """Its room is reserved."""
        self._all[coming] = None
        self.counts.warming = len(self._all)

    def leave(self, coming: Coming) -> None:
        """It has ended, or the tier file becomes a content."""
        del self._all[coming]
        coming.gone = True
        self.counts.warming = len(self._all)
        self.lent.found_quiet(coming.tier_id)  # it was nobody's but ours so far
        coming.fill.unuse()

    def give_up(self, coming: Coming) -> None:
        """Nobody wants it any more."""
        self.leave(coming)
        self.counts.warming_given_up += 1
        coming.fill.give_up()  # first: it has the file mapped
        self.lent.spoil(coming.tier_id)
        self._tier.discard(coming.tier_id)
        self._tier.release(coming.fill.size)

    def give_way(self, wanted: int) -> int:
        """Somebody needs room: what is on its way goes, the youngest first; returns the bytes that
        came free.
        """
        freed = 0
        for coming in reversed(list(self._all)):
            if freed >= wanted:
                break
            if not coming.gone:
                freed += coming.fill.size
                self.give_up(coming)
        return freed
