"""Memory that bytes lie in on their way to a holder: files without a name that another process can
send from, by their descriptors.

Large ones are on a tmpfs with large pages, where there is one: the kernel reads and sends those in
half the time. They are in nobody's budget, so they go with the file that was copied, as a seed
does; a few small ones are kept. Thread-safe.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SMALL_BYTES = 64 << 10
"""Small files come in large numbers."""
IDLE_MAX = 4
"""So many are kept."""
LARGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class CopyBuffer:
    """One; whoever has it owns it."""

    fd: int
    memory: mmap.mmap

    def close(self) -> None:
        """Nobody needs it."""
        with suppress(BufferError):  # a piece of it is somebody's still: it goes with that
            self.memory.close()
        os.close(self.fd)


class CopyBuffers:
    """Of one place of copies."""

    def __init__(self, scratch: Path) -> None:
        """`scratch`: a directory of a tmpfs."""
        self._scratch = scratch
        self._idle: deque[CopyBuffer] = deque()

    def take(self, size: int) -> CopyBuffer:
        """A buffer for so many bytes, with whatever was in it."""
        if size <= SMALL_BYTES:
            with suppress(IndexError):
                return self._idle.pop()
            return _mapped(_memory(), SMALL_BYTES)
        whole_pages = -(-size // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        try:
            fd = os.open(self._scratch, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            return _mapped(fd, whole_pages)
        except OSError:  # it is full, or is no tmpfs
            return _mapped(_memory(), whole_pages)

    def give_back(self, buffer: CopyBuffer) -> None:
        """Nobody sends from it any more: all that was sent has been answered."""
        if len(buffer.memory) <= SMALL_BYTES and len(self._idle) < IDLE_MAX:
            self._idle.append(buffer)
        else:
            buffer.close()


def _memory() -> int:
    return os.memfd_create("acpfs-copy", os.MFD_CLOEXEC)


def _mapped(fd: int, size: int) -> CopyBuffer:
    """All of it is there at once: who touches what a full tmpfs has not got is killed."""
    try:
        os.posix_fallocate(fd, 0, size)
        return CopyBuffer(fd, mmap.mmap(fd, size))
    except BaseException:
        os.close(fd)
        raise
