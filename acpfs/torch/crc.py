"""CRC32, the checksum of zip archives: of a piece, and of two pieces one after the other.

Whoever has the package `isal` computes it at the speed of memory; zlib's needs a third of the time
of a whole `torch.save`. Both let other threads run, and give the same numbers.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable

try:
    from isal import isal_zlib
except ImportError:
    crc32: Callable[[memoryview], int] = zlib.crc32
    IS_FAST = False
else:
    crc32 = isal_zlib.crc32
    IS_FAST = True

POLYNOMIAL = 0xEDB88320
"""Of CRC32, lowest bit first."""


def joined(pieces: Iterable[tuple[int, int]]) -> int:
    """CRC32 of all bytes, from (CRC32, bytes) of their pieces in order."""
    total = 0
    for crc, length in pieces:
        # of most storages there is one piece: no matrix is made for those
        total = crc if not total else _times(_appending_zeros(length), total) ^ crc
    return total


def _times(matrix: tuple[int, ...], vector: int) -> int:
    """Product over GF(2); `matrix` has a column for each bit."""
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


@functools.lru_cache(maxsize=64)
def _appending_zeros(length: int) -> tuple[int, ...]:
    """What so many bytes of zeros do to a CRC32 before them, as a matrix.

    Most pieces of an archive have one length, so few matrices are ever made.
    """
    power = (POLYNOMIAL, *(1 << bit for bit in range(31)))  # one bit of zero
    for _ in range(3):
        power = tuple(_times(power, column) for column in power)  # then a byte
    result = tuple(1 << bit for bit in range(32))
    while length:
        if length & 1:
            result = tuple(_times(power, column) for column in result)
        power = tuple(_times(power, column) for column in power)
        length >>= 1
    return result
