"""Which lane the files of programs take that save in one format or another, and how long a save
takes beside a tmpfs.

Usage: ACPFS_TORCH_PYTHON=… python -m bench.formats [--mib M] [--rounds N] [--no-keep]. As root.
Formats that are not installed get a row that says so. Saves go to mount and tmpfs in turns, each
into a directory of its own (`step-N`); the first one teaches, and is shown apart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench import places
from bench.formats_writer import NEEDS
from bench.record import GIB, MIB, Report
from tests.rig.mounts import AcpfsMount

FORMATS = ("write(2), O_WRONLY", "write(2), O_RDWR", "mmap", *NEEDS)
BARS = {"safetensors save_file": 0.9, "mmap": 0.7}
"""Of the tmpfs's speed."""
CPU_BAR_S = 0.05
"""Of the daemon, for a GiB; while the save lasts."""


def _python() -> str:
    return os.environ.get("ACPFS_TORCH_PYTHON", sys.executable)


class Writer:
    """A process that saves."""

    def __init__(self, mib: int) -> None:
        self._process = subprocess.Popen(
            [_python(), "-m", "bench.formats_writer", str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )

    def ask(self, name: str, directory: str) -> float:
        """Seconds of a save; of `-`, whether there is that format."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{name}\t{directory}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    @staticmethod
    def versions() -> str:
        """What is installed there."""
        return subprocess.run(
            [_python(), "-m", "bench.formats_writer", "versions"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
        ).stdout.strip()

    def end(self) -> None:
        """No more saves."""
        self._process.communicate()


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def choices(mount: AcpfsMount) -> Counter[str]:
    """Opens by lane and reason."""
    return Counter(mount.status()["lane_choices"])


def shown(found: Counter[str]) -> str:
    """What a save's opens came to."""
    parts = (
        f"{reason} (x {count})" if count > 1 else reason
        for reason, count in sorted(found.items())
        if count > 0
    )
    return "; ".join(parts) or "-"


@dataclass
class Found:
    """Of one format."""

    lanes: list[str] = field(default_factory=list)
    in_mount: list[float] = field(default_factory=list)
    on_tmpfs: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    """Seconds of the daemon's processors."""


def found_of(name: str, writer: Writer, mount: AcpfsMount, plain: Path, rounds: int) -> Found:
    """The first save of a format, and as many as there are rounds."""
    found = Found()
    pid = mount.status()["worker"]["pid"]
    for number in range(rounds + 1):
        step = f"{name.split(maxsplit=1)[0].strip(',')}-step-{number}"
        for place in (mount.path, plain):
            (place / step).mkdir()
        before = choices(mount)
        used = cpu_s(pid)
        found.in_mount.append(writer.ask(name, str(mount.path / step)))
        found.used.append(cpu_s(pid) - used)
        found.lanes.append(shown(choices(mount) - before))
        found.on_tmpfs.append(writer.ask(name, str(plain / step)))
        mount.flush()
        for place in (mount.path, plain):
            shutil.rmtree(place / step)
    return found


def report_one(report: Report, name: str, mib: int, found: Found) -> None:
    gib = mib * MIB / GIB
    best = min(found.in_mount[1:])
    limit = min(found.on_tmpfs[1:])
    ratio = limit / best
    used = min(found.used[1:]) / gib
    speeds = [f"{gib / took:.2f}" for took in (found.in_mount[0], best, limit)]
    report.row(name, found.lanes[0], found.lanes[-1], *speeds, f"{ratio:.2f}", f"{used:.3f}")
    report.samples[f"{name}: mount, s"] = found.in_mount
    report.samples[f"{name}: tmpfs, s"] = found.on_tmpfs
    report.samples[f"{name}: daemon, CPU s"] = found.used
    if name in BARS:
        wanted = BARS[name]
        report.bar(f"{name}: {wanted} of a tmpfs", f"{ratio:.2f}", met=ratio >= wanted)
        report.bar(f"{name}: {CPU_BAR_S} CPU s per GiB", f"{used:.3f}", met=used <= CPU_BAR_S)


def measure(mib: int, rounds: int) -> Report:
    columns = ["format", "lane of the first save", "of the last", "first, GiB/s", "best", "tmpfs"]
    columns += ["best beside tmpfs", "daemon, CPU s per GiB"]
    report = Report("formats", f"Saves of {mib} MiB, by format", columns)
    writer = Writer(mib)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.end)
        scratch = stack.enter_context(places.scratch())
        (backing := scratch / "backing").mkdir()
        plain = stack.enter_context(places.tmpfs(scratch / "tmpfs", huge="within_size"))
        ram = f"{12 * mib}M"
        mount = stack.enter_context(AcpfsMount(backing, scratch / "mnt", "native", ram=ram))
        for name in FORMATS:
            if writer.ask(name, "-"):
                report_one(report, name, mib, found_of(name, writer, mount, plain, rounds))
            else:
                report.row(name, "not installed", *["-"] * (len(columns) - 2))
    report.notes.append(f"installed: {writer.versions()}")
    report.notes.append(
        "of a loaded machine only the lanes, and what stands in one row, say something"
    )
    report.notes.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-keep", action="store_true", help="only look")
    arguments = parser.parse_args()
    sys.exit(measure(arguments.mib, arguments.rounds).finish(keep=not arguments.no_keep))
