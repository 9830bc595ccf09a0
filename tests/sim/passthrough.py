"""A double of the kernel's passthrough lane: programs write the files in RAM themselves, and the
daemon sees none of it.

Outlives the lives of the daemon, as the kernel does. It knows what the kernel knows: which file it
was given for each of the mount's, who has it open, and two locks. The mount's inode has one
(`locked`): a write(2) has it until its last page has come, fsync and unlink have it until they are
answered, and whoever holds writers has it for as long as the daemon does not answer (`Holder`). Who
waits for it gets it in turn. The file in RAM has another: a write(2) has that, too (`is_written`),
and calls of the daemon that need it wait in the file's own thread. Of a write there is left what a
kernel leaves: bytes, which come page by page, the size, and the mtime, which is set before the
first byte. An application may hold a write up between two pages. A shared mapping is a real one: it
keeps the file in RAM open, not the mount's, and what is stored through it leaves no trace.

Who has a file open to write, or mapped, as a session ends writes on to the same file in RAM
(`DeadWriter`): the next session does not know of him.

Not doubled: an inode lock that somebody overtakes.
Everything but `died` is called by the main thread, or sees to it that `wake` is.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
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
from acpfs.ram.tier import set_mtime
from acpfs.types import HandleId, Ino, TierId
from tests.sim.storage import Inode, Storage
from tests.sim.trace import Finding, Trace
from tests.sim.virtual import FIRST_FD, MACHINE

PAGE_BYTES = 4096
PAUSES_S = (0.0, 0.0, 0.001, 0.005)
"""Between two writes."""
HELD_UP = 0.02
"""Share of writes that their application holds up after their first page."""
HELD_UP_S = (0.05, 0.5, 2.0)
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
    """Of the file in RAM, to read alone; -1: it is the storage's."""
    stored: Inode | None
    handles: set[HandleId] = field(default_factory=set)
    writers: set[HandleId] = field(default_factory=set)
    writing_fd: int = -1
    """As long as there are writers."""
    is_written: bool = False


class Mapping:
    """A shared mapping of a file in RAM, which can be written to."""

    def __init__(self, ino: Ino, fd: int) -> None:
        """`fd`: of the file, to write; the mapping has its own."""
        self.ino = ino
        self.fd = os.dup(fd)
        self._memory = mmap.mmap(self.fd, os.fstat(self.fd).st_size)

    @property
    def size(self) -> int:
        """What is mapped, bytes."""
        return len(self._memory)

    def store(self, at: int, data: bytes) -> None:
        """Nobody hears of it."""
        if os.fstat(self.fd).st_size < at + len(data):
            raise Finding("LANE", f"node {self.ino} was cut in RAM while it is mapped: SIGBUS")
        self._memory[at : at + len(data)] = data

    def move(self, source: Path, target: Path) -> None:
        """Its file is in another directory from now on."""
        self.fd = _moved(self.fd, source, target)
        size = len(self._memory)
        self._memory.close()
        self._memory = mmap.mmap(self.fd, size)

    def end(self) -> None:
        """munmap."""
        self._memory.close()
        os.close(self.fd)


@dataclass(eq=False)
class DeadWriter:
    """Somebody whose session is over: his writes go to the file in RAM, and nobody hears of them.

    His other calls fail.
    """

    fd: int
    mapping: Mapping | None
    is_written: bool = False

    @property
    def tier_id(self) -> TierId:
        """Of the file that he writes; 0: it has no name any more."""
        name = os.path.basename(os.readlink(f"/proc/self/fd/{self.fd}"))
        return TierId(int(name)) if name.isdigit() else TierId(0)

    def move(self, source: Path, target: Path) -> None:
        """Its file is in another directory from now on."""
        self.fd = _moved(self.fd, source, target)
        if self.mapping is not None:
            self.mapping.move(source, target)

    def end(self) -> None:
        """He lets go of it."""
        os.close(self.fd)
        if self.mapping is not None:
            self.mapping.end()


