"""Time, chance, threads and descriptors of a history, in the place of the machine's.

acpfs reads clocks, draws numbers, starts threads and uses descriptors of the storage by itself at
many places. Each of them is replaced here from outside, and nowhere else in `tests/sim`. When clock,
threads and chance come through constructors, and all calls on the storage go through `Lower`, this
module is superfluous.

`install` comes before acpfs is imported for the first time: the defaults of its arguments are bound
then. So a history never runs in a process that does anything else (`tests/sim/__main__.py`).
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import trio._core._run as trio_run

REAL_CLOCK = time.perf_counter
"""For how long a run took."""
START_S = 1000.0
EPOCH_S = 1.7e9
TICK_S = 1e-6
"""Each look at a clock takes so long. Some code asks again until time has gone on."""
FIRST_FD = 1_000_000
"""Descriptors from here on are the storage's; the others are the machine's."""
DESCRIPTOR_CALLS = (
    "close",
    "dup",
    "fdatasync",
    "fstat",
    "fsync",
    "ftruncate",
    "lseek",
    "posix_fadvise",
    "pread",
    "preadv",
    "pwrite",
)
"""What acpfs calls on descriptors of the storage past `Lower`."""


class Descriptors(Protocol):
    """Serves `DESCRIPTOR_CALLS` by a method of that name each."""

    def pread(self, fd: int, size: int, offset: int) -> bytes: ...


class Machine:
    """What this process has instead of a machine."""

    def __init__(self) -> None:
        self.moment_s = START_S
        self.chance = random.Random(0)
        self.descriptors: Descriptors | None = None

    def begin(self, seed: int, descriptors: Descriptors) -> None:
        """Another history."""
        self.moment_s = START_S
        self.chance = random.Random(seed)
        self.descriptors = descriptors
        random.seed(seed)
        trio_run._r.seed(seed)

    def runnable(self) -> int:
        """Processors are idle."""
        return 0

    def tick(self) -> float:
        self.moment_s += TICK_S
        return self.moment_s

    def wall(self) -> float:
        return EPOCH_S + self.tick()


MACHINE = Machine()


def _nanoseconds(clock: Callable[[], float]) -> Callable[..., int]:
    return lambda *_which: int(clock() * 1e9)


def _token(count: int = 8) -> str:
    return f"{MACHINE.chance.getrandbits(8 * count):0{2 * count}x}"


def _bits(count: int) -> int:
    return MACHINE.chance.getrandbits(count)


def _on_descriptor(name: str) -> Callable[..., Any]:
    """The call of the machine for its own descriptors, that of the storage for the storage's."""
    real = getattr(os, name)

    def call(fd: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(fd, int) or fd < FIRST_FD:
            return real(fd, *arguments, **named)
        return getattr(MACHINE.descriptors, name)(fd, *arguments)

    return call


def install() -> None:
    """Once in a process, before acpfs is imported."""
    ticks, wall = MACHINE.tick, MACHINE.wall
    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", ticks),
        (time, "perf_counter", ticks),
        (time, "monotonic_ns", _nanoseconds(ticks)),
        (time, "time", wall),
        (time, "time_ns", _nanoseconds(wall)),
        (time, "clock_gettime", lambda _which: MACHINE.tick()),
        (time, "clock_gettime_ns", _nanoseconds(wall)),
        (secrets, "token_hex", _token),
        (secrets, "randbits", _bits),
        # tasks that are ready at the same time take turns by `_r`, which is seeded
        (trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        *((os, name, _on_descriptor(name)) for name in DESCRIPTOR_CALLS),
    ]
    for module, name, value in replaced:
        setattr(module, name, value)


def install_in_acpfs() -> None:
    """What is replaced in modules of acpfs themselves."""
    from acpfs.filesystem.content.warming import Warming
    from acpfs.ram.file_calls import RamFileCalls
    from acpfs.runtime.threads import Threads
    from acpfs.writeback.sources import spill
    from tests.sim.scheduler import (
        TurnPool,
        exception_in_turns,
        result_in_turns,
        submit_on_ram_file,
    )

    replaced: list[tuple[Any, str, Any]] = [
        (spill, "CallPool", TurnPool),
        (Future, "result", result_in_turns),
        (Future, "exception", exception_in_turns),
        (RamFileCalls, "submit", submit_on_ram_file),
        (Warming, "_begin_looking", _nothing),
        (Threads, "start", _no_thread),
    ]
    for module, name, value in replaced:
        setattr(module, name, value)


def _nothing(_self: object) -> None:
    """A thread that looks for readers from time to time; histories have none that map files."""


def _no_thread(_self: object, name: str, *_arguments: Any, **_named: Any) -> None:
    msg = f"a history has no thread {name}: give it turns in tests/sim/virtual.py"
    raise AssertionError(msg)
