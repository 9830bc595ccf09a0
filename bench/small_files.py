"""1,000 files of 4 KiB, create + write + close: the mount against pyfuse3's own pass-through
example, round by round.

Usage: python -m bench.small_files [--rounds N] [--source DIRECTORY]. Both stand on the same file
system (default: one tmpfs, which is best for the example; the mount drains there in the background
while it is measured).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from bench import places
from bench.record import Report, median, spread

FILES = 1000
BYTES = 4096
LIMIT = 3.0


def create(directory: Path) -> float:
    """Seconds for all files, in a directory of their own that exists already."""
    directory.mkdir()
    content = os.urandom(BYTES)
    start = time.perf_counter()
    for number in range(FILES):
        fd = os.open(directory / f"file-{number:04}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, content)
        os.close(fd)
    return time.perf_counter() - start


def measure(rounds: int, source: Path | None) -> Report:
    """Rounds in turn; the first one warms up and does not count."""
    report = Report(
        "small_files",
        f"{FILES:,} files of 4 KiB: create + write + close",
        ["where", "seconds", "per file", "ratio"],
    )
    names = ("pass-through example", "acpfs, libfuse", "no FUSE")
    samples: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        base = source or stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        example = stack.enter_context(
            places.served("bench.passthrough_example", base / "mirrored", scratch / "example")
        )
        mount = stack.enter_context(places.acpfs(base / "backing", scratch / "mount"))
        for number in range(rounds + 1):
            for name, where in zip(names, (example, mount.path, base), strict=True):
                seconds = create(where / f"round-{number}")
                if number:
                    samples[name].append(seconds)
            mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
    yardstick = median(samples[names[0]])
    for name in names:
        middle = median(samples[name])
        report.row(
            name,
            spread(samples[name], "s"),
            f"{middle / FILES * 1e6:.0f} µs",
            f"{middle / yardstick:.2f}",
        )
        report.samples[f"{name}_s"] = samples[name]
    ratio = median(samples[names[1]]) / yardstick
    report.bar(f"at most {LIMIT:g} times the example", f"{ratio:.2f} times", met=ratio <= LIMIT)
    report.notes.append(
        f"all on {'one tmpfs' if source is None else 'one directory'}; {rounds} rounds in turn "
        "after a warm-up, medians"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--source", type=Path)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.rounds, arguments.source).finish())
