"""Memory for bytes on their way between members, used again and again."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Iterator

BUFFERS_MAX = 2
"""So many are kept while nothing is on its way."""


class PieceBuffers:
    """Of one size. What was used a moment ago is warm, and new memory costs as much as the bytes.
    Thread-safe.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._idle: deque[mmap.mmap] = deque(maxlen=BUFFERS_MAX)

    @contextlib.contextmanager
    def lent(self) -> Iterator[mmap.mmap]:
        """One, with whatever was in it, for as long as the block takes."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = _memory(self._size)
        try:
            yield buffer
        finally:
            self._idle.append(buffer)


def _memory(size: int) -> mmap.mmap:
    """In large pages, where there are any: they are found sooner, byte for byte."""
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
