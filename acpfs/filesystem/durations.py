"""How long things took since the worker started: counted in buckets, so that a scrape sees the slow
ones and not only a mean.

In memory only: a row per closed file would cost more than the close. Used under the file system's
lock, and one observation is a bisection and two additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from acpfs.runtime.clock import Clock

BOUNDS_S = (
    0.001,
    0.005,
    0.025,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)
"""From a small file on a tmpfs to a checkpoint over a slow storage; 17 series a histogram, whatever
a mount is used for.
"""


class Distribution:
    """Durations of one kind."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """So many were at most that bound and more than the one before; the last ones were more
        than all bounds.
        """
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """One more. A clock that was set back makes no negative ones."""
        seconds = max(0.0, seconds)
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        """How long the block took, also one that failed."""
        began = self._now()
        try:
            yield
        finally:
            self.observe(self._now() - began)


class Durations:
    """Everything that is measured."""

    def __init__(self, clock: Clock) -> None:
        self.save = Distribution(clock)
        """A file that was written: from its open to its first close, which is what the training
        waits for.
        """
        self.persist = Distribution(clock)
        """From the close (or fsync) of a file until it was persisted."""
        self.load = Distribution(clock)
        """A file that was opened for reading: from its open to its last close."""
        self.fsync = Distribution(clock)
        """A call of fsync."""

    def all(self) -> dict[str, Distribution]:
        """By the names that metrics have."""
        return {
            "file_save": self.save,
            "file_persist": self.persist,
            "file_load": self.load,
            "fsync": self.fsync,
        }
