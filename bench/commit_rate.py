"""Files of 16 KiB drained to a tmpfs: commits per second when all is staged, while streams run, and
of the drain as a whole.

Usage: python -m bench.commit_rate [--files N] [--rounds N] [--transport native|libfuse]. The daemon
is a real one in a process of its own; its streams and commits are switched on and off there, since
nothing outside can tell one from the other. Three ways, in turns, the first round warms up:

* staged first: all files are staged, then committed with nobody else at work;
* beside streams: the first half is staged, then committed while the second half streams; the rate
  is of the first half;
* whole drain: all files wait in RAM, then both begin.

In the first two, streams may go ahead of commits as far as they like: as users have it they stop
after some thousand small files.

Files are written and closed before the clock begins, so that no request is measured. tmpfs, because
there nothing waits for a device: the interpreter and the lock are all that is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acpfs.backing.lower import LowerStat
from acpfs.config import Settings, Transport
from acpfs.filesystem.changes import Changes
from acpfs.mounting import starting
from acpfs.runtime.real import real_runtime
from acpfs.worker import daemon
from acpfs.worker.link import alone
from acpfs.writeback.engine import Engine
from acpfs.writeback.log.ops import Op
from acpfs.writeback.order.order import Order
from acpfs.writeback.streams.staged import Staged
from acpfs.writeback.streams.stream_queue import StreamQueue
from bench import places
from bench.record import MIB, Report, lower_quartile, median

BYTES = 16 * 1024
PER_DIRECTORY = 1000
SHARE = 0.8
FILES_PER_S = 3000
TICKS_S = os.sysconf("SC_CLK_TCK")
WAYS = ("staged first", "beside streams", "whole drain")
SETTLE_TIMEOUT_S = 300.0


class Switches:
    """In the daemon: streams and commits on and off, and a clock that stops when so many operations
    are persisted.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.off = {"streams": False, "commits": False, "bound": False}
        self.wanted = 0
        self.done = 0
        self.reached = threading.Event()
        self.stopped_at = 0.0

    def install(self) -> None:
        """Before the file system is made."""
        init = Engine.__init__
        group = Order.group
        following = StreamQueue.next
        persisted = Changes.persisted
        is_enough = Staged.is_enough

        def made(engine: Engine, *arguments: Any, **options: Any) -> None:
            init(engine, *arguments, **options)
            self.engine = engine

        def grouped(order: Order, now: float) -> Any:
            return ([], now + 0.02) if self.off["commits"] else group(order, now)

        def chosen(queue: StreamQueue, *arguments: Any, **options: Any) -> Any:
            return None if self.off["streams"] else following(queue, *arguments, **options)

        def bounded(staged: Staged, streaming: int) -> bool:
            return not self.off["bound"] and is_enough(staged, streaming)

        def told(changes: Changes, op: Op, stat: LowerStat | None) -> None:
            persisted(changes, op, stat)
            self.done += 1
            if self.done == self.wanted:
                self.stopped_at = time.perf_counter()
                self.reached.set()

        replaced: list[tuple[Any, str, Any]] = [
            (Engine, "__init__", made),
            (Order, "group", grouped),
            (StreamQueue, "next", chosen),
            (Staged, "is_enough", bounded),
            (Changes, "persisted", told),
        ]
        for one, name, function in replaced:
            setattr(one, name, function)

    def serve(self) -> None:
        """A line of JSON for each line of words."""
        for line in sys.stdin:
            verb, *words = line.split()
            verbs: dict[str, Callable[..., Any]] = {
                "switch": self.switch,
                "staged": self.staged,
                "measure": self.measure,
            }
            answer = verbs[verb](*words)
            print(json.dumps(answer), flush=True)

    def switch(self, which: str, how: str) -> None:
        self.off[which] = how == "off"
        assert self.engine is not None
        self.engine.wake()

    def staged(self) -> int:
        assert self.engine is not None
        return self.engine.statistics().staged_bytes // BYTES

    def measure(self, count: str) -> dict[str, Any]:
        """Switch everything on; seconds until so many more are persisted, and the processor that
        all threads used for it.
        """
        self.reached.clear()
        self.done = 0
        self.wanted = int(count)
        cpu = time.process_time()
        threads = thread_cpu_s()
        begun = time.perf_counter()
        for which in ("streams", "commits"):
            self.switch(which, "on")
        if not self.reached.wait(SETTLE_TIMEOUT_S):
            raise TimeoutError("not drained")
        spent = thread_cpu_s()
        spent.subtract(threads)
        return {
            "seconds": self.stopped_at - begun,
            "cpu_s": time.process_time() - cpu,
            "threads": spent,
        }


def thread_cpu_s() -> Counter[str]:
    """Processor time of this process by kind of thread."""
    found: Counter[str] = Counter()  # of floats, which `Counter` takes as well
    for thread in threading.enumerate():
        with contextlib.suppress(OSError):
            fields = (
                Path(f"/proc/self/task/{thread.native_id}/stat")
                .read_text()
                .rpartition(")")[2]
                .split()
            )
            found[thread.name.rstrip("0123456789-")] += (
                int(fields[11]) + int(fields[12])
            ) / TICKS_S  # type: ignore[assignment]
    return found


def be_daemon(directory: Path, transport: str) -> None:
    """Serve until unmounted."""
    switches = Switches()
    switches.install()
    settings = Settings(
        backing=directory / "backing",
        mountpoint=directory / "mnt",
        runtime_dir=directory / "run",
        transport=Transport(transport),
        ram="2G",
    )
    given = real_runtime()
    link = alone(lambda: print("ready", flush=True), given)
    threading.Thread(target=switches.serve, name="switches", daemon=True).start()
    daemon.run(starting.prepare(settings).settings, link, given)


