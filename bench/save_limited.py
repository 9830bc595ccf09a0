"""torch.save of 1 GiB: the mount against its own backing directory, limited to 300 MB/s, and
against a tmpfs.

Usage: python -m bench.save_limited [--gib G] [--rounds N]. The limit is a pass-through file system
that lets 300 MB/s pass, a typical share of a shared file system for one node. Memory is warmed
before each sample, when its process has made its tensors and is about to begin: what is warmed
earlier, the tensors take, and the file gets what the host has taken back.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench import places
from bench.clock import together
from bench.record import GIB, MB, Report, lower_quartile
from tests.rig.faultfs import FaultFs

BANDWIDTH = 300 * MB
FASTER = 3.0
ENOUGH = 0.9
"""Two times that are the same differ by some percent from run to run."""


def timed(path: Path, size: int, before: Callable[[], None]) -> float:
    """Seconds of one process; the file is removed."""
    seconds = together("save", [path], size, before)
    path.unlink()
    return seconds


def measure(size: int, rounds: int) -> Report:
    """Rounds in turn; the first warms up."""
    report = Report(
        "save_limited",
        f"torch.save of {size / GIB:g} GiB",
        ["what", "seconds, lower quartile", "best", "MB/s"],
    )
    samples: dict[str, list[float]] = {"acpfs": [], "backing": [], "tmpfs": []}
    drained: list[float] = []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        limited = stack.enter_context(
            FaultFs(scratch / "source", scratch / "limited", bandwidth=BANDWIDTH, watchdog_s=3000)
        )
        tmp = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        warmth = stack.enter_context(places.tmpfs(scratch / "warmth", huge="always")) / "warmth"
        mount = stack.enter_context(places.acpfs(limited.path / "acpfs", scratch / "mount", "auto"))
        (limited.path / "plain").mkdir()
        where = {"acpfs": mount.path, "backing": limited.path / "plain", "tmpfs": tmp}
        for number in range(rounds + 1):
            for place, values in samples.items():
                seconds = timed(where[place] / "model.pt", size, lambda: places.warm(warmth, size))
                if number:
                    values.append(seconds)
                if place == "acpfs":
                    mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        start = time.monotonic()
        together("save", [mount.path / "kept.pt"], size)
        mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        drained.append(time.monotonic() - start)
    return judged(report, samples, drained[0], size)


def judged(report: Report, samples: dict[str, list[float]], drain_s: float, size: int) -> Report:
    """The table and the bars."""
    where = {
        "acpfs": "the mount",
        "backing": "the backing directory, 300 MB/s",
        "tmpfs": "a tmpfs of small pages",
    }
    seconds = {place: lower_quartile(values) for place, values in samples.items()}
    for place, values in samples.items():
        found = seconds[place]
        report.row(
            f"torch.save to {where[place]}",
            f"{found:.3f}",
            f"{min(values):.3f}",
            f"{size / found / MB:,.0f}",
        )
    report.samples = {f"save_{place}_s": values for place, values in samples.items()}
    for place, bar in (("backing", FASTER), ("tmpfs", ENOUGH)):
        ratio = seconds[place] / seconds["acpfs"]
        report.bar(
            f"at least {bar:g} times as fast as to {where[place]}",
            f"{ratio:.1f} times",
            met=ratio >= bar,
        )
    report.notes.append(
        f"{len(samples['acpfs'])} rounds in turn after a warm-up; a tmpfs of huge pages: see native"
    )
    report.notes.append(
        f"from the start of a save through the mount until it was persisted: {drain_s:.1f} s, "
        f"{size / drain_s / MB:,.0f} MB/s"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    sys.exit(measure(int(arguments.gib * GIB), arguments.rounds).finish())
