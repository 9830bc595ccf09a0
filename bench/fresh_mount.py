"""The first save of a fresh mount beside the fourth: plain writes of 1 MiB, memory that the host
has backed, nobody else's page cache.

Usage: python -m bench.fresh_mount [--mib M] [--mounts N]. Each mount is a new one over a new
backing directory, and its saves are drained before the next begins. Ratios within one mount; of the
mounts the best and the lower quartile, because others can only disturb. Then 4 KiB files: what one
costs the daemon's processors, which must not rise because large files are looked for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from bench import places
from bench.record import MIB, Report, lower_quartile, median
from tests.rig.mounts import AcpfsMount

SAVES = 4
SMALL_FILES = 2000
SMALL_BYTES = 4096


def save(path: Path, size: int) -> float:
    """Seconds of one save."""
    path.parent.mkdir()
    piece = memoryview(os.urandom(MIB))
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for _ in range(size // MIB):
        os.write(fd, piece)
    os.close(fd)
    return time.perf_counter() - start


def warm_up(size: int) -> None:
    """Have the host back the memory that a save is about to take; a virtual machine gives what is
    free back to it within seconds.
    """
    with places.scratch() as scratch, places.tmpfs(scratch / "warm", huge="always") as memory:
        save(memory / "step" / "file", size)


def saves(scratch: Path, size: int) -> tuple[list[float], dict[str, int]]:
    """Seconds of each save of a fresh mount, and why its opens took which lane."""
    backing = scratch / "backing"
    backing.mkdir()
    try:
        with AcpfsMount(backing, scratch / "mnt", "native", ram=f"{12 * size // MIB}M") as mount:
            found = []
            for number in range(SAVES):
                warm_up(size)
                found.append(save(mount.path / f"step-{number + 1}00" / "model.pt", size))
                mount.flush()
            return found, mount.status()["lane_choices"]
    finally:
        shutil.rmtree(backing)


def processor_s(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def small_files(scratch: Path) -> float:
    """Seconds of the daemon's processor per small file, the drain among them."""
    backing = scratch / "small"
    backing.mkdir()
    try:
        with AcpfsMount(backing, scratch / "mnt", "native") as mount:
            content = bytes(SMALL_BYTES)
            begun = processor_s(mount.pid)
            for directory in (mount.path / "a", mount.path / "b"):
                directory.mkdir()
                for number in range(SMALL_FILES // 2):
                    (directory / f"file-{number:04}").write_bytes(content)
            mount.flush()
            return (processor_s(mount.pid) - begun) / SMALL_FILES
    finally:
        shutil.rmtree(backing)


def measure(size: int, mounts: int) -> Report:
    report = Report(
        "fresh_mount",
        f"First and fourth save of a fresh mount, {size // MIB} MiB",
        ["what", "best", "lower quartile", "median"],
    )
    samples: dict[str, list[float]] = {
        "first_s": [],
        "fourth_s": [],
        "first_over_fourth": [],
        "small_file_cpu_s": [],
    }
    choices: dict[str, int] = {}
    with places.scratch() as scratch, places.tmpfs(scratch / "base") as base:
        for _ in range(mounts):
            found, choices = saves(base, size)
            samples["first_s"].append(found[0])
            samples["fourth_s"].append(found[-1])
            samples["first_over_fourth"].append(found[0] / found[-1])
            samples["small_file_cpu_s"].append(small_files(base))
        report.notes.append(f"lanes of the last mount's opens: {choices}")
    for name, values in samples.items():
        report.row(
            name,
            *(f"{value:.3g}" for value in (min(values), lower_quartile(values), median(values))),
        )
    report.samples = samples
    report.notes.append(
        f"{mounts} mounts; ratio of the lower quartiles "
        f"{lower_quartile(samples['first_s']) / lower_quartile(samples['fourth_s']):.2f}"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--mounts", type=int, default=9)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.mib * MIB, arguments.mounts).finish())
