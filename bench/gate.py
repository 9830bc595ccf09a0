"""What the gate costs a step of 100 ms on the double of a device: the event behind the gradients,
and the all-reduce of one number where ranks hold different shards.

    ACPFS_TORCH_PYTHON=.venv/frameworks/bin/python python -m bench.gate [--rounds 15] [--steps 10]
    [--no-keep]

Two ranks whose hosts launch a step's work in pieces and run ahead; the device, a thread, takes 100
ms for it. The same loop with and without the gate, in turns, in one job. The host waits nowhere but
in the gate, so what is measured is what the device stands idle for it.
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

from bench.record import Report, lower_quartile
from tests.rig.mounts import REPOSITORY

STEP_MS = 100.0
SHARE_MAX = 0.01
KINDS = {
    "none": "no gate",
    "event": "the event, as with DDP",
    "reduced": "and the all-reduce, as with HSDP",
}


def measure(arguments: argparse.Namespace) -> Report:
    config = {"rounds": arguments.rounds, "steps": arguments.steps, "step_ms": STEP_MS}
    python = os.environ.get("ACPFS_TORCH_PYTHON", sys.executable)
    libraries = str(Path(xxhash.__file__).parents[1])
    with tempfile.TemporaryDirectory(prefix="acpfs-gate-") as scratch:
        done = subprocess.run(
            [python, "-m", "bench.gate_ranks", libraries, json.dumps(config), scratch],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            check=True,
        )
    times: dict[str, list[float]] = json.loads(done.stdout)
    report = Report(
        "gate",
        "What the gate costs a step",
        ["loop", "a step, best", "lower quartile", "to no gate, best", "to no gate, quartile"],
    )
    plain = times["none"]
    for kind, text in KINDS.items():
        found = times[kind]
        quartile = lower_quartile(found)
        report.row(
            text,
            f"{min(found):.2f} ms",
            f"{quartile:.2f} ms",
            f"{min(found) / min(plain) - 1:+.2%}",
            f"{quartile / lower_quartile(plain) - 1:+.2%}",
        )
        if kind != "none":
            share = quartile / lower_quartile(plain) - 1
            report.bar(
                f"{text}: at most {SHARE_MAX:.0%} of a step of {STEP_MS:.0f} ms",
                f"{share:.2%}",
                met=share <= SHARE_MAX,
            )
    report.samples = {f"{kind}_ms": samples for kind, samples in times.items()}
    report.notes.append(
        f"two ranks on this machine's processors; {arguments.rounds} rounds of {arguments.steps} "
        "steps, the slower rank's mean; no device was there"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-keep", action="store_true")
    given = parser.parse_args()
    sys.exit(measure(given).finish(keep=not given.no_keep))
