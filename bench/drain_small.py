"""A burst of 2,000 files of 16 KiB: how fast the mount drains it, against a serial copy + fsync + rename to the same backing file system.

Usage: python -m bench.drain_small [--backing gluster|latency|DIRECTORY] [--rounds N]. `gluster` is a real GlusterFS volume, replica 3, on
this machine; `latency` is a pass-through file system whose fsync takes 5 ms, any number at a time; default: gluster where installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench import gluster, places
from bench.record import Report, median, spread
from tests.rig.faultfs import FaultFs

FILES = 2000
BYTES = 16 * 1024
FASTER = 5.0
FSYNC_S = 0.005


@contextlib.contextmanager
def backing_of(kind: str, scratch: Path) -> Iterator[tuple[Path, str]]:
    """Where the backing directory lies, and what it is in words."""
    if kind == "gluster":
        with gluster.volume(scratch / "gluster") as path:
            yield path, "GlusterFS, replica 3, on this machine"
    elif kind == "latency":
        with FaultFs(scratch / "source", scratch / "slow", fsync_s=FSYNC_S, watchdog_s=1800) as slow:
            yield slow.path, f"a pass-through file system whose fsync takes {FSYNC_S * 1000:g} ms"
    else:
        yield Path(kind), kind


def burst(directory: Path) -> None:
    """The files, written and closed."""
    directory.mkdir()
    content = os.urandom(BYTES)
    for number in range(FILES):
        with open(directory / f"file-{number:04}", "wb") as file:
            file.write(content)


def serial(source: Path, target: Path) -> float:
    """Seconds for a careful copy, one file after the other."""
    target.mkdir()
    start = time.perf_counter()
    for name in sorted(os.listdir(source)):
        content = (source / name).read_bytes()
        part = target / f".{name}.part"
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.rename(target / name)
    return time.perf_counter() - start


def measure(kind: str, rounds: int) -> Report:
    """Rounds in turn; the first warms up."""
    report = Report("drain_small", "", ["what", "seconds", "files/s"])
    loop: list[float] = []
    drain: list[float] = []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        tmp = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        backing, what = stack.enter_context(backing_of(kind, scratch))
        mount = stack.enter_context(places.acpfs(backing / "acpfs", scratch / "mount"))
        for number in range(rounds + 1):
            burst(tmp / f"burst-{number}")
            seconds = serial(tmp / f"burst-{number}", backing / f"serial-{number}")
            start = time.perf_counter()
            burst(mount.path / f"burst-{number}")
            mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
            if number:
                loop.append(seconds)
                drain.append(time.perf_counter() - start)
    report.title = f"Burst of {FILES:,} files of 16 KiB to {what}"
    for name, values in (("serial copy + fsync + rename", loop), ("acpfs: first write until the last is persisted", drain)):
        report.row(name, spread(values, "s"), f"{FILES / median(values):,.0f}")
    report.samples = {"serial_s": loop, "drain_s": drain}
    ratio = median(loop) / median(drain)
    report.bar(f"drains at least {FASTER:g} times as fast as the serial loop", f"{ratio:.1f} times", met=ratio >= FASTER)
    report.notes.append("the serial loop does not flush the directory; the drain flushes directories too, and writes a manifest")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backing", default="gluster" if gluster.available() else "latency")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.backing, arguments.rounds).finish())
