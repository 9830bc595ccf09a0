"""How much of the budget the machine has not got right now: others use memory too.

Reads MemAvailable and the room in this process's memory control group, seldom enough to cost
nothing. Used under the file system's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from acpfs.ram.memory import headroom_bytes
from acpfs.runtime.clock import Clock

LOOK_INTERVAL_S = 0.1
GROUP_INTERVAL_S = 1.0
"""Control groups are several files to read, 0.3 ms."""
KEPT_BYTES_MIN = 256 << 20
KEPT_SHARE = 64
"""So much memory, or this part of the machine's, is left to others whatever the budget says: the
kernel kills when there is none.
"""


class Shortage:
    """Memory that the budget counts on and that is not there."""

    def __init__(self, clock: Clock, available: Callable[[], int] | None = None) -> None:
        """`available`: bytes that may still be used without hurting others."""
        self._now = clock.now
        self._available = available or available_bytes
        self._bytes = 1 << 62
        self._group_bytes = 1 << 62
        self._looked_at = 0.0
        self._group_at = 0.0

    def withheld_bytes(self, free: int) -> int:
        """How much of `free` bytes of the budget must not be used now."""
        # Where there is no descriptor left to look with, what was seen last counts: who asks is
        # about to hold writers, and has to.
        with contextlib.suppress(OSError):
            self._look()
        return max(0, free - max(0, min(self._bytes, self._group_bytes)))

    def _look(self) -> None:
        now = self._now()
        if now - self._looked_at >= LOOK_INTERVAL_S:
            self._looked_at = now
            self._bytes = self._available()
        if now - self._group_at >= GROUP_INTERVAL_S:
            headroom = headroom_bytes()
            self._group_at = now
            self._group_bytes = 1 << 62 if headroom is None else headroom


def available_bytes() -> int:
    """What may still be used without hurting others; negative when it is too much already."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _colon, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return values["MemAvailable"] - max(KEPT_BYTES_MIN, values["MemTotal"] // KEPT_SHARE)
