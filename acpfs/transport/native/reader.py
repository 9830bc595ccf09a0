"""Reader threads: each takes requests from its own clone of the session's descriptor, handles them,
and takes the next.

Owns the threads and their buffers. Short calls are all handled by the thread whose turn it is: the
interpreter runs one of them at a time anyway, and the kernel would wake another sleeping thread for
each (create + write + close of 4 KiB with 1, 2 and 3 threads that all read: 260, 263, 342 us, and
420 to 680 us of processor time). Only a request that moves many bytes gives the turn away first, so
that the copies run on several cores, and a write to the storage, which may keep its thread waiting
for ever: as many threads may wait so as leave enough others, and further ones hand such writes to a
pool. Threads end when the mount ends (ENODEV); a process that wants to leave a living session
simply exits, the kernel resends what was under way to the next worker.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable

from acpfs.errors import wanted
from acpfs.logger import get_logger
from acpfs.runtime.threads import THREADS, Running
from acpfs.transport.native.dispatch import Dispatch
from acpfs.transport.native.protocol import IN_HEADER, READ_IN, Opcode
from acpfs.transport.native.request import UNIQUE_WORD, RequestBuffers
from acpfs.types import Ino

READERS_MIN = 2
READERS_MAX = 8
PATIENCE = 20
"""Tries, of about 2 us each, to read the next request before sleeping until there is one.

