"""A double of the kernel's passthrough lane: programs write the files in RAM themselves, and the
daemon sees none of it.

Outlives the lives of the daemon, as the kernel does. It knows what the kernel knows: which file it
was given for each of the mount's, who has it open, and two locks. The mount's inode has one
(`locked`): a write(2) has it until its last page has come, fsync and unlink have it until they are
answered, and whoever holds writers has it for as long as the daemon does not answer (`Holder`). Who
waits for it gets it in turn. The file in RAM has another: a write(2) has that, too (`is_written`),
and calls of the daemon that need it wait in the file's own thread. Of a write there is left what a
kernel leaves: bytes, which come page by page, the size, and the mtime, which is set before the
first byte.

Not doubled: pages that cannot be had (a full tmpfs), a write that its application holds up, and an
inode lock that somebody overtakes.
Everything but `died` is called by the main thread, or sees to it that `wake` is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from acpfs.filesystem.admission import Net
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.hold import Hold
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.types import HandleId, Ino, TierId
from tests.sim.storage import Inode, Storage
from tests.sim.trace import Finding, Trace
from tests.sim.virtual import FIRST_FD, MACHINE

PAGE_BYTES = 4096
WAIT_MAX_S = 600.0
"""Virtual time in which each write is let go on, where no storage hangs for good."""
PAUSES_S = (0.0, 0.0, 0.001, 0.005)
"""Between two writes."""
TURNS = (1, 10, 60)
"""Of others, between two pages of one write.

No time passes: as long as one is under way, a stream of the file is begun again and again.
"""


class Worker(Protocol):
    """A life, as far as it is asked."""

    fs: FileSystem

    @property
    def hold(self) -> Hold: ...

    @property
    def is_dead(self) -> bool: ...

    def look_soon(self) -> None:
        """Somebody has to look after writers, or to call `Passthrough.wake`."""
        ...


class GoneError(Exception):
    """The machine has ended, and with it whoever wrote."""


@dataclass(eq=False)
class _Turn:
    """One who has an inode's lock, or waits for it."""

    ino: Ino
    came: trio.Event | None = None
    """Of a program; None: whoever holds writers."""
    has_it: bool = False


@dataclass(eq=False)
class KernelFile:
    """What the kernel has of one file of the mount."""

    fd: int
    """Of the file in RAM; -1: it is the storage's."""
    stored: Inode | None
    handles: set[HandleId] = field(default_factory=set)
    writers: set[HandleId] = field(default_factory=set)
    is_written: bool = False


