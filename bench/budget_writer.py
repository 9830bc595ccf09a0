"""One of several writers that together have far more than the RAM tier holds: says how far it is at
any time, and what it wrote.

Usage: python -m bench.budget_writer PREFIX FILES BYTES_EACH PROGRESS_FILE NUMBER. Writes FILES
files, 4 MiB a call, no two blocks alike. Bytes written so far are a 64-bit number at place NUMBER
of the progress file, which others map. Prints when it started and ended (`time.monotonic`), how far
everybody was then, its longest call in seconds, and the checksum of each file, as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import sys
import time
from pathlib import Path

import xxhash

BLOCK_BYTES = 4 << 20


class Writer:
    """Writes files and counts."""

    def __init__(self, progress: Path, number: int) -> None:
        with progress.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._number = number
        self._block = bytearray(random.Random(number).randbytes(BLOCK_BYTES))
        self._written = 0
        self.longest_s = 0.0

    def everybody(self) -> list[int]:
        """Bytes that each writer has written so far."""
        return self._numbers.tolist()

    def write(self, path: str, size: int) -> str:
        """Write a new file; returns the checksum of what it should be."""
        hasher = xxhash.xxh3_128()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        for start in range(0, size, BLOCK_BYTES):
            struct.pack_into("<Q", self._block, 0, self._written)
            piece = memoryview(self._block)[: size - start]
            hasher.update(piece)
            self._write_all(fd, piece)
        os.close(fd)
        return hasher.hexdigest()

    def _write_all(self, fd: int, piece: memoryview) -> None:
        while piece:
            began = time.monotonic()
            count = os.write(fd, piece)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self._written += count
            self._numbers[self._number] = self._written
            piece = piece[count:]


def main(prefix: str, files: int, size: int, progress: str, number: int) -> None:
    """Prepare, wait for the word, write."""
    writer = Writer(Path(progress), number)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    digests = {
        Path(f"{prefix}-{n}").name: writer.write(f"{prefix}-{n}", size) for n in range(files)
    }
    end = time.monotonic()
    everybody = writer.everybody()
    print(
        json.dumps(
            {
                "start": start,
                "end": end,
                "everybody": everybody,
                "longest_s": writer.longest_s,
                "digests": digests,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
