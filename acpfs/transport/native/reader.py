"""Reader threads: each takes requests from its own clone of the session's descriptor, handles them, and takes the next.

Owns the threads and their buffers. Reading blocks in the kernel with the GIL released; several threads let the copies of file bytes
(readv, pwrite, writev) run at the same time on several cores, while short calls take turns anyway. Threads end when the mount
ends (ENODEV); a process that wants to leave a living session simply exits, the kernel resends what was under way to the next worker.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import structlog

from acpfs.transport.native.dispatch import Dispatch
from acpfs.transport.native.request import RequestBuffers

READERS_MIN, READERS_MAX = 2, 8

log = structlog.get_logger(__name__)

_AGAIN = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOENT})
"""ENOENT: the request was interrupted before it could be read."""
_END = frozenset({errno.ENODEV, errno.ECONNABORTED, errno.EBADF})


def reader_count() -> int:
    """Threads that are worth having: one per core and one to spare, within bounds."""
    return max(READERS_MIN, min(READERS_MAX, len(os.sched_getaffinity(0)) + 1))


class Readers:
    """The reader threads of a session."""

    def __init__(self, dispatch: Dispatch, fds: list[int], payload_bytes: int, ended: Callable[[], None]) -> None:
        """`fds`: one per thread; `ended`: called once, from the last thread, when the mount has ended."""
        self._dispatch = dispatch
        self._payload_bytes = payload_bytes
        self._ended = ended
        self._left = len(fds)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(fd,), name=f"fuse-{fd}", daemon=True) for fd in fds]

    def start(self) -> None:
        """Begin to serve."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the mount has ended and every thread with it."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, fd: int) -> None:
        try:
            self._serve(fd)
        except BaseException:
            log.exception("a reader thread died")
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._ended()

    def _serve(self, fd: int) -> None:
        readv, handle = os.readv, self._dispatch.handle
        buffers = RequestBuffers(self._payload_bytes)
        vector = buffers.vector
        while True:
            try:
                length = readv(fd, vector)
            except OSError as error:
                if error.errno in _AGAIN:
                    continue
                if error.errno in _END:
                    return
                raise
            if handle(fd, buffers, length):
                buffers = RequestBuffers(self._payload_bytes)
                vector = buffers.vector