class Passthrough:
    """See above."""

    def __init__(self, storage: Storage, trace: Trace) -> None:
        self._storage = storage
        self._trace = trace
        self._worker: Worker | None = None
        self._files: dict[Ino, KernelFile] = {}
        self._locks: dict[Ino, deque[_Turn]] = {}
        self._news: deque[_Turn] = deque()
        """They have just got their lock, and do not know yet."""
        self._ended: deque[tuple[_Turn, bool]] = deque()
        """Holds that the daemon has ended; whether it wants the lock again."""
        self._boots = 0
        """How often the machine has ended."""
        self.holds = 0
        """How often writers were held."""
        self.written_bytes = 0

    # -- the daemon's life

    def serve(self, worker: Worker) -> None:
        """A daemon begins: locks that were kept from writers since the last one died are free."""
        self._worker = worker
        with worker.fs.lock:
            worker.fs.offer_lanes(Lane.DIRECT, passthrough=True)
            worker.fs.offer_holder(Holds(self, worker), Net.HOLDS)
        for turn in [turn for queue in self._locks.values() for turn in queue if turn.came is None]:
            self._leave(turn)
        self.wake()

    def died(self, source: Path, target: Path, *, all_processes: bool) -> None:
        """The daemon was killed: its RAM tier is at `target` from now on.

        The process that holds writers takes all locks, since it does not hear of the daemon any
        more.
        """
        self._worker = None
        self._ended.clear()
        if all_processes:
            self._boots += 1
            for file in self._files.values():
                _let_go(file)
            self._files.clear()
            return
        for ino, file in self._files.items():
            if file.fd >= 0:
                file.fd = _moved(file.fd, source, target)
                if file.writers:
                    self._come(_Turn(ino))

    def begin_anew(self) -> None:
        """After the end of the machine: who waited has ended with it."""
        for queue in self._locks.values():
            for turn in queue:
                if turn.came is not None:
                    turn.came.set()
        self._locks.clear()
        self._news.clear()

    # -- opening and closing

    def opened(self, ino: Ino, flags: int, opened: OpenFile) -> bool:
        """An answer to OPEN has come; whether the kernel serves that open file itself."""
        file = self._files.get(ino)
        is_served = opened.lane is Lane.PASSTHROUGH
        if file is None and not is_served:
            return False
        if file is None:
            file = self._files[ino] = self._new(opened.backing_fd)
        elif is_served and not self._is_same(file, opened.backing_fd):
            raise Finding("LANE", f"node {ino} is to have another file in the kernel: EIO")
        file.handles.add(opened.handle)
        if is_served and flags & os.O_ACCMODE != os.O_RDONLY:
            file.writers.add(opened.handle)
        return is_served

    def _new(self, fd: int) -> KernelFile:
        if fd >= FIRST_FD:
            return KernelFile(-1, self._storage.descriptors[fd])
        return KernelFile(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), None)

    def _is_same(self, file: KernelFile, fd: int) -> bool:
        if fd >= FIRST_FD:
            return file.stored is self._storage.descriptors[fd]
        return file.fd >= 0 and os.path.sameopenfile(file.fd, fd)

    def released(self, ino: Ino, handle: HandleId) -> None:
        """RELEASE was answered."""
        file = self._files.get(ino)
        if file is None or handle not in file.handles:
            return
        file.handles.discard(handle)
        file.writers.discard(handle)
        if not file.handles:
            _let_go(self._files.pop(ino))

    # -- what programs do

    @contextlib.asynccontextmanager
    async def locked(self, ino: Ino) -> AsyncIterator[None]:
        """Whoever does this has the inode's lock, where the kernel serves the file."""
        if ino not in self._files:
            yield
            return
        boots = self._boots
        turn = _Turn(ino, trio.Event())
        self._come(turn)
        self.wake()
        assert turn.came is not None
        with trio.move_on_after(WAIT_MAX_S):
            await turn.came.wait()
        if boots != self._boots:
            raise GoneError
        if not turn.has_it:
            raise Finding("LIVENESS", f"a writer is held for {WAIT_MAX_S:.0f} s: {self._held(ino)}")
        try:
            yield
        finally:
            if boots == self._boots:
                self._leave(turn)
                self.wake()

    def _held(self, ino: Ino) -> str:
        if self._worker is None:
            return "no daemon"
        reports = self._worker.hold.statistics()
        return next((one.reason for one in reports if one.ino == ino), "nobody knows why")

    async def write(self, ino: Ino, at: int, data: bytes, chance: random.Random) -> None:
        """One write(2)."""
        async with self.locked(ino):
            boots = self._boots
            file = self._files[ino]
            self._trace.note("kernel", "writes", (ino, at, len(data)))
            set_ns = MACHINE.wall_ns()
            os.utime(file.fd, ns=(set_ns, set_ns))
            file.is_written = True
            for start, end in _pieces(at, len(data), chance):
                _put(file.fd, at + start, data[start:end], set_ns)
                self.written_bytes += end - start
                for _turn in range(chance.choice(TURNS) if end < len(data) else 0):
                    await trio.lowlevel.checkpoint()
                if boots != self._boots:
                    raise GoneError
            file.is_written = False
            if self._worker is not None:
                self._worker.look_soon()
        await trio.sleep(chance.choice(PAUSES_S))

    def read(self, ino: Ino) -> bytes:
        """All of it, as a reader in the lane sees it."""
        file = self._files[ino]
        if file.stored is not None:
            return file.stored.as_bytes()
        return os.pread(file.fd, os.fstat(file.fd).st_size, 0)

    def is_written(self, tier_id: TierId) -> bool:
        """Whether a write(2) has the lock of that file in RAM."""
        return any(
            file.is_written and os.readlink(f"/proc/self/fd/{file.fd}").endswith(f"/data/{tier_id}")
            for file in self._files.values()
        )

    # -- locks

    def _come(self, turn: _Turn) -> None:
        queue = self._locks.setdefault(turn.ino, deque())
        queue.append(turn)
        if queue[0] is turn:
            self._hand(turn)

    def _hand(self, turn: _Turn) -> None:
        turn.has_it = True
        self._news.append(turn)

    def _leave(self, turn: _Turn) -> None:
        queue = self._locks[turn.ino]
        queue.remove(turn)
        if turn in self._news:
            self._news.remove(turn)
        if not queue:
            del self._locks[turn.ino]
        elif not queue[0].has_it:
            self._hand(queue[0])

    def take(self, ino: Ino) -> None:
        """The daemon wants its writers held."""
        self._come(_Turn(ino))

    @property
    def has_news(self) -> bool:
        """Whether `wake` has something to do."""
        return bool(self._news or self._ended)

    def wake(self) -> None:
        """Tell who has got a lock."""
        while self.has_news:
            while self._ended:
                turn, again = self._ended.popleft()
                self._trace.note("kernel", "lets writers go on", (turn.ino, int(again)))
                self._leave(turn)
                if again:
                    self._come(_Turn(turn.ino))
            while self._news:
                turn = self._news.popleft()
                if turn.came is not None:
                    turn.came.set()
                else:
                    self._hold(turn)

    def _hold(self, turn: _Turn) -> None:
        """Whoever holds writers has the lock; the daemon says how long."""
        worker = self._worker
        if worker is None or worker.is_dead:
            return  # until the next one serves
        with worker.fs.lock:
            until = worker.hold.taken(turn.ino)
        if until is None:
            self._leave(turn)
            return
        self.holds += 1
        self._trace.note("kernel", "holds writers", (turn.ino,))
        until.add_done_callback(partial(self._let_go, worker, turn))

    def _let_go(self, worker: Worker, turn: _Turn, until: Future[bool]) -> None:
        if worker is self._worker and not worker.is_dead:
            self._ended.append((turn, until.result()))
            worker.look_soon()


