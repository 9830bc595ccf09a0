"""What the start costs: `acpfs mount`, `acpfs-ctl status`, the first `ls -lR`, and a takeover with
all these nodes known.

Usage: python -m bench.start [--files N] [--mounts N]. Each mount is a new one, in turns over an
empty directory and over one with N files. Wall time, and user and system time of all processes: of
the command by its usage, of the daemon's by /proc, until the command returns. On a machine that
does other work trust processor time. The bytecode is warm, in a place of its own:
PYTHONDONTWRITEBYTECODE does not hold here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench import places
from bench.fresh_mount import processor_s
from bench.record import Report, lower_quartile, median
from tests.rig.mounts import AcpfsMount

FILES_PER_DIRECTORY = 1000
MOUNT_S_MAX = 0.5
STATUS_S_MAX = 0.15
LISTING_RATIO_MAX = 2.0
TAKEOVER_S_MAX = 0.1
FULL_RATIO_MAX = 1.1


def fill(directory: Path, files: int) -> None:
    for number in range(files):
        if number % FILES_PER_DIRECTORY == 0:
            (directory / f"d{number // FILES_PER_DIRECTORY}").mkdir(parents=True)
        os.close(
            os.open(
                directory / f"d{number // FILES_PER_DIRECTORY}" / f"f{number}",
                os.O_CREAT | os.O_WRONLY,
                0o644,
            )
        )


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed_listing(path: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["ls", "-lR", str(path)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def takeover(mount: AcpfsMount) -> float:
    """Seconds from the end of a worker to an answer that only the next one can give."""
    start = time.perf_counter()
    mount.kill_worker()
    with contextlib.suppress(FileNotFoundError):
        (mount.path / f"missing-{start}").stat()
    return time.perf_counter() - start


def one_mount(backing: Path, base: Path, found: dict[str, list[float]], *, full: bool) -> None:
    environment = {"PYTHONPYCACHEPREFIX": str(base / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    mount = AcpfsMount(backing, base / "mnt", "native", environment=environment)
    which = "full" if full else "empty"
    used = children_s()
    start = time.perf_counter()
    with mount:
        found.setdefault(f"mount, {which}, s", []).append(time.perf_counter() - start)
        of_daemon = sum(processor_s(pid) for pid in mount.living())
        found.setdefault(f"mount, {which}, processor s", []).append(children_s() - used + of_daemon)
        start = time.perf_counter()
        mount.run("acpfs-ctl", str(mount.path), "status")
        found.setdefault("status, s", []).append(time.perf_counter() - start)
        if not full:
            return
        used = processor_s(mount.pid)
        start = time.perf_counter()
        listing_s = timed_listing(mount.path)
        found.setdefault("first ls -lR, daemon's processor s", []).append(
            processor_s(mount.pid) - used
        )
        found.setdefault("first ls -lR, s", []).append(listing_s)
        found.setdefault("backing's ls -lR, s", []).append(timed_listing(backing))
        found.setdefault("first ls -lR over the backing's", []).append(
            listing_s / found["backing's ls -lR, s"][-1]
        )
        found.setdefault("takeover, s", []).append(takeover(mount))
        found.setdefault("the next worker's processor s", []).append(processor_s(mount.pid))


def measure(files: int, mounts: int) -> Report:
    report = Report(
        "start",
        f"The start of a mount, over nothing and over {files:,} files",
        ["what", "best", "lower quartile", "median"],
    )
    found: dict[str, list[float]] = {}
    with places.scratch() as scratch:
        fill(scratch / "full", files)
        (scratch / "empty").mkdir()
        timed_listing(scratch / "full")
        for number in range(mounts + 1):
            for full in (False, True):
                one_mount(scratch / ("full" if full else "empty"), scratch, found, full=full)
            if not number:
                found.clear()  # that was the warm-up
        shutil.rmtree(scratch / "full")
    for name, values in found.items():
        report.row(
            name,
            *(f"{value:.3g}" for value in (min(values), lower_quartile(values), median(values))),
        )
    best = {name: min(values) for name, values in found.items()}
    report.samples = found
    report.notes.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    full_ratio = best["mount, full, s"] / best["mount, empty, s"]
    for promise, value, most in (
        ("mount within 0.5 s", best["mount, empty, s"], MOUNT_S_MAX),
        ("status within 0.15 s", best["status, s"], STATUS_S_MAX),
        (
            "a mount over files no slower than over none (10 % for chance)",
            full_ratio,
            FULL_RATIO_MAX,
        ),
        (
            "first ls -lR at most twice the backing's own",
            best["first ls -lR over the backing's"],
            LISTING_RATIO_MAX,
        ),
        ("takeover within 0.1 s", best["takeover, s"], TAKEOVER_S_MAX),
    ):
        report.bar(promise, f"{value:.3g}", met=value <= most)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--mounts", type=int, default=9)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.files, arguments.mounts).finish())
