"""The first saves of a fresh mount when nothing has used the memory lately: with `prefault = auto`
and without it, in turns.

Usage: python -m bench.cold_memory [--mib M] [--rounds N] [--idle S]. A virtual machine's host has
not backed free memory yet, or takes it back (free page reporting). A job loads its model for a
while before its first save, so each mount is left alone for `--idle` seconds. Each save is two
files, drained before the next begins. Best and lower quartile, because others can only disturb.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from acpfs.ram.memory import read_memory
from acpfs.ram.prefault_default import choose
from bench import places
from bench.fresh_mount import save
from bench.record import MIB, Report, lower_quartile
from tests.rig.mounts import AcpfsMount

SAVES = 3
FILES = 2
BUDGET = 8
"""Times one save: a quarter of it is what a save takes, twice."""


def saves(scratch: Path, prefault: str, size: int, idle_s: float) -> list[float]:
    """Seconds of each save of a fresh mount."""
    backing = scratch / "backing"
    backing.mkdir()
    try:
        with AcpfsMount(
            backing, scratch / "mnt", "native", ram=f"{BUDGET * size // MIB}M", prefault=prefault
        ) as mount:
            time.sleep(idle_s)
            found = []
            for number in range(SAVES):
                step = mount.path / f"step-{number + 1}00"
                step.mkdir()
                found.append(
                    sum(
                        save(step / f"rank-{rank}" / "model.pt", size // FILES)
                        for rank in range(FILES)
                    )
                )
                mount.flush()
            return found
    finally:
        shutil.rmtree(backing)


def measure(size: int, rounds: int, idle_s: float) -> Report:
    samples: dict[str, list[float]] = {}
    with places.scratch() as scratch:
        for _ in range(rounds):
            for prefault in ("0", "auto"):
                for number, seconds in enumerate(saves(scratch, prefault, size, idle_s)):
                    samples.setdefault(f"{prefault}_{number + 1}_s", []).append(seconds)
    report = Report(
        "cold_memory",
        "The first saves, memory cold",
        ["save", "prefault = 0", "prefault = auto", "0 ÷ auto (best)"],
    )
    for number in range(1, SAVES + 1):
        without = samples[f"0_{number}_s"]
        with_ = samples[f"auto_{number}_s"]
        cells = [f"{lower_quartile(found):.3f} s ({min(found):.3f})" for found in (without, with_)]
        report.row(
            str(number),
            *cells,
            f"{lower_quartile(without) / lower_quartile(with_):.2f} "
            f"({min(without) / min(with_):.2f})",
        )
    report.samples = samples
    report.notes.append(
        f"{size // MIB} MiB in {FILES} files, {rounds} mounts each, in turns, left alone for "
        f"{idle_s:g} s: lower quartile (best)"
    )
    report.notes.append(f"auto here: {choose(read_memory().cgroup_bytes).reason}")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--idle", type=float, default=8.0)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.mib * MIB, arguments.rounds, arguments.idle).finish())
