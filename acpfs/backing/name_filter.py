"""A small set of paths in which to look one up, but not to list: what a node record has room for.

A Bloom filter of at most `BITS_MAX` bits. Bit positions of a path come from its xxh3-128 under a
seed (low half + i × high half made odd, modulo the number of bits), and the seed is another one for
each record: a path that is taken for one of them by mistake is so in one record, and hardly in the
next. Text: `names:SEED:HASHES:BASE64`, or `directories:…`, where everything right below its paths
is meant. Pure.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

PATHS_MAX = 1024
"""More are not told one by one: under `BITS_MAX` one lookup in 300 would be mistaken, and soon
all.
"""
BITS_PER_PATH = 16
"""One lookup in 2,000 is mistaken; 12 with `PATHS_MAX` paths: one in 300."""
BITS_MIN = 1024
"""With fewer, positions are not spread any more."""
BITS_MAX = 12_288
"""1.5 KiB, 2 KiB as text, whatever is pending."""
HASHES_MAX = 16
_64_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class NameFilter:
    """Paths below the backing directory; without false negatives."""

    seed: int
    hashes: int
    bits: bytes
    of_directories: bool = False
    """Whether it has directories of which everything right below is meant, because there is too
    much of that.
    """

    @classmethod
    def of(
        cls, paths: Iterable[bytes], seed: int, *, of_directories: bool = False
    ) -> NameFilter | None:
        """None: there are none."""
        wanted = set(paths)
        if not wanted:
            return None
        count = min(BITS_MAX, max(BITS_MIN, BITS_PER_PATH * len(wanted)))
        hashes = max(1, min(HASHES_MAX, round(count / len(wanted) * math.log(2))))
        bits = bytearray(count // 8)
        for path in wanted:
            for position in _positions(path, seed, hashes, count):
                bits[position >> 3] |= 1 << (position & 7)
        return cls(seed & _64_BITS, hashes, bytes(bits), of_directories)

    def may_have(self, directory: bytes, name: bytes) -> bool:
        """Whether a name in a directory may be meant: by mistake now and then."""
        path = directory if self.of_directories else directory + b"/" + name if directory else name
        return all(
            self.bits[at >> 3] >> (at & 7) & 1
            for at in _positions(path, self.seed, self.hashes, 8 * len(self.bits))
        )

    def to_text(self) -> str:
        """For a node record."""
        kind = "directories" if self.of_directories else "names"
        return f"{kind}:{self.seed:x}:{self.hashes}:{base64.b64encode(self.bits).decode('ascii')}"

    @classmethod
    def from_text(cls, text: str) -> NameFilter | None:
        """Inverse of `to_text`. None: it says nothing, or nothing that this version understands."""
        try:
            kind, seed, hashes, bits = text.split(":")
            found = cls(
                int(seed, 16),
                int(hashes),
                base64.b64decode(bits, validate=True),
                kind == "directories",
            )
        except (ValueError, binascii.Error):
            return None
        fits = (
            0 <= found.seed <= _64_BITS
            and 0 < found.hashes <= HASHES_MAX
            and 0 < len(found.bits) <= BITS_MAX // 8
        )
        return found if fits and kind in ("names", "directories") else None


def _positions(path: bytes, seed: int, hashes: int, count: int) -> Iterable[int]:
    digest = xxhash.xxh3_128_intdigest(path, seed & _64_BITS)
    low = digest & _64_BITS
    high = digest >> 64 | 1
    return ((low + i * high) % count for i in range(hashes))
