"""Ways to bring a tier file's bytes into a staging file, hashed on the way: what
`acpfs.backing.filling` chose from.

Usage: python -m bench.staging [--mib M] [--rounds N]. Four files at once, one thread each, as
streams do it; all ways in turn. Mapped ways are the cheapest and not used: a file that is truncated
while its mapping is hashed kills the process (SIGBUS).
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import xxhash

from acpfs.backing import filling
from bench import places
from bench.record import GIB, MIB, Report, median

FILES = 4


def copied(
    source: Path,
    target: Path,
    *,
    piece: int,
    direct: bool = False,
    early: bool = False,
    allocate: bool = False,
) -> None:
    """preadv into a buffer, hash it, pwrite it."""
    size = source.stat().st_size
    buffer = memoryview(mmap.mmap(-1, piece))
    position = 0
    read_fd = os.open(source, os.O_RDONLY)
    fd = _created(target, direct=direct)
    hasher = xxhash.xxh3_128()
    if allocate:
        os.posix_fallocate(fd, 0, size)
    while position < size:
        count = os.preadv(read_fd, [buffer[: min(piece, size - position)]], position)
        hasher.update(buffer[:count])
        filling.write(fd, buffer[:count], position)
        if early:
            filling.begin_write_out(fd, position, count)
        position += count
    _finished(fd, read_fd)


def mapped(source: Path, target: Path, *, piece: int, direct: bool) -> None:
    """Hash and pwrite straight from the mapped tier file."""
    size = source.stat().st_size
    read_fd = os.open(source, os.O_RDONLY)
    fd = _created(target, direct=direct)
    hasher = xxhash.xxh3_128()
    with mmap.mmap(read_fd, size, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
        for position in range(0, size, piece):
            with view[position : position + piece] as part:
                hasher.update(part)
                filling.write(fd, part, position)
    _finished(fd, read_fd)


def sent(source: Path, target: Path, *, piece: int) -> None:
    """Hash from a buffer, copy inside the kernel."""
    size = source.stat().st_size
    buffer = memoryview(mmap.mmap(-1, piece))
    position = 0
    read_fd = os.open(source, os.O_RDONLY)
    fd = _created(target, direct=False)
    hasher = xxhash.xxh3_128()
    while position < size:
        hasher.update(buffer[: os.preadv(read_fd, [buffer], position)])
        os.lseek(fd, position, os.SEEK_SET)
        position += os.sendfile(fd, read_fd, position, piece)
    _finished(fd, read_fd)


def dd(source: Path, target: Path) -> None:
    """The yardstick; no hash."""
    subprocess.run(
        ["dd", f"if={source}", f"of={target}", "bs=8M", "conv=fsync", "status=none"], check=True
    )


def _created(path: Path, *, direct: bool) -> int:
    return os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0), 0o600
    )


def _finished(*fds: int) -> None:
    os.fsync(fds[0])
    for fd in fds:
        os.close(fd)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "dd conv=fsync": dd,
    "buffered, 8 MiB pieces": partial(copied, piece=8 * MIB),
    "buffered, fallocate": partial(copied, piece=8 * MIB, allocate=True),
    "buffered, written out early": partial(copied, piece=2 * MIB, early=True),
    "O_DIRECT, 1 MiB": partial(copied, piece=MIB, direct=True),
    "O_DIRECT, 2 MiB": partial(copied, piece=2 * MIB, direct=True),
    "O_DIRECT, 8 MiB": partial(copied, piece=8 * MIB, direct=True),
    "O_DIRECT, fallocate": partial(copied, piece=2 * MIB, direct=True, allocate=True),
    "mapped, buffered": partial(mapped, piece=8 * MIB, direct=False),
    "mapped, O_DIRECT": partial(mapped, piece=2 * MIB, direct=True),
    "sendfile": partial(sent, piece=8 * MIB),
}


def cpu_s() -> float:
    """Of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(size: int, rounds: int) -> Report:
    samples: dict[str, list[float]] = {}
    with places.scratch() as scratch, places.tmpfs(scratch / "tier", "within_size") as tier:
        for number in range(FILES):
            (tier / str(number)).write_bytes(os.urandom(8 * MIB) * (size // (8 * MIB)))
        for number in range(rounds + 1):
            for name, way in WAYS.items():
                used = cpu_s()
                start = time.monotonic()
                threads = [
                    threading.Thread(target=way, args=(tier / str(n), scratch / str(n)))
                    for n in range(FILES)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if number:  # the first round warms up
                    samples.setdefault(f"{name}_s", []).append(time.monotonic() - start)
                    samples.setdefault(f"{name}_cpu_s", []).append(cpu_s() - used)
                for n in range(FILES):
                    (scratch / str(n)).unlink()
    report = Report(
        "staging",
        "From the RAM tier into staging files",
        ["way", "seconds", "CPU s per GiB", "× dd"],
    )
    plain = median(samples["dd conv=fsync_s"])
    for name in WAYS:
        seconds = median(samples[f"{name}_s"])
        used = median(samples[f"{name}_cpu_s"])
        report.row(
            name, f"{seconds:.3f}", f"{used * GIB / size / FILES:.2f}", f"{plain / seconds:.2f}"
        )
    report.samples = samples
    report.notes.append(
        f"{FILES} files of {size // MIB} MiB at once, hashed (xxh3-128) and fsynced; medians of "
        f"{rounds} rounds in turn"
    )
    report.notes.append("copy_file_range between tmpfs and another file system: EXDEV")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.mib * MIB, arguments.rounds).finish())
