"""One measured process: gets ready, says so, waits for the word, does one thing, prints the seconds
from start to end.

Usage: python -m bench.worker OPERATION PATH BYTES, operations as in WORK. Imports nothing of acpfs,
so that any interpreter can run it. `write` and `read` move 16 MiB a call, `save` and `load` are
torch's with a state_dict of 64 MiB tensors. No fsync anywhere.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

CHUNK = 16 * 1024**2
TENSOR = 64 * 1024**2


def write(path: str, size: int) -> Callable[[], object]:
    """Plain writes of incompressible bytes."""
    chunk = os.urandom(CHUNK)

    def go() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for start in range(0, size, CHUNK):
            part = memoryview(chunk)[: size - start]
            while part:
                part = part[os.write(fd, part) :]
        os.close(fd)

    return go


def read(path: str, size: int) -> Callable[[], object]:
    """Plain reads into one buffer, so that no memory is allocated while the clock runs."""
    buffer = bytearray(CHUNK)

    def go() -> None:
        with open(path, "rb", buffering=0) as file:
            done = 0
            while count := file.readinto(buffer):
                done += count
        assert done == size, (done, size)

    return go


def state(size: int) -> dict[str, Any]:
    """A state_dict of that many bytes."""
    import torch

    count = max(1, size // TENSOR)
    return {f"layer.{n}.weight": torch.full((size // count // 4,), 0.5 + n) for n in range(count)}


def save(path: str, size: int) -> Callable[[], object]:
    """torch.save in its default format."""
    import torch

    tensors = state(size)
    return lambda: torch.save(tensors, path)


def load(path: str, _size: int) -> Callable[[], object]:
    """torch.load in its default form."""
    import torch

    return lambda: torch.load(path)


def write8(path: str, size: int) -> Callable[[], object]:
    """Like `write`, 8 MiB a call."""
    chunk = os.urandom(CHUNK // 2)

    def go() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for _ in range(size // len(chunk)):
            os.write(fd, chunk)
        os.close(fd)

    return go


def read_mapped(path: str, size: int) -> Callable[[], object]:
    """Map, and copy every byte out: the page faults are part of it."""
    buffer = bytearray(CHUNK)

    def go() -> None:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
            memoryview(mapping) as view,
        ):
            for start in range(0, size, CHUNK):
                part = view[start : start + CHUNK]
                buffer[: len(part)] = part
                part.release()

    return go


def load_mapped(path: str, _size: int) -> Callable[[], object]:
    """torch.load(mmap=True), and every tensor read once."""
    import torch

    return lambda: [float(tensor.sum()) for tensor in torch.load(path, mmap=True).values()]


WORK = {
    "write": write,
    "write8": write8,
    "read": read,
    "read_mapped": read_mapped,
    "save": save,
    "load": load,
    "load_mapped": load_mapped,
}


def main(operation: str, path: str, size: int) -> None:
    """Prepare, wait, run."""
    work = WORK[operation](path, size)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    result = work()
    end = time.monotonic()
    print(start, end, flush=True)
    del result


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
