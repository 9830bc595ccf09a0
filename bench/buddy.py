"""What a copy in another rank's memory costs a step of a job that is fully sharded.

    ACPFS_TORCH_PYTHON=.venv/frameworks/bin/python python -m bench.buddy [--mib 192] [--batch 64]
    [--steps 20] [--rounds 5] [--no-keep]

Jobs of four ranks on this machine's processors, with and without copies, in turns; each ratio is
within one round. Ranks share the processors, and what sends a copy takes time of those that train;
on a device it would not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import xxhash

from bench.record import Report, median
from tests.rig.mounts import REPOSITORY

EVERY = (0, 10, 1)
KINDS = ("wall", "processor")
TEXT = {0: "no copies", 1: "a copy behind each update", 10: "a copy each 10 updates"}


def step(arguments: argparse.Namespace, every: int) -> dict[str, float]:
    """Mean milliseconds of a step of one job, by the clock and of the processor."""
    with tempfile.TemporaryDirectory(prefix="acpfs-buddy-") as scratch:
        config = {
            "scratch": scratch,
            "mib": arguments.mib,
            "batch": arguments.batch,
            "steps": arguments.steps,
            "every": every,
        }
        python = os.environ.get("ACPFS_TORCH_PYTHON", sys.executable)
        libraries = str(Path(xxhash.__file__).parents[1])
        done = subprocess.run(
            [python, "-m", "bench.buddy_ranks", libraries, json.dumps(config)],
            cwd=REPOSITORY,
            env={**os.environ, "ACPFS_TRAIN_COORDINATOR_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(arguments: argparse.Namespace) -> Report:
    report = Report(
        "buddy",
        "What copies in another rank's memory cost",
        ["job", "a step", "to no copies", "a step, processor", "to no copies"],
    )
    found: dict[int, list[dict[str, float]]] = {every: [] for every in EVERY}
    for _ in range(arguments.rounds):
        for every in EVERY:
            found[every].append(step(arguments, every))
    for every in EVERY:
        cells = []
        for kind in KINDS:
            means = [one[kind] for one in found[every]]
            ratios = [
                one[kind] / without[kind]
                for one, without in zip(found[every], found[0], strict=True)
            ]
            cells += [f"{median(means):.0f} ms", f"{median(ratios):.2f}" if every else ""]
            report.samples[f"step_every_{every}_{kind}_ms"] = means
        report.row(TEXT[every], *cells)
    report.notes.append(
        f"{arguments.mib} MiB of parameters and moments in all, four ranks with a quarter each; "
        f"means of {arguments.steps} steps, medians of {arguments.rounds} rounds, ratios within a "
        "round; the processor's time is that of rank 0 with all its threads"
    )
    report.notes.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-keep", action="store_true")
    given = parser.parse_args()
    sys.exit(measure(given).finish(keep=not given.no_keep))