class Holds:
    """What the daemon knows of who takes locks."""

    def __init__(self, kernel: Passthrough, worker: Worker) -> None:
        self._kernel = kernel
        self._worker = worker

    def take(self, ino: Ino) -> None:
        """See `acpfs.filesystem.hold.Holder`."""
        self._kernel.take(ino)
        self._worker.look_soon()

    def look_soon(self) -> None:
        """See `acpfs.filesystem.hold.Holder`."""
        self._worker.look_soon()


def _let_go(file: KernelFile) -> None:
    if file.fd >= 0:
        os.close(file.fd)


def _put(fd: int, at: int, data: bytes, set_ns: int) -> None:
    """Bytes of a write that has set the time before."""
    os.pwrite(fd, data, at)
    os.utime(fd, ns=(set_ns, set_ns))


def _pieces(at: int, size: int, chance: random.Random) -> list[tuple[int, int]]:
    """As which a write's pages come."""
    if size <= PAGE_BYTES or chance.random() < 0.5:
        return [(0, size)]
    end = at + size
    cuts = {chance.randrange(at, end) // PAGE_BYTES * PAGE_BYTES for _cut in range(2)}
    places = [0, *sorted(cut - at for cut in cuts if at < cut < end), size]
    return list(itertools.pairwise(places))


def _moved(fd: int, source: Path, target: Path) -> int:
    """The same file in the copy of the RAM tier; one that had no name there any more stays."""
    place = Path(os.readlink(f"/proc/self/fd/{fd}"))
    if not place.is_relative_to(source) or not (target / place.relative_to(source)).exists():
        return fd
    moved = os.open(target / place.relative_to(source), os.O_RDWR | os.O_CLOEXEC)
    os.close(fd)
    return moved
