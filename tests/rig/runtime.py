"""What parts get as `Runtime`: the machine's own, or one whose clock a test sets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from acpfs.runtime.clock import Clock, Timers
from acpfs.runtime.given import Runtime
from acpfs.runtime.real import real_runtime

REAL = real_runtime()
"""Of the process that tests run in."""


def clock_of(
    now: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    since_boot: Callable[[], float] = REAL.clock.since_boot,
    timers: Timers = REAL.clock,
) -> Clock:
    """Clocks that a test sets, and the machine's for the rest."""
    return Clock(now, wall, since_boot, timers)


def runtime_of(now: Callable[[], float]) -> Runtime:
    """The machine's threads, with that clock."""
    return replace(REAL, clock=clock_of(now))
