"""A wall clock that steps: `time.time` and `time.time_ns` of acpfs' processes, moved by as many seconds as a file says.

CLOCK_REALTIME belongs to the whole machine and has no namespace, so a test cannot step the real one. Installed like fault points, by
ACPFS_CLOCK. What the kernel takes from its own clock (times of tier files) stays, so that clocks also disagree, which a real step spares.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "ACPFS_CLOCK"


def step(file: Path, offset_s: float) -> None:
    """The clock is that far off from now on."""
    new = file.with_suffix(".new")
    new.write_text(str(offset_s))
    new.rename(file)


def install() -> None:
    """Replace the wall clock of this process."""
    file, true_ns = os.environ[VARIABLE], time.time_ns

    def moved_ns() -> int:
        with open(file) as stream:
            return true_ns() + int(float(stream.read()) * 1e9)

    time.time_ns = moved_ns
    time.time = lambda: moved_ns() / 1e9
