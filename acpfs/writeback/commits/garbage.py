"""Staging files that nobody needs any more: removed at once, and again later where the backing
directory did not let them go.
"""

from __future__ import annotations

import math
import threading

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower

SWEEP_AFTER_S = 1.0
"""After the first failure; then twice as long each time."""
SWEEP_AFTER_S_MAX = 60.0
AWAITED_SWEEPS = 3
"""So many sweeps the end of a drain waits for.

What is left then costs space, not correctness, and the next mount removes it.
"""


class Garbage:
    """Names to remove. Thread-safe."""

    def __init__(self, lower: Lower, pool: CallPool) -> None:
        """`pool`: threads to remove them on."""
        self._lower = lower
        self._pool = pool
        self._lock = threading.Lock()
        self._left: dict[str, None] = {}
        """In the order in which they failed."""
        self._under_way = 0
        self._sweeps = 0
        self._sweep_at = math.inf

    def remove_nowait(self, name: str) -> None:
        """Remove it on a thread of the pool."""
        with self._lock:
            self._under_way += 1
        self._pool.submit("remove staging", self.remove, name).add_done_callback(
            lambda _future: self._done()
        )

    def _done(self) -> None:
        with self._lock:
            self._under_way -= 1

    def remove(self, name: str) -> None:
        """Remove it here; a failure is kept for later."""
        try:
            self._lower.remove_staging(name)
        except OSError:
            with self._lock:
                self._left[name] = None

    @property
    def is_settled(self) -> bool:
        """Whether nobody should wait for it any longer."""
        return not self._under_way and (not self._left or self._sweeps > AWAITED_SWEEPS)

    def sweep(self, now: float) -> float:
        """Try again what failed, when it is time; returns when to come again.

        On trio's clock, from one task.
        """
        with self._lock:
            if not self._left:
                if not self._under_way:
                    self._sweeps = 0
                self._sweep_at = math.inf
                return math.inf
            if self._sweep_at == math.inf:
                self._sweep_at = now + min(SWEEP_AFTER_S_MAX, SWEEP_AFTER_S * 2.0**self._sweeps)
            if now < self._sweep_at:
                return self._sweep_at
            names = self._left
            self._left = {}
            self._sweeps = self._sweeps + 1
            self._sweep_at = math.inf
        for name in names:
            self.remove_nowait(name)
        return now + SWEEP_AFTER_S
