"""Time, chance and load of a history, in the place of the machine's; and descriptors of the
storage.

A life gets the first three through constructors, as its `Runtime`. What acpfs does past them is
replaced here, and nowhere else in `tests/sim`: calls on descriptors of the storage, and a thread's
wait for a future. When all calls on the storage go through `Lower`, the first is superfluous.

A history never runs in a process that does anything else (`tests/sim/__main__.py`).
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import trio._core._run as trio_run

from acpfs.filesystem import kernel_writes
from acpfs.ram import shortage
from acpfs.ram.tier import set_mtime
from acpfs.writeback.evidence.verify import OnlyCopyError
from acpfs.writeback.streams import streams
from tests.rig.past_lower import PAST_LOWER
from tests.sim import scale

REAL_CLOCK = time.perf_counter
"""For how long a run took."""
START_S = 1000.0
EPOCH_S = 1.7e9
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
CHANGING = ("pwrite", "ftruncate")
"""Of these; `stamp`."""
TAKES_PAGES = {"pwrite": 0, "copy_file_range": 1}
"""Calls that may make a file in RAM longer → which of their arguments is that file."""
PWRITE_OFFSET = 2


class Descriptors(Protocol):
    """Serves `DESCRIPTOR_CALLS` by a method of that name each."""

    def pread(self, fd: int, size: int, offset: int) -> bytes: ...


class Machine:
    """What this process has instead of a machine."""

    def __init__(self) -> None:
        self.moment_s = START_S
        self.chance = random.Random(0)
        self.descriptors: Descriptors | None = None
        self.stamps = False
        """Files in RAM have times of this clock, too: the kernel writes them."""
        self.is_full: Callable[[int], bool] | None = None
        """Whether the file system of a file in RAM, a descriptor, has no page left for it: others
        have filled it. None: nobody asks.
        """

    def begin(self, seed: int, descriptors: Descriptors, *, stamps: bool = False) -> None:
        """Another history."""
        self.stamps = stamps
        self.is_full = None
        kernel_writes._numbers = itertools.count()
        self.moment_s = START_S
        self.chance = random.Random(seed)
        self.descriptors = descriptors
        trio_run._r.seed(seed)

    def runnable(self) -> int:
        """Processors are idle."""
        return 0

    def now(self) -> float:
        """It stands still while anybody does something."""
        return self.moment_s

    def wall(self) -> float:
        return EPOCH_S + self.moment_s

    def sleep(self, _seconds: float) -> None:
        msg = "a history has no thread that sleeps"
        raise AssertionError(msg)

    def wall_ns(self) -> int:
        return int(self.wall() * 1e9)


MACHINE = Machine()


def stamp(fd: int) -> None:
    """A file in RAM was changed by the daemon, now."""
    if MACHINE.stamps:
        set_mtime(fd, MACHINE.wall_ns())


def _take_pages(is_full: Callable[[int], bool], name: str, arguments: tuple[Any, ...]) -> None:
    """A file in RAM is about to be written; what it has can be overwritten, come what may."""
    fd = arguments[TAKES_PAGES[name]]
    if name == "pwrite":
        end = arguments[PWRITE_OFFSET] + len(arguments[1])
        if end <= os.stat(fd).st_size:
            return
    if is_full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _on_descriptor(name: str) -> Callable[..., Any]:
    """The call of the machine for its own descriptors, that of the storage for the storage's."""
    real = getattr(os, name)
    changes = name in CHANGING
    takes_pages = name in TAKES_PAGES

    def call(fd: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(fd, int) or fd < FIRST_FD:
            if takes_pages and MACHINE.is_full is not None:
                _take_pages(MACHINE.is_full, name, (fd, *arguments))
            result = real(fd, *arguments, **named)
            if changes:
                stamp(fd)
            return result
        _check_is_named(name, sys._getframe(1).f_globals["__name__"])
        return getattr(MACHINE.descriptors, name)(fd, *arguments)

    return call


def _check_is_named(name: str, module: str) -> None:
    """Who calls on a descriptor of the storage past `Lower` is named with a reason.

    A pool is given such a call by whoever is named.
    """
    package, _dot, rest = module.partition(".")
    if package != "acpfs" or rest.startswith("backing."):
        return
    names, _why = PAST_LOWER.get(rest.replace(".", "/") + ".py", ((), ""))
    if name not in names:
        msg = f"{module} calls os.{name} on a descriptor of the storage: tests/rig/past_lower.py"
        raise AssertionError(msg)


class NotAsClosedError(OnlyCopyError):
    """Bytes in RAM do not change by themselves here: whoever says so takes others' for them."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)
        if "not those that were closed" in text:
            raise AssertionError(text)


def install() -> None:
    """Once in a process."""
    from tests.sim import rounds
    from tests.sim.scheduler import exception_in_turns, result_in_turns

    scale.install()
    replaced: list[tuple[Any, str, Any]] = [
        # tasks that are ready at the same time take turns by `_r`, which is seeded
        (trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        *rounds.replaced(),
        # the machine's own limit would make it another history
        (shortage, "headroom_bytes", lambda: None),
        (streams, "OnlyCopyError", NotAsClosedError),
        (Future, "result", result_in_turns),
        (Future, "exception", exception_in_turns),
        *((os, name, _on_descriptor(name)) for name in (*DESCRIPTOR_CALLS, "copy_file_range")),
    ]
    for module, name, value in replaced:
        setattr(module, name, value)
