"""torch.save of 2 GiB: the mount against its own backing directory, limited to 300 MB/s, and against plain write and tmpfs.

Usage: python -m bench.save_limited [--gib G] [--rounds N]. The limit is a pass-through file system that lets 300 MB/s pass, a typical
share of a shared file system for one node.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from bench import places
from bench.clock import together
from bench.record import GIB, MB, Report, median
from tests.rig.faultfs import FaultFs

BANDWIDTH = 300 * MB
FASTER = 3.0
ENOUGH = 0.9
"""Two rates that are the same differ by some percent from run to run."""


def timed(operation: str, path: Path, size: int) -> float:
    """MB/s of one process; the file is removed."""
    seconds = together(operation, [path], size)
    path.unlink()
    return size / seconds / MB


def measure(size: int, rounds: int) -> Report:
    """Rounds in turn; the first warms up."""
    report = Report("save_limited", f"torch.save of {size / GIB:g} GiB", ["what", "MB/s (median)", "each"])
    samples: dict[str, list[float]] = {"save acpfs": [], "write acpfs": [], "save backing": [], "save tmpfs": [], "write tmpfs": []}
    drained: list[float] = []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        limited = stack.enter_context(FaultFs(scratch / "source", scratch / "limited", bandwidth=BANDWIDTH, watchdog_s=3000))
        tmp = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        mount = stack.enter_context(places.acpfs(limited.path / "acpfs", scratch / "mount", "auto"))
        (limited.path / "plain").mkdir()
        where = {"acpfs": mount.path, "backing": limited.path / "plain", "tmpfs": tmp}
        for number in range(rounds + 1):
            for name, values in samples.items():
                operation, place = name.split()
                places.warm(tmp / "warm", size)
                speed = timed(operation, where[place] / "model.pt", size)
                if number:
                    values.append(speed)
                if place == "acpfs":
                    mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        start = time.monotonic()
        together("save", [mount.path / "kept.pt"], size)
        mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        drained.append(time.monotonic() - start)
    return judged(report, samples, drained[0], size)


def judged(report: Report, samples: dict[str, list[float]], drain_s: float, size: int) -> Report:
    """The table and the bars."""
    labels = {"save": "torch.save", "write": "write, 16 MiB a call"}
    where = {"acpfs": "the mount", "backing": "the backing directory, 300 MB/s", "tmpfs": "tmpfs"}
    for name, values in samples.items():
        operation, place = name.split()
        report.row(f"{labels[operation]} to {where[place]}", f"{median(values):,.0f}", " ".join(f"{value:,.0f}" for value in values))
    report.samples = {f"{name.replace(' ', '_')}_mb_s": values for name, values in samples.items()}
    speed = {name: median(values) for name, values in samples.items()}
    ratio = speed["save acpfs"] / speed["save backing"]
    report.bar(f"at least {FASTER:g} times faster than to the limited backing directory", f"{ratio:.1f} times", met=ratio >= FASTER)
    own_s = size / MB / speed["save tmpfs"] - size / MB / speed["write tmpfs"]
    allowed = size / MB / (size / MB / speed["write acpfs"] + own_s)
    found = f"{speed['save acpfs']:,.0f} MB/s where {allowed:,.0f} are allowed"
    report.bar("as fast as plain write through the mount allows", found, met=speed["save acpfs"] >= ENOUGH * allowed)
    report.notes.append("allowed: the time of plain write through the mount, and torch.save's own time (on tmpfs: save less plain write)")
    report.notes.append(
        f"from the start of a save through the mount until it was persisted: {drain_s:.1f} s, {size / drain_s / MB:,.0f} MB/s"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(measure(int(arguments.gib * GIB), arguments.rounds).finish())
