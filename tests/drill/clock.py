"""A wall clock that steps: `time.time`, `time.time_ns` and `time.clock_gettime_ns` of acpfs'
processes.

They are moved by as many seconds as a file says.

CLOCK_REALTIME belongs to the whole machine and has no namespace, so a test cannot step the real
one. Installed like fault points, by ACPFS_CLOCK. What the kernel takes from its own clock (times of
tier files) stays, so that clocks also disagree, which a real step spares.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "ACPFS_CLOCK"
CLOCK_REALTIME_COARSE = 5
WALL_CLOCKS = (time.CLOCK_REALTIME, CLOCK_REALTIME_COARSE)


def step(file: Path, offset_s: float) -> None:
    """The clock is that far off from now on."""
    new = file.with_suffix(".new")
    new.write_text(str(offset_s))
    new.rename(file)


def install() -> None:
    """Replace the wall clock of this process."""
    file = os.environ[VARIABLE]
    true_ns = time.time_ns
    true_clock_ns = time.clock_gettime_ns

    def offset_ns() -> int:
        with open(file) as stream:
            return int(float(stream.read()) * 1e9)

    def moved_ns() -> int:
        return true_ns() + offset_ns()

    def moved_clock_ns(clock: int) -> int:
        return true_clock_ns(clock) + (offset_ns() if clock in WALL_CLOCKS else 0)

    time.time_ns = moved_ns
    time.time = lambda: moved_ns() / 1e9
    time.clock_gettime_ns = moved_clock_ns