An application that creates, writes and closes sends it that soon, and waking a thread takes longer:
a small file took 230 us without, 188 us with this, and less processor time.
"""

NEEDED = 2
"""So many threads the storage never holds up, where there are more than two: one to read, one to
copy bytes.
"""

BULK_BYTES_MIN = 32 << 10
"""From here on bytes are worth another thread: copying them takes as long as waking it, about 10
us.
"""

log = get_logger(__name__)

_READ = int(Opcode.READ)
_AGAIN = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOENT})
"""ENOENT: the request was interrupted before it could be read."""
_END = frozenset({errno.ENODEV, errno.ECONNABORTED, errno.EBADF})


def reader_count() -> int:
    """Threads that are worth having: one per core and one to spare, within bounds."""
    return max(READERS_MIN, min(READERS_MAX, len(os.sched_getaffinity(0)) + 1))


def is_bulk_read(header: memoryview) -> bool:
    """Whether it is a READ of many bytes."""
    return header[4] == _READ and READ_IN.unpack_from(header, IN_HEADER.size)[2] >= BULK_BYTES_MIN


class _Seat:
    """Of a reader thread that has given the turn away."""

    __slots__ = ("_readers", "header", "number")

    def __init__(self, readers: Readers, number: int) -> None:
        self._readers = readers
        self.number = number
        self.header = memoryview(b"")
        """Of the request that it serves."""

    def hold(self) -> bool:
        return self._readers.hold(self)

    def go_on(self) -> None:
        self._readers.go_on(self)


class Readers:
    """The reader threads of a session."""

    def __init__(
        self,
        dispatch: Dispatch,
        fds: list[int],
        payload_bytes: int,
        ended: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`fds`: one per thread; `ended`: called once, from the last thread, when the mount has
        ended.

        `failed`: one ends for want of a resource of the machine.
        """
        self._dispatch = dispatch
        self._payload_bytes = payload_bytes
        self._ended = ended
        self._failed = failed
        self._left = len(fds)
        self._serving = 0
        """Threads that there are."""
        self.held: dict[int, tuple[str, Ino, int, float]] = {}
        """Number of a thread that waits for the storage, or is about to → (call, inode, process,
        monotonic time since when).
        """
        self._has_told_end = False
        self.current = [0] * len(fds)
        """Per thread: the kernel's number of the request that it serves; 0: it waits for one, or
        for the storage.
        """
        self.identities = [0] * len(fds)
        """Per thread: Python's number of it."""
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held by the thread that reads requests."""
        self._fds = fds
        self._threads: list[Running] = []

    def start(self) -> None:
        """Begin to serve, with as many threads as the machine has; others join in when it has
        more.
        """
        for number, fd in enumerate(self._fds):
            self._threads.append(THREADS.start(f"fuse-{fd}", self._run, fd, number))

    def join(self, timeout_s: float) -> bool:
        """Wait until the mount has ended and every thread with it."""
        return all(thread.join(timeout_s) for thread in self._threads)

    def _run(self, fd: int, number: int) -> None:
        self.identities[number] = threading.get_ident()
        gone = 1
        with self._lock:
            self._serving += 1
        try:
            self._serve(fd, number)
            # Who lacks a thread would find the same end, which must not wait until the machine has
            # one for it.
            gone += sum(thread.withdraw() for thread in list(self._threads))
        except BaseException as error:
            log.exception("a reader thread died")
            if wanted(error):
                self._failed(error)  # what it has read is answered by the next worker, or never
        with self._lock:
            self._left -= gone
            self._serving -= 1
        self._tell_end()

    def _tell_end(self) -> None:
        """Once all are gone but those that the storage holds up, which would keep a mount that has
        ended for ever.
        """
        with self._lock:
            if self._has_told_end or self._left > len(self.held):
                return
            self._has_told_end = True
        self._ended()

    def _serve(self, fd: int, number: int) -> None:
        handle = self._dispatch.handle
        buffers = RequestBuffers(self._payload_bytes)
        seat = _Seat(self, number)
        while True:
            with self._turn:
                length = self._serve_small(fd, number, buffers)
            if not length:
                return
            self.current[number] = buffers.words[UNIQUE_WORD]
            if self._dispatch.waits_for_storage(buffers.header):
                seat.header = buffers.header
                keeps = self._handle_spare(seat, fd, buffers, length)
            else:
                keeps = handle(fd, buffers, length)
            if keeps:
                buffers.renew()
            self.current[number] = 0

    # -- writes to the storage

    def _handle_spare(self, seat: _Seat, fd: int, buffers: RequestBuffers, length: int) -> bool:
        self._dispatch.spare.take(seat)
        try:
            return self._dispatch.handle(fd, buffers, length)
        finally:
            self._dispatch.spare.leave()

    def hold(self, seat: _Seat) -> bool:
        """Whether the storage may hold up this thread as well: enough others are left that it does
        not.

        For who looks for threads that hang in acpfs it is one that waits, and `status` says for
        whom.
        """
        _length, opcode, _unique, ino, _uid, _gid, pid, *_rest = IN_HEADER.unpack_from(seat.header)
        call = Opcode(opcode).name.lower(), Ino(ino), pid, time.monotonic()
        with self._lock:
            if len(self.held) >= min(self._serving - 1, max(1, self._serving - NEEDED)):
                return False
            self.held[seat.number] = call
        self.current[seat.number] = 0
        if self._left < len(self.current):  # the mount has ended for others
            self._tell_end()
        return True

    def go_on(self, seat: _Seat) -> None:
        """The storage has answered, or was not asked."""
        with self._lock:
            if self.held.pop(seat.number, None) is None:
                return
        self.current[seat.number] = IN_HEADER.unpack_from(seat.header)[2]

    def waiting(self) -> list[tuple[str, Ino, int, float]]:
        """(call, inode, process, monotonic time since when) of those that wait for the storage."""
        with self._lock:
            return list(self.held.values())

    # -- the turn

    def _serve_small(self, fd: int, number: int, buffers: RequestBuffers) -> int:
        """Handle requests until one comes that moves many bytes: its length; 0 when the mount has
        ended.
        """
        readv = os.readv
        handle = self._dispatch.handle
        vector = buffers.vector
        waits_for_storage = self._dispatch.waits_for_storage
        current = self.current
        words = buffers.words
        os.set_blocking(fd, False)
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        patience = 0
        while True:
            try:
                length = readv(fd, vector)
            except BlockingIOError:
                patience -= 1
                if patience < 0:
                    waiting.poll()
                continue
            except OSError as error:
                if error.errno in _AGAIN:
                    continue
                if error.errno in _END:
                    return 0
                raise
            if not length or length >= BULK_BYTES_MIN or is_bulk_read(buffers.header):
                return length
            if waits_for_storage(buffers.header):
                return length
            current[number] = words[UNIQUE_WORD]
            if handle(fd, buffers, length):
                buffers.renew()
                vector = buffers.vector
                words = buffers.words
            current[number] = 0
            patience = PATIENCE
