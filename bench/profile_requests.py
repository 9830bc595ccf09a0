"""What a request of the native transport costs the daemon: microseconds per opcode, and per file
created, written and closed.

Usage: python -m bench.profile_requests [--files N] [--lane passthrough|direct] [--readers N]
[--interval S] [--functions N]. The daemon is a real one with its write-back engine, in a process of
its own, in which `Dispatch.handle` is timed; this process makes the files. Wall time of a request
includes its system calls, and whatever took the interpreter meanwhile; `--functions` adds
cProfile's view, which makes everything slower and is only good for proportions.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from acpfs.config import Settings, Transport
from acpfs.mounting import starting
from acpfs.runtime.real import real_runtime
from acpfs.transport.native import session
from acpfs.transport.native.dispatch import Dispatch
from acpfs.transport.native.protocol import IN_HEADER, Opcode
from acpfs.transport.native.request import RequestBuffers
from acpfs.worker import daemon
from acpfs.worker.link import alone
from bench import places
from bench.native import SMALL_BYTES, cpu_s
from bench.record import Report, median

MASK_PASSTHROUGH = hex(((1 << 64) - 1) & ~(1 << 37))
ROUNDS = 3
SETTLE_TIMEOUT_S = 60.0


class Tally:
    """Requests and their wall time by opcode; written by several threads, so each counts for
    itself.
    """

    def __init__(self) -> None:
        self._threads: list[tuple[Counter[int], Counter[int]]] = []
        self._local = threading.local()

    def mine(self) -> tuple[Counter[int], Counter[int]]:
        """(requests, nanoseconds) of this thread."""
        if not hasattr(self._local, "pair"):
            self._local.pair = (Counter(), Counter())
            self._threads.append(self._local.pair)
        pair: tuple[Counter[int], Counter[int]] = self._local.pair
        return pair

    def record(self) -> dict[str, Any]:
        counts: Counter[int] = Counter()
        times: Counter[int] = Counter()
        for mine, ns in self._threads:
            counts.update(mine)
            times.update(ns)
        return {Opcode(opcode).name: [counts[opcode], times[opcode] / 1000] for opcode in counts}


def instrument(tally: Tally) -> None:
    """Time every request; the table is written to standard error's place in the file of `--serve`
    when SIGTERM ends the daemon.
    """
    handle = Dispatch.handle

    def timed(self: Dispatch, fd: int, buffers: RequestBuffers, length: int) -> bool:
        start = time.perf_counter_ns()
        keep = handle(self, fd, buffers, length)
        counts, times = tally.mine()
        opcode = IN_HEADER.unpack_from(buffers.header)[1]
        counts[opcode] += 1
        times[opcode] += time.perf_counter_ns() - start
        return keep

    Dispatch.handle = timed  # type: ignore[method-assign]


def profile_readers(count: int) -> None:
    """Profile the threads that read requests, and print the most expensive functions when they
    end.
    """
    run = threading.Thread.run

    def profiled(self: threading.Thread) -> None:
        if not self.name.startswith("fuse-"):
            run(self)
            return
        profile = cProfile.Profile()
        profile.runcall(run, self)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(count)

    threading.Thread.run = profiled  # type: ignore[method-assign]


def reader_threads(count: int) -> None:
    """Have sessions begin with so many reader threads."""
    begin = session.Session.begin.__func__  # type: ignore[attr-defined]

    def begun(cls: type[session.Session], *arguments: Any, **options: Any) -> session.Session:
        started: session.Session = begin(cls, *arguments, **{**options, "readers": count})
        return started

    session.Session.begin = classmethod(begun)  # type: ignore[assignment]


def be_daemon(arguments: argparse.Namespace, directory: Path) -> None:
    """Serve until unmounted; then write what was counted."""
    tally = Tally()
    if arguments.functions:
        profile_readers(arguments.functions)
    else:
        instrument(tally)
    if arguments.readers:
        reader_threads(arguments.readers)
    if arguments.interval:
        daemon.SWITCH_INTERVAL_S = arguments.interval
    settings = Settings(
        backing=directory / "backing",
        mountpoint=directory / "mnt",
        runtime_dir=directory / "run",
        transport=Transport.NATIVE,
        ram="1G",
    )
    given = real_runtime()
    link = alone(lambda: print("ready", flush=True), given)
    daemon.run(starting.prepare(settings).settings, link, given)
    (directory / "requests.json").write_text(json.dumps(tally.record()))


def burst(directory: Path, files: int) -> list[float]:
    """Make files; seconds spent in open, write and close."""
    directory.mkdir()
    content = os.urandom(SMALL_BYTES)
    spent = [0.0, 0.0, 0.0]
    for number in range(files):
        a = time.perf_counter()
        fd = os.open(directory / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        b = time.perf_counter()
        os.write(fd, content)
        c = time.perf_counter()
        os.close(fd)
        d = time.perf_counter()
        spent = [spent[0] + b - a, spent[1] + c - b, spent[2] + d - c]
    return spent


def measure(arguments: argparse.Namespace) -> Report:
    report = Report(
        "profile_requests",
        f"Requests of {arguments.files:,} files of 4 KiB, {arguments.lane} lane",
        ["what", "count per file", "µs each"],
    )
    names = (
        "open",
        "write",
        "close",
        "daemon's CPU until the last close",
        "daemon's CPU until all is persisted",
    )
    found: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        base = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        for name in ("backing", "mnt", "run"):
            (base / name).mkdir()
        process = start(arguments, base)
        stack.callback(process.wait, SETTLE_TIMEOUT_S)
        stack.callback(
            subprocess.run, ["umount", "-l", str(base / "mnt")], check=False, capture_output=True
        )
        for number in range(ROUNDS):
            before = cpu_s(process.pid)
            spent = burst(base / "mnt" / f"round-{number}", arguments.files)
            written = cpu_s(process.pid)
            settle(base / "backing" / f"round-{number}", arguments.files)
            for name, seconds in zip(
                names, (*spent, written - before, cpu_s(process.pid) - before), strict=True
            ):
                found[name].append(seconds / arguments.files * 1e6)
        subprocess.run(["umount", str(base / "mnt")], check=True)
        process.wait(SETTLE_TIMEOUT_S)
        requests: dict[str, tuple[int, float]] = json.loads((base / "requests.json").read_text())
    for name, values in found.items():
        report.row(name, 1, f"{median(values):.0f}")
        report.samples[f"{name} us"] = values
    for name, (count, spent_us) in sorted(requests.items(), key=lambda item: -item[1][1]):
        report.row(name, f"{count / arguments.files / ROUNDS:.2f}", f"{spent_us / count:.1f}")
    report.notes.append(
        "requests: mean wall time in `Dispatch.handle`, over all rounds, the drain of earlier "
        "ones included"
    )
    return report


def start(arguments: argparse.Namespace, directory: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "ACPFS_EXPECTED_BYTES": "0"}
    if arguments.lane == "direct":
        environment["ACPFS_FUSE_FEATURE_MASK"] = MASK_PASSTHROUGH
    command = [
        sys.executable,
        "-m",
        "bench.profile_requests",
        *sys.argv[1:],
        "--serve",
        str(directory),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[1]
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError("the daemon did not mount")
    return process


def settle(directory: Path, files: int) -> None:
    """Wait until the backing directory has them all."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while not directory.exists() or len(os.listdir(directory)) < files:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{directory} has not got its {files} files")
        time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--lane", choices=("passthrough", "direct"), default="direct")
    parser.add_argument(
        "--readers",
        type=int,
        default=0,
        help="threads that read requests; 0: as the daemon chooses",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=0.0,
        help="the interpreter's switch interval, seconds; 0: as the daemon sets it",
    )
    parser.add_argument(
        "--functions",
        type=int,
        default=0,
        help="so many of the most expensive functions by cProfile",
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        be_daemon(options, options.serve)
    else:
        sys.exit(measure(options).finish())
