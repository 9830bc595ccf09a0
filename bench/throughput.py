"""Large files through the mount, a tmpfs and the backing directory, with one and with four processes.

Usage: python -m bench.throughput [--gib G] [--rounds N]. G GiB in all per measurement, shared by the processes. The backing directory
is this machine's disk through its page cache, without fsync: about the best that a backing directory can be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from bench import places
from bench.clock import together
from bench.record import GIB, MB, Report, median

OPERATIONS = {"write": "write", "read": "read", "save": "torch.save", "load": "torch.load"}
PROCESSES = (1, 4)


def one_round(directory: Path, count: int, size: int) -> dict[str, float]:
    """MB/s of each operation with `count` processes, each on a file of its own; the files are removed afterwards."""
    found: dict[str, float] = {}
    for first, second in (("write", "read"), ("save", "load")):
        paths = [directory / f"{first}-{n}" for n in range(count)]
        for operation in (first, second):
            found[operation] = count * size / together(operation, paths, size) / MB
        for path in paths:
            path.unlink()
    return found


def measure(total: int, rounds: int) -> Report:
    """Rounds in turn over all places; the first warms up."""
    columns = ["operation", "processes", "acpfs, libfuse", "tmpfs", "backing", "/ tmpfs", "/ backing"]
    report = Report("throughput", "Large files, MB/s", columns)
    samples: dict[tuple[str, int, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        mount = stack.enter_context(places.acpfs(scratch / "backing", scratch / "mount"))
        where = {"acpfs": mount.path, "tmpfs": stack.enter_context(places.tmpfs(scratch / "tmpfs")), "backing": scratch / "plain"}
        where["backing"].mkdir()
        for number in range(rounds + 1):
            for count in PROCESSES:
                for name, directory in where.items():
                    for operation, speed in one_round(directory, count, total // count).items():
                        if number:
                            samples.setdefault((operation, count, name), []).append(speed)
                    os.sync()
                    mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
    for operation, label in OPERATIONS.items():
        for count in PROCESSES:
            speeds = {name: median(samples[operation, count, name]) for name in where}
            ratios = [f"{speeds['acpfs'] / speeds[name]:.2f}" for name in ("tmpfs", "backing")]
            report.row(label, count, *(f"{speed:,.0f}" for speed in speeds.values()), *ratios)
    report.samples = {f"{op}_{count}_{name}_mb_s": values for (op, count, name), values in samples.items()}
    report.notes += [
        f"{total / GIB:g} GiB a measurement, {rounds} rounds in turn after a warm-up, medians; what was read had just been written",
        "the mount drains to the disk while it is measured; the disk is measured through its page cache, without fsync",
    ]
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(measure(int(arguments.gib * GIB), arguments.rounds).finish())
