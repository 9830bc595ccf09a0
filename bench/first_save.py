"""The first save of a job, when the page cache has all memory, with and without `prefault`; beside
it the second, into memory just freed.

Usage: python -m bench.first_save [--gib G] [--rounds N]. Takes all free memory for page cache (of a
sparse file) for a moment: for a quiet machine. Memory that the host has not backed yet is slow once
per boot, and is not measured here.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench import places
from bench.clock import together
from bench.record import GIB, MIB, Report, median
from tests.rig.mounts import AcpfsMount

SMALL_BYTES = 256 * MIB
READ_BYTES = 16 * MIB
WATCHDOG_S = 1000.0


def free_bytes() -> int:
    """Memory that nothing has, page cache neither."""
    line = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemFree:")
    )
    return int(line.split()[1]) * 1024


def fill_page_cache(path: Path) -> None:
    """Read a file without blocks until no memory is free: the kernel keeps its zeros."""
    with open(path, "wb") as file:
        file.truncate(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    buffer = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while free_bytes() > SMALL_BYTES and file.readinto(buffer):
            pass


def saves(scratch: Path, prefault: int, size: int) -> tuple[float, float]:
    """Seconds of the first and of the second save of a new mount."""
    backing = scratch / "backing"
    backing.mkdir(exist_ok=True)
    with AcpfsMount(
        backing,
        scratch / "mnt",
        "native-passthrough",
        ram="40%",
        prefault=prefault,
        watchdog_s=WATCHDOG_S,
    ) as mount:
        mount.wait_status(
            lambda status: status["ram"]["prefaulted_bytes"] >= prefault, timeout_s=60
        )
        fill_page_cache(scratch / "cached")
        found = []
        for _ in range(2):
            path = mount.path / "model.bin"
            found.append(together("write8", [path], size))
            mount.flush()
            path.unlink()
        (scratch / "cached").unlink()
        return found[0], found[1]


def measure(size: int, rounds: int) -> Report:
    samples: dict[str, list[float]] = {}
    with places.scratch() as scratch:
        for _ in range(rounds):
            for name, prefault in (("without", 0), ("with", 2 * size)):
                first, second = saves(scratch, prefault, size)
                samples.setdefault(f"{name}_first_s", []).append(first)
                samples.setdefault(f"{name}_second_s", []).append(second)
    report = Report(
        "first_save",
        "The first save, page cache full",
        ["prefault", "first", "second", "second ÷ first"],
    )
    ratios = {}
    for name in ("without", "with"):
        first = median(samples[f"{name}_first_s"])
        second = median(samples[f"{name}_second_s"])
        ratios[name] = second / first
        report.row(name, f"{first:.3f} s", f"{second:.3f} s", f"{ratios[name]:.2f}")
    report.samples = samples
    report.notes.append(f"{size / GIB:g} GiB, {rounds} new mounts each, in turn; medians")
    report.bar(
        "with prefault the first save is as fast as the second (at least 0.9)",
        f"{ratios['with']:.2f}",
        met=ratios["with"] >= 0.9,
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sys.exit(measure(int(arguments.gib * GIB), arguments.rounds).finish())