class Served:
    """The daemon, from outside."""

    def __init__(
        self, base: Path, transport: str, with_program: Callable[[list[str]], list[str]] = list
    ) -> None:
        self.base = base
        self.directories = 0
        for name in ("backing", "mnt", "run"):
            (base / name).mkdir()
        command = [
            sys.executable,
            "-m",
            "bench.commit_rate",
            "--transport",
            transport,
            "--serve",
            str(base),
        ]
        environment = {**os.environ, "ACPFS_EXPECTED_BYTES": "0"}
        self.process = subprocess.Popen(
            with_program(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("the daemon did not mount")

    def ask(self, *words: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def write(self, files: int) -> None:
        """So many files."""
        content = os.urandom(BYTES)
        for first in range(0, files, PER_DIRECTORY):
            directory = self.base / "mnt" / f"d{self.directories}"
            directory.mkdir()
            self.directories += 1
            for number in range(min(files - first, PER_DIRECTORY)):
                fd = os.open(directory / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                os.write(fd, content)
                os.close(fd)

    def settle(self, staged: int) -> None:
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while self.ask("staged") < staged:
            if time.monotonic() > deadline:
                raise TimeoutError("not staged")
            time.sleep(0.05)

    def clear(self) -> None:
        """Away with what was measured, drained as well."""
        mnt = self.base / "mnt"
        for number in range(self.directories):
            for entry in os.scandir(mnt / f"d{number}"):
                os.unlink(entry.path)
            os.rmdir(mnt / f"d{number}")
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while any(path.name != ".acpfs" for path in (self.base / "backing").iterdir()):
            if time.monotonic() > deadline:
                raise TimeoutError("not removed")
            time.sleep(0.05)
        self.directories = 0

    def round(self, way: str, files: int) -> dict[str, Any]:
        self.ask("switch", "commits", "off")
        self.ask("switch", "streams", "off" if way == "whole drain" else "on")
        self.ask("switch", "bound", "on" if way == "whole drain" else "off")
        self.write(files // 2)
        if way == "beside streams":
            self.settle(files // 2)
            self.ask("switch", "streams", "off")
        self.write(files - files // 2)
        if way == "staged first":
            self.settle(files)
        found: dict[str, Any] = self.ask(
            "measure", files // 2 if way == "beside streams" else files + self.directories
        )
        self.clear()
        return found


def measure(arguments: argparse.Namespace) -> Report:
    """Rounds in turn; the first warms up."""
    files = arguments.files
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_us: dict[str, list[float]] = {way: [] for way in WAYS}
    threads: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        base = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        served = Served(base, arguments.transport)
        stack.callback(served.process.wait, SETTLE_TIMEOUT_S)
        stack.callback(
            subprocess.run, ["umount", "-l", str(base / "mnt")], check=False, capture_output=True
        )
        for number in range(arguments.rounds + 1):
            for way in WAYS:
                found = served.round(way, files if number else files // 4)
                if number:
                    count = files // 2 if way == "beside streams" else files
                    rates[way].append(count / found["seconds"])
                    cpu_us[way].append(found["cpu_s"] / count * 1e6)
                    threads[way].update(found["threads"])
                    print(
                        f"{way}: {rates[way][-1]:,.0f}/s, {cpu_us[way][-1]:.0f} us", file=sys.stderr
                    )
    return reported(files, rates, cpu_us, threads)


def reported(
    files: int,
    rates: dict[str, list[float]],
    cpu_us: dict[str, list[float]],
    threads: dict[str, Counter[str]],
) -> Report:
    columns = [
        "way",
        "files/s, best",
        "upper quartile",
        "median",
        "daemon's CPU per file, us (best)",
        "most of it, by kind of thread, us",
    ]
    report = Report(
        "commit_rate", f"{files:,} files of {BYTES // 1024} KiB drained to a tmpfs", columns
    )
    best = {way: -lower_quartile([-rate for rate in rates[way]]) for way in WAYS}
    for way in WAYS:
        per_file = (files // 2 if way == "beside streams" else files) * len(rates[way])
        most = ", ".join(
            f"{name} {seconds / per_file * 1e6:.0f}"
            for name, seconds in threads[way].most_common(4)
        )
        report.row(
            way,
            f"{max(rates[way]):,.0f}",
            f"{best[way]:,.0f}",
            f"{median(rates[way]):,.0f}",
            f"{min(cpu_us[way]):.0f}",
            most,
        )
        report.samples[f"{way} files/s"] = rates[way]
        report.samples[f"{way} cpu us"] = cpu_us[way]
    share = best["beside streams"] / best["staged first"]
    report.bar(
        f"commits beside streams ≥ {SHARE} of those alone (upper quartiles)",
        f"{share:.2f}",
        met=share >= SHARE,
    )
    drain = best["whole drain"]
    report.bar(
        f"the whole drain ≥ {FILES_PER_S:,} files a second",
        f"{drain:,.0f}",
        met=drain >= FILES_PER_S,
    )
    report.notes.append(
        f"{len(rates[WAYS[0]])} rounds; load average at the end {os.getloadavg()[0]:.1f}"
    )
    report.notes.append(
        f"RAM tier and backing directory on tmpfs; {files * BYTES // MIB} MiB a round"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transport", choices=("native", "libfuse"), default="native")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        be_daemon(options.serve, options.transport)
    else:
        sys.exit(measure(options).finish(keep=not options.no_record))
