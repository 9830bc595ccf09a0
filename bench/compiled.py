"""The same daemon compiled to machine code, or on other interpreters: processor time per create,
stat and unlink, and parallel stats.

Usage: python -m bench.compiled NAME=PYTHON[:TREE] NAME=PYTHON[:TREE] … [--files N] [--rounds N]
[--transport T] [--calls-only] [--keep]. The first is the yardstick. PYTHON is an interpreter with
acpfs's dependencies; TREE is a directory with another `acpfs` in it and nothing else, for example
one that mypyc has compiled (default: this one). All daemons run side by side on one tmpfs and are
measured in turns. `--calls-only` leaves the daemons out and measures the file system alone
(`bench.calls`): that works on the most crowded machine.

Processor time is the daemon's own, user and system. It depends less on others than wall time does,
but it does: with a load of 30 on two cores a daemon took ten times as much per file as with one of
7, and then only `--calls-only` tells builds apart. A stat is asked of the daemon each time
(AT_STATX_FORCE_SYNC), so that no cache of the kernel answers it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import places
from bench.native import SMALL_BYTES
from bench.record import Report, lower_quartile
from tests.rig.mounts import AcpfsMount

ROOT = Path(__file__).parents[1]
TICKS_S = os.sysconf("SC_CLK_TCK")
AT_FDCWD = -100
AT_STATX_FORCE_SYNC = 0x2000
STATX_BASIC_STATS = 0x7FF
PROCESSES = 4
STARTS = 5
"""Mounts that are timed, of each."""
CALL_ROUNDS = 3
"""In one process of `bench.calls`; there is one for each round here."""


@dataclass(frozen=True)
class Variant:
    """One way to run the daemon."""

    name: str
    python: str
    tree: Path

    @classmethod
    def parse(cls, text: str) -> Variant:
        name, _, rest = text.partition("=")
        python, _, tree = rest.partition(":")
        return cls(name, os.path.abspath(python), Path(tree or ROOT).resolve())

    @contextlib.contextmanager
    def mounted(self, base: Path, transport: str) -> Iterator[AcpfsMount]:
        directory = base / self.name
        for part in (directory, directory / "backing"):
            part.mkdir()
        options: dict[str, Any] = {
            "python": self.python,
            "environment": self.environment,
            "watchdog_s": places.WATCHDOG_S,
        }
        mount = AcpfsMount(directory / "backing", directory / "mnt", transport, **options, ram="2G")
        with mount:
            yield mount

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{self.tree}:{ROOT}",
            "PYTHONSAFEPATH": "1",
        }  # or the working directory would come first

    def calls(self, files: int) -> dict[str, list[float]]:
        """Microseconds of processor time by call of the file system."""
        command = [
            self.python,
            "-m",
            "bench.calls",
            "--files",
            str(files),
            "--rounds",
            str(CALL_ROUNDS),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found: dict[str, list[float]] = json.loads(done.stdout)
        return found


def user_and_system(pid: int) -> tuple[float, float]:
    """Seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS_S, int(fields[12]) / TICKS_S


# -- works: each takes a directory of the mount and a number of files


def create(directory: Path, files: int) -> None:
    content = os.urandom(SMALL_BYTES)
    directory.mkdir()
    for number in range(files):
        fd = os.open(directory / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, content)
        os.close(fd)


def stat(directory: Path, files: int) -> None:
    statx = ctypes.CDLL(None, use_errno=True).statx
    answer = ctypes.create_string_buffer(256)
    for number in range(files):
        path = os.fsencode(directory / f"f{number}")
        if statx(AT_FDCWD, path, AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, answer) != 0:
            raise OSError(ctypes.get_errno(), f"statx of {path!r}")


