"""When each rank was heard last, and when its node last saw its process work: who is silent, and
who only holds its interpreter.

A rank that writes to a slow storage, or computes in C, may say nothing for minutes: its member's
thread waits for the interpreter's lock. Whoever is on its node sees that (`working`), and vouches
for it. Where nobody does, the node may be gone. Pure; time is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from acpfs.training.coordinator.limits import Limits


class Hearing:
    """Of one coordinator."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._heard: dict[int, float] = {}
        self._vouched: dict[int, float] = {}
        self._looked_at = -math.inf

    def look(self, now: float) -> None:
        """Begin an event.

        When this process stood still, what members said meanwhile waits in its sockets: nobody was
        silent.
        """
        if now - self._looked_at > 2 * self._limits.beat_s:
            self.begin(self._heard, now)
        self._looked_at = now

    def begin(self, ranks: Iterable[int], now: float) -> None:
        """Count anew for these."""
        self._heard = dict.fromkeys(ranks, now)

    def heard(self, rank: int, now: float) -> None:
        """It said something."""
        self._heard[rank] = now

    def vouched(self, ranks: Iterable[int], now: float) -> None:
        """Somebody on their node sees them work."""
        self._vouched.update(dict.fromkeys(ranks, now))

    def silent(self, ranks: Iterable[int], patience_s: float, now: float) -> list[int]:
        """Those that have said nothing for so long, and for whom nobody has vouched."""
        return [
            rank
            for rank in ranks
            if now - max(self._last(rank, now), self._vouched.get(rank, -math.inf)) > patience_s
        ]

    def unheard(self, ranks: Iterable[int], patience_s: float, now: float) -> list[int]:
        """Those that have said nothing for so long, whoever vouches for them."""
        return [rank for rank in ranks if now - self._last(rank, now) > patience_s]

    def quiet(self, ranks: Iterable[int], now: float) -> list[int]:
        """Those at whom somebody should look: a beat is missing."""
        return self.unheard(ranks, 2 * self._limits.beat_s, now)

    def busy(self, ranks: Iterable[int], now: float) -> list[int]:
        """Those that say nothing, but are seen to work."""
        return [
            rank
            for rank in self.quiet(ranks, now)
            if now - self._vouched.get(rank, -math.inf) <= self._limits.silent_s
        ]

    def speaking(self, ranks: Iterable[int], now: float) -> frozenset[int]:
        """Those that have said something lately."""
        return frozenset(
            rank for rank in ranks if now - self._last(rank, now) <= self._limits.silent_s
        )

    def _last(self, rank: int, now: float) -> float:
        return self._heard.get(rank, now)
