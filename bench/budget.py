"""Four writers, together five times the budget, over a backing directory limited to 200 MB/s: does
RAM stay bounded, and is waiting fair?

Usage: python -m bench.budget [--mib BUDGET] [--lanes L,…] [--quick]. In each lane once with files
larger than the budget (one per writer), and once with many that fit. Sampled all the time: what the
tmpfs holds (10 ms), what status says (200 ms), how far each writer is. A plot of each run goes to
bench/results, where matplotlib is installed (extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from acpfs.ram.place import slack_bytes
from bench import places
from bench.plot import Panel, plot
from bench.record import GIB, MB, MIB, RESULTS, Report
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount

BANDWIDTH = 200 * MB
WRITERS = 4
TIMES = 5
"""How much all write together, in budgets."""
FAIR = 2.0
LANES = ("libfuse", "native-direct", "native-passthrough")
PASSTHROUGH = "native-passthrough"
DAEMON_SLACK_BYTES = WRITERS * 2 * MIB
"""Where the daemon sees every write: a huge page for each that is under way."""
LOOK_S = 0.01
ASK_S = 0.2
ROOT = Path(__file__).parents[1]


@dataclass
class Samples:
    """What was seen of one run, by seconds since the writers began."""

    tmpfs: list[tuple[float, int]] = field(default_factory=list)
    budget_used: list[tuple[float, int]] = field(default_factory=list)
    """used + reserved, as status says."""
    waiting: list[tuple[float, int]] = field(default_factory=list)
    written: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def peak(self) -> int:
        """The most that the tmpfs held."""
        return max(taken for _at, taken in self.tmpfs)


class Sampler(threading.Thread):
    """Looks until it is told to end; never at the mount."""

    def __init__(self, mount: AcpfsMount, progress: Path) -> None:
        super().__init__(daemon=True)
        self._mount = mount
        self._progress = progress
        self._data = Path(mount.status()["ram"]["directory"]) / "data"
        self._ended = threading.Event()
        self.samples = Samples()
        self._began = time.monotonic()

    def run(self) -> None:
        asked = -ASK_S
        while not self._ended.wait(LOOK_S):
            now = time.monotonic() - self._began
            info = os.statvfs(self._data)
            self.samples.tmpfs.append((now, (info.f_blocks - info.f_bfree) * info.f_frsize))
            if now - asked >= ASK_S:
                asked = now
                self._ask(now)

    def _ask(self, now: float) -> None:
        ram = self._mount.status()["ram"]
        self.samples.budget_used.append((now, ram["used_bytes"] + ram["reserved_bytes"]))
        self.samples.waiting.append((now, ram["waiting_writers"]))
        self.samples.written.append((now, tuple(memoryview(self._progress.read_bytes()).cast("Q"))))

    def end(self) -> Samples:
        """Look no more."""
        self._ended.set()
        self.join()
        return self.samples


@dataclass
class Outcome:
    """One lane, one shape of files."""

    lane: str
    files: int
    size: int
    budget: int
    samples: Samples
    seconds: list[float]
    """Per writer, from the common start."""
    longest_s: float
    least: float
    """How much the slowest had written when the fastest was done, as a share of what each had
    to.
    """
    wrong: list[str]
    """Files on the backing directory that are not what was written."""

    @property
    def name(self) -> str:
        return f"{self.lane}, {WRITERS} × {self.files} × {self.size / MIB:.0f} MiB"

    @property
    def allowed(self) -> int:
        """Budget and slack."""
        return self.budget + (
            slack_bytes(self.budget) if self.lane == PASSTHROUGH else DAEMON_SLACK_BYTES
        )

    @property
    def fairness(self) -> float:
        """Slowest to fastest."""
        return max(self.seconds) / min(self.seconds)


def write_all(mount: AcpfsMount, files: int, size: int, progress: Path) -> list[dict[str, Any]]:
    """Four writers from a common start to the end of the last one."""
    words = [str(files), str(size), str(progress)]
    command = [sys.executable, "-m", "bench.budget_writer"]
    writers = [
        subprocess.Popen(
            [*command, str(mount.path / f"w{n}"), *words, str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for n in range(WRITERS)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            if writer.stdout.readline() != "ready\n":
                raise RuntimeError("a writer did not start")
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        return [json.loads(writer.communicate(timeout=places.WATCHDOG_S)[0]) for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


def digest(path: Path) -> str:
    """xxh3-128 of a file; what is not there has none."""
    hasher = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while data := file.read(8 * MIB):
                hasher.update(data)
    except FileNotFoundError:
        return "missing"
    return hasher.hexdigest()


def run(scratch: Path, lane: str, files: int, size: int, budget: int) -> Outcome:
    """One mount, one backing directory, both new."""
    base = scratch / f"{lane}-{files}"
    base.mkdir()
    progress = base / "progress"
    progress.write_bytes(bytes(8 * WRITERS))
    with (
        FaultFs(
            base / "source", base / "limited", bandwidth=BANDWIDTH, watchdog_s=places.WATCHDOG_S
        ) as limited,
        AcpfsMount(
            limited.path, base / "mnt", lane, ram=budget, watchdog_s=places.WATCHDOG_S
        ) as mount,
    ):
        sampler = Sampler(mount, progress)
        sampler.start()
        try:
            told = write_all(mount, files, size, progress)
        finally:
            samples = sampler.end()
        mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        wrong = [
            name
            for one in told
            for name, expected in one["digests"].items()
            if digest(limited.source / name) != expected
        ]
    start = min(one["start"] for one in told)
    longest_s = max(one["longest_s"] for one in told)
    least = min(
        min(one["everybody"]) for one in told if one["end"] == min(other["end"] for other in told)
    ) / (files * size)
    return Outcome(
        lane,
        files,
        size,
        budget,
        samples,
        [one["end"] - start for one in told],
        longest_s,
        least,
        wrong,
    )


def oom_kills() -> int:
    """How often the kernel has killed for memory since it started."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def measure(budget: int, lanes: list[str], many: int) -> tuple[Report, list[Outcome]]:
    """Every lane, both shapes."""
    report = Report(
        "budget",
        f"{WRITERS} writers, {TIMES} × the budget of {budget / MIB:.0f} MiB, backing directory "
        f"limited to {BANDWIDTH / MB:.0f} MB/s",
        [
            "lane and files",
            "MB/s",
            "peak of the tmpfs",
            "budget + slack",
            "writers, seconds",
            "slowest ÷ fastest",
            "longest call",
            "correct",
        ],
    )
    killed = oom_kills()
    each = TIMES * budget // WRITERS
    with places.scratch() as scratch:
        outcomes = [
            run(scratch, lane, files, each // files, budget)
            for lane in lanes
            for files in (1, many)
        ]
    for one in outcomes:
        report.row(*cells(one))
        report.samples[f"{one.lane}_{one.files}_writers_s"] = one.seconds
        report.samples[f"{one.lane}_{one.files}_peak_mib"] = [one.samples.peak() / MIB]
    worst = max(outcomes, key=lambda one: one.fairness)
    over = [one.name for one in outcomes if one.samples.peak() > one.allowed]
    wrong = [name for one in outcomes for name in one.wrong]
    report.bar("all files complete and correct", f"{len(wrong)} wrong", met=not wrong)
    report.bar(
        "peak of the RAM tier within budget and slack, in every lane",
        f"exceeded: {', '.join(over) or 'never'}",
        met=not over,
    )
    report.bar(
        f"slowest writer within {FAIR:g} × the fastest",
        f"{worst.fairness:.2f} at worst ({worst.name})",
        met=worst.fairness <= FAIR,
    )
    report.bar(
        "nothing killed for memory", f"{oom_kills() - killed} processes", met=oom_kills() == killed
    )
    report.notes.append(
        "slack: a huge page per write that is under way; in passthrough, what the tmpfs is "
        "larger than the budget (S60)"
    )
    return report, outcomes


def cells(one: Outcome) -> list[str]:
    """A row of the table."""
    total = WRITERS * one.files * one.size
    return [
        one.name,
        f"{total / max(one.seconds) / MB:.0f}",
        f"{one.samples.peak() / MIB:.0f} MiB",
        f"{one.allowed / MIB:.0f} MiB",
        " ".join(f"{seconds:.1f}" for seconds in sorted(one.seconds)),
        f"{one.fairness:.2f}",
        f"{one.longest_s:.1f} s",
        "no" if one.wrong else "yes",
    ]


def panel(one: Outcome) -> Panel:
    """A run as it is drawn."""
    written = [
        [(at, counts[n] / MIB) for at, counts in one.samples.written] for n in range(WRITERS)
    ]
    return Panel(
        one.name,
        {
            "RAM tier's tmpfs": [(at, taken / MIB) for at, taken in one.samples.tmpfs],
            "used + reserved (status)": [
                (at, taken / MIB) for at, taken in one.samples.budget_used
            ],
        },
        {f"writer {n}": series for n, series in enumerate(written)},
        {"budget": one.budget / MIB, "budget + slack": one.allowed / MIB},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=GIB // MIB)
    parser.add_argument("--lanes", default=",".join(LANES))
    parser.add_argument(
        "--quick", action="store_true", help="128 MiB, all lanes: a minute; nothing is kept"
    )
    arguments = parser.parse_args()
    found, each_run = measure(
        (128 if arguments.quick else arguments.mib) * MIB,
        arguments.lanes.split(","),
        5 if arguments.quick else 10,
    )
    if not arguments.quick:
        drawn = plot([panel(one) for one in each_run], RESULTS / "budget.svg")
        found.notes.append(
            "every run over time: ![](budget.svg)"
            if drawn
            else "no plot: matplotlib is not installed (extra `bench`)"
        )
    sys.exit(found.finish(keep=not arguments.quick))