class Passthrough:
    """See above."""

    def __init__(self, storage: Storage, trace: Trace, wait_max_s: float) -> None:
        """`wait_max_s`: virtual time in which each write is let go on."""
        self._wait_max_s = wait_max_s
        self._storage = storage
        self._trace = trace
        self._worker: Worker | None = None
        self._files: dict[Ino, KernelFile] = {}
        self._locks: dict[Ino, deque[_Turn]] = {}
        self._news: deque[_Turn] = deque()
        """They have just got their lock, and do not know yet."""
        self._ended: deque[tuple[_Turn, bool]] = deque()
        """Holds that the daemon has ended; whether it wants the lock again."""
        self._mappings: list[Mapping] = []
        self._dead: list[DeadWriter] = []
        self.left: dict[Ino, DeadWriter] = {}
        """Those whom the end of the last session has left."""
        self._boots = 0
        """How often the machine has ended."""
        self.holds = 0
        """How often writers were held."""
        self.held_up = 0
        self.writes_for_nobody = 0
        self.mappings = 0
        self.ended_with_mapping = 0
        """Of writes, of mappings, and of open files that were kept for one: how many there were."""
        self.written_bytes = 0

    # -- the daemon's life

    def serve(self, worker: Worker) -> None:
        """A daemon begins: locks that were kept from writers since the last one died are free."""
        self._worker = worker
        with worker.fs.lock:
            worker.fs.offer_lanes(Lane.DIRECT, passthrough=True)
            worker.fs.offer_holder(Holds(self, worker), Net.HOLDS)
            worker.fs.watch_forgotten(self._forgotten)
        for turn in [turn for queue in self._locks.values() for turn in queue if turn.came is None]:
            self._leave(turn)
        self.wake()

    def died(self, source: Path, target: Path, *, ends_session: bool, leaves_writers: bool) -> None:
        """The daemon was killed: its RAM tier is at `target` from now on.

        The process that holds writers takes all locks, since it does not hear of the daemon any
        more. `leaves_writers`: as the session ends, its programs live on (`left`).
        """
        self._worker = None
        self._ended.clear()
        for dead in self._dead:
            dead.move(source, target)
        for mapping in self._mappings:
            mapping.move(source, target)
        for ino, file in self._files.items():
            if file.fd >= 0:
                file.fd = _moved(file.fd, source, target)
            if file.writing_fd >= 0:
                file.writing_fd = _moved(file.writing_fd, source, target)
            if file.writers and not ends_session:
                self._come(_Turn(ino))
        if ends_session:
            self._boots += 1
            self._end_session(leaves_writers=leaves_writers)

    def _end_session(self, *, leaves_writers: bool) -> None:
        mapped = {mapping.ino: mapping for mapping in self._mappings}
        for ino, file in self._files.items():
            mapping = mapped.get(ino)
            fd = file.writing_fd if mapping is None else mapping.fd
            if leaves_writers and fd >= 0:
                dead = DeadWriter(os.dup(fd), mapped.pop(ino, None))
                self._dead.append(dead)
                self.left[ino] = dead
            _let_go(file)
        for mapping in mapped.values():
            mapping.end()
        self._mappings.clear()
        self._files.clear()

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
            file = self._new(opened.backing_fd)
            self._files[ino] = file
        elif is_served and not self._is_same(file, opened.backing_fd):
            raise Finding("LANE", f"node {ino} is to have another file in the kernel: EIO")
        file.handles.add(opened.handle)
        if is_served and flags & os.O_ACCMODE != os.O_RDONLY:
            file.writers.add(opened.handle)
            if file.writing_fd < 0:
                file.writing_fd = _reopened(file.fd, os.O_RDWR)
        return is_served

    def _new(self, fd: int) -> KernelFile:
        if fd >= FIRST_FD:
            return KernelFile(-1, self._storage.descriptors[fd])
        return KernelFile(_reopened(fd, os.O_RDONLY), None)

    def _is_same(self, file: KernelFile, fd: int) -> bool:
        if fd >= FIRST_FD:
            return file.stored is self._storage.descriptors[fd]
        return file.fd >= 0 and os.path.sameopenfile(file.fd, fd)

    def released(self, ino: Ino, handle: HandleId) -> None:
        """RELEASE was answered."""
        file = self._files.get(ino)
        if file is None or handle not in file.handles:
            return
        self.left_by(ino, handle)
        file.handles.discard(handle)
        if not file.handles:
            _let_go(self._files.pop(ino))

    def left_by(self, ino: Ino, handle: HandleId) -> bool:
        """The last descriptor of an open file is gone, and RELEASE is on its way.

        Whether the kernel serves the file.
        """
        file = self._files.get(ino)
        if file is None or handle not in file.handles:
            return False
        file.writers.discard(handle)
        if not file.writers and file.writing_fd >= 0:
            os.close(file.writing_fd)
            file.writing_fd = -1
        return True

    def _forgotten(self, handle: HandleId) -> None:
        """The daemon gives up an open file without RELEASE."""
        for ino in [ino for ino, file in self._files.items() if handle in file.handles]:
            self.ended_with_mapping += 1
            self.released(ino, handle)

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
        with trio.move_on_after(self._wait_max_s):
            await turn.came.wait()
        if boots != self._boots:
            raise GoneError
        if not turn.has_it:
            raise Finding(
                "LIVENESS", f"a writer is held for {self._wait_max_s:.0f} s: {self._held(ino)}"
            )
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
            set_mtime(file.writing_fd, set_ns)
            file.is_written = True
            held_up_s = chance.choice(HELD_UP_S) if chance.random() < HELD_UP else 0.0
            for start, end in _pieces(at, len(data), chance):
                _put(file.writing_fd, at + start, data[start:end], set_ns)
                self.written_bytes += end - start
                if end < len(data):
                    await self._hold_up(held_up_s, chance)
                    held_up_s = 0.0
                if boots != self._boots:
                    raise GoneError
            file.is_written = False
        await trio.sleep(chance.choice(PAUSES_S))

    async def _hold_up(self, seconds: float, chance: random.Random) -> None:
        if seconds:
            self._trace.note("kernel", "is held up in a write", (), f"{seconds} s")
            self.held_up += 1
            await trio.sleep(seconds)
        for _turn in range(chance.choice(TURNS)):
            await trio.lowlevel.checkpoint()

    # -- mappings

    def map(self, ino: Ino) -> Mapping:
        """All of a file that somebody has open to read and write."""
        mapping = Mapping(ino, self._files[ino].writing_fd)
        self._mappings.append(mapping)
        self.mappings += 1
        return mapping

    def unmap(self, mapping: Mapping) -> None:
        """Also where its machine has ended."""
        if mapping in self._mappings:
            self._mappings.remove(mapping)
            mapping.end()

    # -- whose session is over

    async def write_on(self, dead: DeadWriter, at: int, data: bytes, chance: random.Random) -> None:
        """One write(2), or a store through a mapping."""
        self._trace.note("kernel", "writes for nobody", (dead.tier_id, at, len(data)))
        self.writes_for_nobody += 1
        if dead.mapping is not None and at + len(data) <= dead.mapping.size:
            dead.mapping.store(at, data)
            return
        set_ns = MACHINE.wall_ns()
        set_mtime(dead.fd, set_ns)
        dead.is_written = True
        for start, end in _pieces(at, len(data), chance):
            _put(dead.fd, at + start, data[start:end], set_ns)
            for _turn in range(chance.choice(TURNS) if end < len(data) else 0):
                await trio.lowlevel.checkpoint()
        dead.is_written = False

    def end(self, dead: DeadWriter) -> None:
        """He lets go of it."""
        self._dead.remove(dead)
        dead.end()

    def end_all(self) -> None:
        """Nobody has anything open."""
        self._end_session(leaves_writers=False)
        while self._dead:
            self._dead.pop().end()

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
        ) or any(dead.is_written and dead.tier_id == tier_id for dead in self._dead)

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
    for fd in (file.fd, file.writing_fd):
        if fd >= 0:
            os.close(fd)


def _reopened(fd: int, access: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


def _put(fd: int, at: int, data: bytes, set_ns: int) -> None:
    """Bytes of a write that has set the time before."""
    os.pwrite(fd, data, at)
    set_mtime(fd, set_ns)


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
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    moved = os.open(target / place.relative_to(source), access | os.O_CLOEXEC)
    os.close(fd)
    return moved
