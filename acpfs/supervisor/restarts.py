"""When the next worker may start, after one has died: at once at first, later and later while they
die early, and at last not at all.

A worker that served for a while and is killed is replaced at once, however often. One that dies
early again and again will do so for ever (a request that it cannot survive, a state that it cannot
read). One that ends for want of a thread, a process, memory or a descriptor says nothing of the
next one: it does not count, and the next is tried a little later, however often. Pure; the
supervisor's.
"""

from __future__ import annotations

EARLY_S = 2.0
EARLY_DEATHS_MAX = 8
AT_ONCE = 3
"""Early deaths after which nothing is waited for yet."""
DELAY_FIRST_S = 0.05
DELAY_MAX_S = 5.0
WANT_DELAY_S = 1.0
"""After one that ended for want of a resource of the machine: others take a while to give that
back, and applications wait.
"""


class Restarts:
    """Counts deaths."""

    def __init__(self, early_deaths_max: int = EARLY_DEATHS_MAX) -> None:
        """`early_deaths_max`: so many in a row, and no other worker is started."""
        self._max = early_deaths_max
        self.early = 0
        """Early deaths in a row."""

    def delay_s(self, served_s: float, *, is_want: bool = False) -> float | None:
        """How long to wait after the death of a worker that had served so long; None: give up.

        `is_want`: the machine wanted something.
        """
        if is_want:
            return WANT_DELAY_S
        if served_s >= EARLY_S:
            self.early = 0
            return 0.0
        self.early += 1
        if self.early >= self._max:
            return None
        return (
            0.0
            if self.early <= AT_ONCE
            else min(DELAY_MAX_S, DELAY_FIRST_S * 2 ** (self.early - AT_ONCE))
        )
