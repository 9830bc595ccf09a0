"""Tells the kernel what others changed in the backing directory, so that it does not go on showing
what it has cached.

Owns a thread for that and a queue before it: the kernel takes locks that requests under way may
hold, so whoever serves requests, or holds the file system's lock, only puts something into the
queue. Knows no kernel interface (the transport hands two functions in) and loses nothing but time
when something is dropped: what the kernel caches has its timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from acpfs.filesystem.filesystem import FileSystem
from acpfs.logger import get_logger
from acpfs.runtime.threads import THREADS, Running
from acpfs.types import Ino

PENDING_MAX = 10_000
"""A whole tree that was exchanged underneath comes here entry by entry; beyond this, the timeouts
have to do.
"""

log = get_logger(__name__)


class Invalidations:
    """Hands on what changed underneath."""

    def __init__(
        self, fs: FileSystem, inode: Callable[[Ino], None], entry: Callable[[Ino, bytes, Ino], None]
    ) -> None:
        """`inode`: forget attributes and cached bytes of a node; `entry`: a name (parent, name,
        node) is gone.
        """
        self._inode = inode
        self._entry = entry
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Running | None = None
        self.told = 0
        fs.watch_outside(self.changed, self.lost)

    def start(self) -> None:
        """Begin."""
        self._thread = THREADS.start("fuse-invalidate", self._run)

    def stop(self, timeout_s: float) -> None:
        """End, after what is queued; does not insist when the kernel does not answer."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.end(timeout_s)

    def changed(self, ino: Ino) -> None:
        """Content or attributes of a node are other ones on the backing directory. Never blocks."""
        self._put(lambda: self._inode(ino))

    def lost(self, parent: Ino, name: bytes, ino: Ino) -> None:
        """A name is gone from the backing directory. Never blocks."""
        self._put(lambda: self._entry(parent, name, ino))

    def _put(self, tell: Callable[[], None]) -> None:
        if self._queue.qsize() < PENDING_MAX:
            self._queue.put(tell)

    def _run(self) -> None:
        while (tell := self._queue.get()) is not None:
            try:
                tell()
                self.told += 1
            except OSError as error:  # the mount has ended, or the entry is in use
                log.debug("the kernel did not take a notification", error=str(error))
