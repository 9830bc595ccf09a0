"""What it costs a step that parameters are looked at behind each update: the mark, a copy, and a
digest of a `state=` that gives copies.

    ACPFS_TORCH_PYTHON=.venv/frameworks/bin/python python -m bench.end_mark [--layers 12] [--rounds
    9] [--no-keep]

A transformer with Adam on processors. All parts are timed in each step, in one process; shares are
of the step without them. A step on processors is long: on a device that does it in less, the share
is as much larger, and a copy from the device comes to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import xxhash

from bench.record import Report, lower_quartile
from tests.rig.mounts import REPOSITORY

SHARE_MAX = 0.02
KINDS = {
    "mark": "the mark, in every loop",
    "mark_and_copy": "and a copy, behind a change of parameters that was seen",
    "digest_of_copies": "`state=` that gives copies: its own copying, and the digest",
    "copies_alone": "of that, its own copying",
}


def measure(arguments: argparse.Namespace) -> Report:
    config = {
        "layers": arguments.layers,
        "width": arguments.width,
        "sequence": arguments.sequence,
        "rounds": arguments.rounds,
    }
    python = os.environ.get("ACPFS_TORCH_PYTHON", sys.executable)
    libraries = str(Path(xxhash.__file__).parents[1])
    done = subprocess.run(
        [python, "-m", "bench.end_mark_steps", libraries, json.dumps(config)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        check=True,
    )
    told = json.loads(done.stdout)
    times = told["times"]
    size = told["parameters"]
    report = Report(
        "end_mark",
        "What looking at the end of an update costs",
        ["part", "best", "lower quartile", "share of a step"],
    )
    step = lower_quartile(times["step"])
    report.row("the step itself", f"{min(times['step']):.0f} ms", f"{step:.0f} ms", "")
    for kind, text in KINDS.items():
        quartile = lower_quartile(times[kind])
        best = min(times[kind])
        report.row(text, f"{best:.2f} ms", f"{quartile:.2f} ms", f"{quartile / step:.2%}")
    report.samples = {f"{name}_ms": samples for name, samples in times.items()}
    share = lower_quartile(times["mark"]) / step
    report.bar(
        f"the mark: at most {SHARE_MAX:.0%} of a step", f"{share:.2%}", met=share <= SHARE_MAX
    )
    report.notes.append(
        f"{size / 1e6:.0f} million parameters with Adam, {arguments.rounds} steps; "
        "a copy is taken only where a loop changes parameters behind its updates"
    )
    report.notes.append(
        "`state=` that gives the tensors themselves costs what the mark does: nothing is copied"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-keep", action="store_true")
    given = parser.parse_args()
    sys.exit(measure(given).finish(keep=not given.no_keep))
