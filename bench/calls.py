"""What the file system's own calls cost a thread, without FUSE, transport and drain: processor time
in microseconds per call, as JSON.

Usage: python -m bench.calls [--files N] [--rounds N]. One process, the real parts over directories
below $TMPDIR, engine held. A thread's processor time hardly depends on who else uses the machine,
so this tells two builds apart where nothing else can. `bench.compiled` runs it. With --count: how
many Python functions of acpfs are called, in how many modules, for a write of 1 MiB, a close and a
small file, which nobody else who uses the machine changes; in how many transactions of the state
one closed file comes to be persisted; and what a cold read and a small file until it is persisted
take, where threads find more or less to do at a time. With --list NAME ("close", "cold read", …):
which functions these are, in the order in which they are called, by thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import trio

import acpfs
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

CONTENT = bytes(4096)
PERSISTED_FILES = 200
COLD_BYTES = 128 << 10
COLD_FILES = ("cold1", "cold2", "cold3")
OURS = f"{Path(acpfs.__file__).parent}/"


class Calls:
    """The same files again and again; nanoseconds of this thread by call."""

    def __init__(self, w: World, files: int) -> None:
        self._fs = w.fs
        self._run = w.fs.steps.run
        self._files = files
        self.spent: dict[str, list[float]] = {}

    def _timed(self, name: str, count: int, work: Callable[[], None]) -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD)
        start = time.thread_time_ns()
        work()
        spent = time.thread_time_ns() - start
        after = resource.getrusage(resource.RUSAGE_THREAD)
        system = after.ru_stime - before.ru_stime
        self.spent.setdefault(name, []).append(spent / count / 1000)
        self.spent.setdefault(f"{name}, system", []).append(system / count * 1e6)

    def round(self, number: int) -> None:
        directory = self._run(self._fs.mkdir(ROOT, b"round-%d" % number, 0o755, CALLER)).ino
        names = [b"f%d" % n for n in range(self._files)]
        inos: list[Ino] = []
        self._timed("create+write+close", self._files, lambda: self._create(directory, names, inos))
        self._timed("stat", self._files * 5, lambda: self._stat(inos * 5))
        self._timed("unlink", self._files, lambda: self._unlink(directory, names))

    def _create(self, directory: Ino, names: list[bytes], inos: list[Ino]) -> None:
        run = self._run
        fs = self._fs
        for name in names:
            opened, attributes = run(fs.create(directory, name, 0o644, os.O_WRONLY, CALLER))
            run(fs.write(opened.handle, 0, CONTENT))
            run(fs.flush(opened.handle, 1))
            run(fs.release(opened.handle))
            inos.append(attributes.ino)

    def _stat(self, inos: list[Ino]) -> None:
        run = self._run
        fs = self._fs
        for ino in inos:
            run(fs.getattr(ino))

    def _unlink(self, directory: Ino, names: list[bytes]) -> None:
        run = self._run
        fs = self._fs
        for name in names:
            run(fs.unlink(directory, name))


class Counted:
    """Python functions of acpfs that are called in a block."""

    def __init__(self) -> None:
        self._called = itertools.count()  # one call of C: threads lose none
        self._before = 0
        self.modules = set[str]()
        self.transactions = 0
        """Of the state; read where no other thread is at work."""
        self.lines: list[str] = []
        """One for each call, for people."""
        self._depth: dict[int, int] = {}
        """By thread."""

    @property
    def calls(self) -> int:
        """How many there were; ends the count."""
        return next(self._called) - self._before

    def begin_again(self) -> None:
        """Forget what was seen."""
        self._before = next(self._called) + 1
        self.modules.clear()
        self.transactions = 0
        self.lines.clear()

    def see(self, frame: FrameType, event: str, _argument: object) -> None:
        """For `setprofile`."""
        name = frame.f_code.co_filename
        if not name.startswith(OURS):
            return
        thread = threading.get_ident()
        depth = self._depth.get(thread, 0)
        if event == "call":
            next(self._called)
            self.modules.add(name)
            self.transactions += name.endswith("ram/state.py") and frame.f_code.co_name == "_end"
            called = f"{'  ' * depth}{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
            place = f"{name.removeprefix(OURS)}:{frame.f_lineno}"
            self.lines.append(f"{threading.current_thread().name:12} {called}  {place}")
            self._depth[thread] = depth + 1
        elif event == "return":  # by an error, too
            self._depth[thread] = max(0, depth - 1)

    def __enter__(self) -> Counted:
        sys.setprofile(self.see)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)


def count_in_threads(files: int, lists: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    """What takes the engine's threads and those of the pools, too: a small file from create until
    it is persisted; what one closed file still takes; the first look at a file, and its bytes.

    `lists`: gets the calls.
    """
    seen = Counted()

    async def scenario(base: Path) -> dict[str, dict[str, float]]:
        counts: dict[str, dict[str, float]] = {}
        async with world(base, budget_bytes=1 << 30) as w:
            run = w.fs.steps.run
            fs = w.fs
            for cold in COLD_FILES:  # first: a young listing would not have them yet
                (w.backing / cold).write_bytes(bytes(COLD_BYTES))
            for names in ([b"first"], [b"f%d" % number for number in range(files)]):
                seen.begin_again()
                for name in names:
                    opened, _attributes = run(fs.create(ROOT, name, 0o644, os.O_WRONLY, CALLER))
                    run(fs.write(opened.handle, 0, CONTENT))
                    run(fs.flush(opened.handle, 1))
                    run(fs.release(opened.handle))
                await w.drained()
            counts["create to persisted"] = {
                "calls": round(seen.calls / files),
                "modules": len(seen.modules),
                "files": files,
            }
            lists["create to persisted"] = list(seen.lines)
            opened, _attributes = run(fs.create(ROOT, b"alone", 0o644, os.O_WRONLY, CALLER))
            run(fs.write(opened.handle, 0, CONTENT))
            seen.begin_again()
            run(fs.flush(opened.handle, 1))
            run(fs.release(opened.handle))
            await w.drained()
            transactions = seen.transactions
            counts["close to persisted"] = {"calls": seen.calls, "transactions": transactions}
            lists["close to persisted"] = list(seen.lines)
            for cold in COLD_FILES:
                seen.begin_again()
                node = run(fs.lookup(ROOT, cold.encode()))
                opened = run(fs.open(node.ino, os.O_RDONLY, CALLER))
                run(fs.read(opened.handle, 0, COLD_BYTES))
                counts["cold read"] = {"calls": seen.calls, "modules": len(seen.modules)}
                lists["cold read"] = list(seen.lines)
                run(fs.release(opened.handle))
        return counts

    threading.setprofile(
        seen.see
    )  # threads that begin from now on; the pools' begin with the world
    try:
        with tempfile.TemporaryDirectory() as base, seen:
            return trio.run(scenario, Path(base))
    finally:
        threading.setprofile(None)


def count_at_once(lists: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    """What the calls of one thread take, the third time, when everything is known that can be.

    `lists`: gets them.
    """

    async def scenario(base: Path) -> dict[str, dict[str, float]]:
        counts: dict[str, dict[str, float]] = {}
        async with world(base, budget_bytes=1 << 30) as w:
            fs = w.fs
            run = w.fs.steps.run
            for name in (b"first", b"second", b"third"):
                with Counted() as life:
                    opened, attributes = run(fs.create(ROOT, name, 0o644, os.O_WRONLY, CALLER))
                    run(fs.write(opened.handle, 0, CONTENT))
                    run(fs.flush(opened.handle, 1))
                    run(fs.release(opened.handle))
                    run(fs.getattr(attributes.ino))
                with Counted() as unlink:
                    run(fs.unlink(ROOT, name))
                opened, attributes = run(fs.create(ROOT, name, 0o644, os.O_WRONLY, CALLER))
                run(fs.write(opened.handle, 0, bytes(1 << 20)))
                with Counted() as write:
                    run(fs.write(opened.handle, 1 << 20, bytes(1 << 20)))
                with Counted() as close:
                    run(fs.flush(opened.handle, 1))
                    run(fs.release(opened.handle))
                run(fs.unlink(ROOT, name))
                for what, seen in (
                    ("write of 1 MiB", write),
                    ("close", close),
                    ("create to stat", life),
                    ("unlink", unlink),
                ):
                    counts[what] = {"calls": seen.calls, "modules": len(seen.modules)}
                    lists[what] = seen.lines
        return counts

    with tempfile.TemporaryDirectory() as base:
        return trio.run(scenario, Path(base))


def measure(files: int, rounds: int) -> dict[str, list[float]]:
    async def scenario(base: Path) -> dict[str, list[float]]:
        async with world(base, budget_bytes=1 << 30) as w:
            calls = Calls(w, files)
            for number in range(rounds + 1):
                calls.round(number)
        return {name: samples[1:] for name, samples in calls.spent.items()}  # the first warms up

    with tempfile.TemporaryDirectory() as base:
        return trio.run(scenario, Path(base))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--list", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.count or arguments.list:
        calls: dict[str, list[str]] = {}
        counts = {**count_at_once(calls), **count_in_threads(PERSISTED_FILES, calls)}
        print("\n".join(calls[arguments.list]) if arguments.list else json.dumps(counts))
    else:
        print(json.dumps(measure(arguments.files, arguments.rounds)))
