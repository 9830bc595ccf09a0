"""The machine itself, its clocks, threads and chance, for processes that serve."""

from __future__ import annotations

import random
import time

from acpfs.runtime.chance import Chance
from acpfs.runtime.clock import Clock, TimerThread
from acpfs.runtime.given import Runtime
from acpfs.runtime.machine import ThisMachine
from acpfs.runtime.threads import THREADS

_CLOCK_REALTIME_COARSE = 5


def real_runtime() -> Runtime:
    """Of this process; once in it, as each has a thread of its own that ends patience."""
    clock = Clock(
        time.monotonic,
        time.time,
        time.time_ns,
        _kernel_ns,
        _since_boot,
        time.sleep,
        TimerThread(THREADS),
    )
    return Runtime(clock, THREADS, ThisMachine(), Chance(random.SystemRandom()))


def _kernel_ns() -> int:
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
