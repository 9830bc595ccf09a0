"""An archive in windows: storages are brought, hashed and written, and their checksums put where
they belong.

Windows may be written in any order, by several threads; the directory of the archive comes last.
"""

from __future__ import annotations

import bisect
import os
import struct
from collections.abc import Iterator, Sequence

import torch

from acpfs.torch.archive import CRC_BYTES, Archive
from acpfs.torch.crc import crc32, joined
from acpfs.torch.storage_bytes import Bringer

PIECES_MAX = 16
"""Of one pwritev(2): many small ones cost more there than to be put together first."""
Piece = tuple[int, int, memoryview]
"""(number of the part, where in it, bytes)."""


class ArchiveWindows:
    """Of one archive, which begins somewhere in a file."""

    def __init__(self, archive: Archive, window: int, at: int = 0) -> None:
        """`window`: bytes of each. `at`: where the archive begins."""
        self._archive = archive
        self._window = window
        self.at = at
        self.begins = range(0, archive.tail_at, window)
        self._ends = [part.end for part in archive.parts]
        self._sums: dict[str, list[tuple[int, int, int]]] = {}
        """Of each storage (begin, CRC32, bytes) of its pieces."""
        self._places = archive.crc_places()
        """Of checksums that are not in the file yet."""
        self._has_sums = _torch_makes_sums()
        for key in self._places:
            self._sums[key] = []

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        return self._archive.tail_at + len(self._archive.tail)

    @property
    def is_small(self) -> bool:
        """Whether all of it fits into a window."""
        return self.size <= self._window

    def put(self, fd: int, bringer: Bringer, begin: int) -> None:
        """Bring, hash and write a window."""
        end = min(begin + self._window, self._archive.tail_at)
        pieces = list(self._pieces(bringer, begin, end, 0))
        bringer.wait()
        self._hash_all(pieces, end)
        write_all(fd, [view for _, _, view in pieces], self.at + begin)

    def finish(self, fd: int) -> None:
        """Checksums where they belong, and the directory."""
        totals = self._totals()
        for key, place in self._places.items():
            if key in totals:
                write_all(fd, [memoryview(struct.pack("<I", totals[key]))], self.at + place)
        write_all(fd, [memoryview(self._archive.tail)], self.at + self._archive.tail_at)

    def _totals(self) -> dict[str, int]:
        """The storages' checksums; they are in the directory then."""
        if not self._has_sums:
            return {}
        totals = {}
        for key, pieces in self._sums.items():
            totals[key] = joined((crc, length) for _, crc, length in sorted(pieces))
        self._archive.finish(totals)
        return totals

    def whole(self, bringer: Bringer, room_at: int) -> list[Piece]:
        """All pieces, right after a wait; `room_at`: where in the bringer's room."""
        return list(self._pieces(bringer, 0, self._archive.tail_at, room_at))

    def completed(self, pieces: list[Piece]) -> list[memoryview]:
        """The archive's bytes, of all its pieces."""
        self._hash_all(pieces, self._archive.tail_at)
        self._totals()
        return [view for _, _, view in pieces] + [memoryview(self._archive.tail)]

    @staticmethod
    def put_small(fd: int, bringer: Bringer, archives: Sequence[ArchiveWindows]) -> None:
        """Small ones that follow each other: together they are a window at most."""
        brought = [one.whole(bringer, one.at - archives[0].at) for one in archives]
        bringer.wait()
        views = [
            view
            for one, pieces in zip(archives, brought, strict=True)
            for view in one.completed(pieces)
        ]
        write_all(fd, views, archives[0].at)

    def _pieces(self, bringer: Bringer, begin: int, end: int, room_at: int) -> Iterator[Piece]:
        """Of a window, in order."""
        for number in range(bisect.bisect_right(self._ends, begin), len(self._ends)):
            part = self._archive.parts[number]
            if part.begin >= end:
                break
            first = max(part.begin, begin)
            start = first - part.begin
            length = min(part.end, end) - first
            if part.key:
                there = room_at + first - begin
                yield number, start, bringer.bring(part.key, start, length, there)
            else:
                yield number, start, memoryview(part.text)[start : start + length]

    def _hash_all(self, pieces: list[Piece], end: int) -> None:
        if self._has_sums:
            for number, start, view in pieces:
                if self._archive.parts[number].key:
                    self._hash(number, start, view, end)

    def _hash(self, number: int, start: int, view: memoryview, end: int) -> None:
        """Of a piece of a storage; where it is all of it, its checksum goes into this window."""
        part = self._archive.parts[number]
        crc = crc32(view)
        self._sums[part.key].append((start, crc, len(view)))
        place = self._places[part.key]
        # what is behind a storage is the skeleton's, and no other window has this piece of it
        if len(view) == part.end - part.begin and place + CRC_BYTES <= end:
            text = self._archive.parts[number + 1]
            struct.pack_into("<I", text.text, place - text.begin, crc)
            del self._places[part.key]


def _torch_makes_sums() -> bool:
    """Unless somebody has told it not to (`torch.serialization.set_crc32_options`)."""
    asked = getattr(torch.serialization, "get_crc32_options", None)
    return asked is None or bool(asked())


def write_all(fd: int, views: list[memoryview], at: int) -> None:
    """pwritev(2) until nothing is left."""
    left = views if len(views) <= PIECES_MAX else [memoryview(b"".join(views))]
    while left:
        count = os.pwritev(fd, left, at)
        at += count
        while left and count >= len(left[0]):
            count -= len(left[0])
            left = left[1:]
        if count:
            left = [left[0][count:], *left[1:]]