def stat_in_parallel(directory: Path, files: int) -> None:
    """Each process all of them; forked, so that no start of an interpreter is measured."""
    processes = [
        multiprocessing.get_context("fork").Process(target=stat, args=(directory, files))
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError("a reader failed")


def unlink(directory: Path, files: int) -> None:
    for number in range(files):
        os.unlink(directory / f"f{number}")


WORKS: dict[str, Callable[[Path, int], None]] = {
    "create+write+close": create,
    "stat": stat,
    f"stat, {PROCESSES} processes": stat_in_parallel,
    "unlink": unlink,
}
Key = tuple[str, str, str]
"""Work, measure (user, system, wall, drained), variant."""


def measure(arguments: argparse.Namespace) -> Report:
    variants = [Variant.parse(text) for text in arguments.variants]
    names = [variant.name for variant in variants]
    made = Report(
        arguments.record,
        f"{arguments.files:,} files of 4 KiB: {', '.join(names)}",
        ["work", "measure, µs per file", *names, *(f"{names[0]} ÷ {name}" for name in names[1:])],
        program="compiled",
    )
    add_calls(made, variants, arguments.files, arguments.rounds)
    if not arguments.calls_only:
        add_daemons(made, variants, arguments)
    made.notes.append(
        f"lower quartile (and best) of {arguments.rounds} rounds in turn after a warm-up; times "
        "are under load as the machine was"
    )
    return made


def add_calls(made: Report, variants: list[Variant], files: int, rounds: int) -> None:
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for variant in random.Random(number).sample(variants, len(variants)):
            for call, samples in variant.calls(files).items():
                found.setdefault(call, {}).setdefault(variant.name, []).extend(samples)
    for call, by_name in found.items():
        add_row(
            made,
            call,
            "file system alone",
            [(variant.name, by_name[variant.name]) for variant in variants],
        )
    made.notes.append(
        f"file system alone: a thread's processor time by `bench.calls`, {CALL_ROUNDS} samples a "
        "round"
    )


def add_daemons(made: Report, variants: list[Variant], arguments: argparse.Namespace) -> None:
    found: dict[Key, list[float]] = {}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        base = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        starts = {
            variant.name: [start_s(variant, base, arguments.transport) for _ in range(STARTS)]
            for variant in variants
        }
        mounts = {
            v.name: stack.enter_context(v.mounted(base, arguments.transport)) for v in variants
        }
        for number in range(arguments.rounds + 1):
            for name in random.Random(number).sample(list(mounts), len(mounts)):
                samples = one_round(mounts[name], number, arguments.files)
                for (work, what), value in samples.items():
                    if number:  # the first warms up
                        found.setdefault((work, what, name), []).append(value)
    for work in WORKS:
        for what in ("user", "system", "until drained", "wall"):
            add_row(
                made,
                work,
                what,
                [(variant.name, found[work, what, variant.name]) for variant in variants],
            )
    best = [min(samples) for samples in starts.values()]
    made.row(
        "acpfs mount",
        "wall, s",
        *(f"{seconds:.2f}" for seconds in best),
        *(f"{best[0] / seconds:.2f}" for seconds in best[1:]),
    )
    made.samples |= {f"acpfs mount {name} s": samples for name, samples in starts.items()}
    made.notes.append(f"the daemons' transport: {arguments.transport}")
    made.notes.append(
        "user and system: the daemon's, until the last call returned; until drained: until all "
        f"was persisted; mount: best of {STARTS}"
    )


def add_row(made: Report, work: str, what: str, samples: list[tuple[str, list[float]]]) -> None:
    quartiles = [lower_quartile(values) for _, values in samples]
    cells = [
        f"{quartile:.1f} ({min(values):.1f})"
        for quartile, (_, values) in zip(quartiles, samples, strict=True)
    ]
    made.row(
        work,
        what,
        *cells,
        *(f"{quartiles[0] / quartile:.2f}" if quartile else "–" for quartile in quartiles[1:]),
    )
    made.samples |= {f"{work}, {what}, {name} us": values for name, values in samples}


def start_s(variant: Variant, base: Path, transport: str) -> float:
    """Seconds that `acpfs mount` takes."""
    started = time.perf_counter()
    with variant.mounted(base, transport) as mount:
        seconds = time.perf_counter() - started
        mount.umount()
    subprocess.run(["rm", "-rf", str(base / variant.name)], check=True)
    return seconds


def one_round(mount: AcpfsMount, number: int, files: int) -> dict[tuple[str, str], float]:
    """Microseconds per file by work and measure."""
    found: dict[tuple[str, str], float] = {}
    pid = mount.pid
    directory = mount.path / f"round-{number}"
    for work, go in WORKS.items():
        before = user_and_system(pid)
        started = time.perf_counter()
        go(directory, files)
        wall = time.perf_counter() - started
        after = user_and_system(pid)
        mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        drained = user_and_system(pid)
        each = files * (PROCESSES if go is stat_in_parallel else 1)
        found |= {
            (work, "user"): (after[0] - before[0]) / each * 1e6,
            (work, "system"): (after[1] - before[1]) / each * 1e6,
            (work, "wall"): wall / each * 1e6,
            (work, "until drained"): (sum(drained) - sum(before)) / each * 1e6,
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", metavar="NAME=PYTHON[:TREE]")
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transport", default="native-direct")
    parser.add_argument(
        "--calls-only", action="store_true", help="no daemons: the file system's calls alone"
    )
    parser.add_argument("--record", default="compiled", help="name of the result")
    parser.add_argument("--keep", action="store_true", help="save the result")
    options = parser.parse_args()
    sys.exit(measure(options).finish(keep=options.keep))
