"""How long the drain waits for a journal that is behind, and since when none goes on.

A journal elsewhere, and one that is begun anew after a failure, have what is left of that time:
however many are begun meanwhile, the drain waits once.
"""

from __future__ import annotations

from collections.abc import Callable


class Outage:
    """Of one mirror; used under its lock. Times are monotonic, in seconds."""

    def __init__(self, now: Callable[[], float], wait_s: float, rest_s: float) -> None:
        """`wait_s`: the drain waits no longer than that; `rest_s`: after a failure, until a journal
        is begun anew. A new worker waits for its first journal as for one that failed.
        """
        self._now = now
        self.wait_s = wait_s
        self._rest_s = rest_s
        self._is_on = True
        self._since = now()
        self._rest_until = 0.0

    @property
    def left_s(self) -> float:
        """Of the time that the drain waits; negative when it is over."""
        return self._since + self.wait_s - self._now()

    @property
    def has_rested(self) -> bool:
        """Whether a journal may be begun anew."""
        return self._now() > self._rest_until

    def failed(self, waited_s: float) -> None:
        """A journal did; `waited_s`: so long the drain was held up for it already."""
        since = self._now() - waited_s
        if not self._is_on:
            self._is_on = True
            self._since = since
        elif waited_s:
            self._since = min(self._since, since)
        self._rest_until = self._now() + self._rest_s

    def goes_elsewhere(self) -> None:
        """One that is begun there at once has a time of its own."""
        self._is_on = True
        self._since = self._now()
        self._rest_until = 0.0

    def is_over(self) -> None:
        """A journal that goes on counts."""
        self._is_on = False
