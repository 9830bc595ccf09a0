"""A burst of 2,000 files of 16 KiB: how fast the mount drains it, against a serial copy + fsync +
rename to the same backing file system.

Usage: python -m bench.drain_small [--backing ext4|latency|gluster|DIRECTORY] [--rounds N]. `ext4`
(default) is a real ext4 on a loop device whose flush takes 5 ms. `latency` is a pass-through file
system whose fsync takes 5 ms, any number at a time, as over a network; it is a Python program, and
every call costs processor time that the drain then lacks. `gluster` is a real GlusterFS volume,
replica 3, with all its servers on this machine: there processors are the limit and not the wait,
which the table's last line shows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import places
from bench.record import Report, median, spread
from tests.rig.storage import open_storage

FILES = 2000
BYTES = 16 * 1024
FASTER = 5.0
FSYNC_S = 0.005
IMAGE_BYTES = 1 << 30
THREADS = 16


@contextlib.contextmanager
def ext4(scratch: Path) -> Iterator[Path]:
    """An ext4 whose device takes FSYNC_S to flush: its image lies on the slow pass-through file
    system.
    """
    with places.served(
        "bench.slow_storage", scratch / "source", scratch / "slow", str(FSYNC_S)
    ) as slow:
        image = slow / "image"
        mount = scratch / "ext4"
        mount.mkdir()
        with open(image, "wb") as file:
            file.truncate(IMAGE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mount], check=True)
        try:
            yield mount
        finally:
            subprocess.run(["umount", mount], check=True)


@contextlib.contextmanager
def backing_of(kind: str, scratch: Path) -> Iterator[tuple[Path, str]]:
    """Where the backing directory lies, and what it is in words."""
    if kind == "gluster":
        with open_storage("glusterfs", scratch / "gluster") as storage:
            yield storage.client("client"), "GlusterFS, replica 3, on this machine"
    elif kind == "ext4":
        with ext4(scratch) as path:
            yield path, f"ext4 on a loop device whose flush takes {FSYNC_S * 1000:g} ms"
    elif kind == "latency":
        with places.served(
            "bench.slow_storage", scratch / "source", scratch / "slow", str(FSYNC_S)
        ) as slow:
            yield slow, f"a pass-through file system whose fsync takes {FSYNC_S * 1000:g} ms"
    else:
        yield Path(kind), kind


def burst(directory: Path) -> None:
    """The files, written and closed."""
    directory.mkdir()
    content = os.urandom(BYTES)
    for number in range(FILES):
        with open(directory / f"file-{number:04}", "wb") as file:
            file.write(content)


def copied(source: Path, target: Path, threads: int) -> float:
    """Seconds for a careful copy; with one thread: one file after the other."""
    target.mkdir()

    def copy(name: str) -> None:
        content = (source / name).read_bytes()
        part = target / f".{name}.part"
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.rename(target / name)

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, sorted(os.listdir(source))))
    return time.perf_counter() - start


def measure(kind: str, rounds: int) -> Report:
    """Rounds in turn; the first warms up."""
    report = Report("drain_small", "", ["what", "seconds", "files/s"])
    loop: list[float] = []
    threads: list[float] = []
    drain: list[float] = []
    whole: list[float] = []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        tmp = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        backing, what = stack.enter_context(backing_of(kind, scratch))
        mount = stack.enter_context(places.acpfs(backing / "acpfs", scratch / "mount"))
        for number in range(rounds + 1):
            burst(tmp / f"burst-{number}")
            seconds = copied(tmp / f"burst-{number}", backing / f"serial-{number}", 1)
            at_best = copied(tmp / f"burst-{number}", backing / f"parallel-{number}", THREADS)
            start = time.perf_counter()
            burst(mount.path / f"burst-{number}")
            written = time.perf_counter()
            mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
            if number:
                whole.append(time.perf_counter() - start)
                loop.append(seconds)
                threads.append(at_best)
                drain.append(time.perf_counter() - written)
    report.title = f"Burst of {FILES:,} files of 16 KiB to {what}"
    rows = {
        "serial copy + fsync + rename": loop,
        "acpfs: last close until the last is persisted": drain,
        "acpfs: first write until the last is persisted": whole,
        f"for comparison: {THREADS} threads of copy + fsync + rename": threads,
    }
    for name, values in rows.items():
        report.row(name, spread(values, "s"), f"{FILES / median(values):,.0f}")
    report.samples = {"serial_s": loop, "drain_s": drain, "whole_s": whole, "threads_s": threads}
    ratio = median(loop) / median(drain)
    report.bar(
        f"drains at least {FASTER:g} times as fast as the serial loop",
        f"{ratio:.1f} times",
        met=ratio >= FASTER,
    )
    report.notes.append(
        "the loops flush no directory and keep no order; the drain does both, and writes "
        "checksums and a manifest"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backing", default="ext4")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.backing, arguments.rounds).finish())
