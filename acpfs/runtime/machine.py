"""What the machine is busy with, for who stands back where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Machine(Protocol):
    """The machine that this process runs on."""

    def runnable(self) -> int:
        """Threads that run or want to, on the whole machine, now."""


class ThisMachine:
    """As the kernel tells."""

    def __init__(self, loadavg: Path = Path("/proc/loadavg")) -> None:
        self._loadavg = loadavg

    def runnable(self) -> int:
        """The fourth field; the averages before it are minutes late."""
        try:
            return int(self._loadavg.read_bytes().split()[3].partition(b"/")[0])
        except (OSError, IndexError, ValueError):
            return 0
