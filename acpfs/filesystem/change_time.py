"""The time that a change gets which the daemon makes.

The kernel's own clock for files is up to 10 ms behind the one that programs read. With libfuse it
sets the times of touch(1) by that one itself, and nobody says that it did. So there changes get the
same clock: a file that is touched after it was written is not older than that. Knows clocks and
nothing else; thread-safe.
"""

from __future__ import annotations

from acpfs.runtime.clock import Clock

TICK_NS = 10_000_000
"""The kernel's clock goes on by at most this."""


class ChangeClock:
    """Says what time it is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ns = clock.wall_ns
        self._heard_ns = 0

    def follow_kernel(self) -> None:
        """The kernel sets times too."""
        self._now_ns = self._clock.kernel_ns

    def hear(self, set_ns: int) -> None:
        """A time was set: if it is one of just now the kernel may have set it, which may be ahead
        of its clock as programs read it.
        """
        if self._heard_ns < set_ns <= self._clock.wall_ns():
            self._heard_ns = set_ns

    def now_ns(self, not_before_ns: int = 0) -> int:
        """Nanoseconds since the epoch; not before what was heard, or given, if that is ahead by
        less than a tick.
        """
        now = self._now_ns()
        latest = now
        for ns in (self._heard_ns, not_before_ns):  # asked at each write: no generator
            if latest < ns < now + TICK_NS:
                latest = ns
        return latest
