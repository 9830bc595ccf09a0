"""Staging files that nobody needs any more: removed at once, and again later where the backing directory did not let them go."""

from __future__ import annotations

import math

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower

SWEEP_AFTER_S = 60.0
"""They cost space, not correctness."""


class Garbage:
    """Names to remove. Thread-safe without a lock: a set's `add` and `pop` are."""

    def __init__(self, lower: Lower, pool: CallPool) -> None:
        """`pool`: threads to remove them on."""
        self._lower, self._pool = lower, pool
        self._left: set[str] = set()
        self._sweep_at = math.inf

    def remove_nowait(self, name: str) -> None:
        """Remove it on a thread of the pool."""
        self._pool.submit("remove staging", self.remove, name)

    def remove(self, name: str) -> None:
        """Remove it here; a failure is kept for later."""
        try:
            self._lower.remove_staging(name)
        except OSError:
            self._left.add(name)

    def sweep(self, now: float) -> float:
        """Try again what failed, when it is time; returns when to come again. On trio's clock, from one task."""
        if not self._left:
            self._sweep_at = math.inf
        elif self._sweep_at == math.inf:
            self._sweep_at = now + SWEEP_AFTER_S
        elif now >= self._sweep_at:
            self._sweep_at = math.inf
            while self._left:
                self.remove_nowait(self._left.pop())
        return self._sweep_at
