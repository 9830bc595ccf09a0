"""Records of fixed size in a mapped file: what changes with every open and every lookup, and must
outlive the worker process.

A row of the state database costs 4 µs and more; storing a few words in a mapping costs a few
hundred nanoseconds, and a mapping of a file outlives kill -9 just as well. A record is used when
its first word is 1, which is written last and cleared first, so a record that is there is whole; of
a used record only single words are changed. Not thread-safe: every owner has its own lock.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from itertools import compress, count
from operator import not_
from pathlib import Path

WORD_BYTES = 8
FIRST_SLOTS = 256
NO_SLOT = -1
"""Of what has no record."""


class Slots:
    """A table of records of `words` unsigned 64-bit numbers."""

    def __init__(self, path: Path | None, words: int) -> None:
        """Map the file, with what an earlier process left in it. None: memory of this process
        only.
        """
        self._words = words
        self._stride = words + 1
        self._fd = (
            -1
            if path is None
            else os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        )
        found = 0 if path is None else os.fstat(self._fd).st_size // (self._stride * WORD_BYTES)
        self._view = self._map(max(found, FIRST_SLOTS))
        self._free = list(compress(count(), map(not_, self._column(0))))[::-1]

    def _map(self, slots: int) -> memoryview:
        size = slots * self._stride * WORD_BYTES
        if self._fd < 0:
            return memoryview(bytearray(size)).cast("Q")
        # on a full tmpfs an error here, where a page that is missing later ends the worker by
        # SIGBUS
        os.posix_fallocate(self._fd, 0, size)
        return memoryview(mmap.mmap(self._fd, size)).cast("Q")

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(slot, words) of every record that is used now.

        Column by column: a next worker waits for 100,000 of them.
        """
        used, *columns = (self._column(number) for number in range(self._stride))
        return zip(compress(count(), used), compress(zip(*columns, strict=True), used), strict=True)

    def by_first_word(self) -> dict[int, int]:
        """The slots of the records that are used now, by the first word of each."""
        return dict(compress(zip(self._column(1), count(), strict=False), self._column(0)))

    def _column(self, number: int) -> list[int]:
        """0: whether records are used; then their words."""
        return self._view[number :: self._stride].tolist()

    def __len__(self) -> int:
        """How many records are used."""
        return len(self._view) // self._stride - len(self._free)

    def add(self, *values: int) -> int:
        """A new record; returns its slot."""
        assert len(values) == self._words, values
        if not self._free:
            self._grow()
        slot = self._free.pop()
        start = slot * self._stride
        view = self._view
        for position, value in enumerate(values, start + 1):
            view[position] = value
        view[start] = 1
        return slot

    def record(self, slot: int) -> memoryview:
        """The words of a record, to be looked at and changed one by one; until the next `add`."""
        start = slot * self._stride + 1
        return self._view[start : start + self._words]

    def free(self, slot: int) -> None:
        """The record is not needed any more."""
        self._view[slot * self._stride] = 0
        self._free.append(slot)

    def clear(self) -> None:
        """Free every record."""
        for slot, _values in list(self):
            self.free(slot)

    def _grow(self) -> None:
        old = self._view
        before = len(self._view) // self._stride
        self._view = self._map(2 * before)
        if self._fd < 0:
            self._view[: len(old)] = old
        self._free.extend(range(2 * before - 1, before - 1, -1))

    def close(self) -> None:
        """Let go of the file; the records stay in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
