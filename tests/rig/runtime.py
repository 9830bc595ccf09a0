"""What parts get as `Runtime`: the machine's own, or one whose clock a test sets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from acpfs.runtime.clock import Clock, Timers
from acpfs.runtime.given import Runtime
from acpfs.runtime.real import real_runtime

_MACHINE = real_runtime()


def clock_of(
    now: Callable[[], float] = lambda: time.monotonic(),
    wall: Callable[[], float] = lambda: time.time(),
    since_boot: Callable[[], float] = _MACHINE.clock.since_boot,
    timers: Timers = _MACHINE.clock,
) -> Clock:
    """Clocks that a test sets, and the machine's for the rest."""
    machine = _MACHINE.clock
    return Clock(now, wall, time.time_ns, machine.kernel_ns, since_boot, machine.sleep, timers)


REAL = replace(_MACHINE, clock=clock_of())
"""Of the process that tests run in; a test may set `time.time` and `time.monotonic`."""


def runtime_of(now: Callable[[], float]) -> Runtime:
    """The machine's threads, with that clock."""
    return replace(REAL, clock=clock_of(now))
