"""Nodes one after the other: when this node's first large stream of a save begins.

All nodes of a training job close their files in the same second, and storage that many clients
write to at once is often slower than with few. So each node delays by its place among the live
ones, within a window (`stagger_s`). A delay must not cost what it was meant to save: the first save
goes without, which says how long a drain takes among all others; a later one is delayed by no more
than the drain itself became shorter by that. Storage that does not suffer from many clients thus
gets one delayed save, and none after it. Knows no nodes, no files, no clock but the monotonic one.
Used under the file system's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SMALLER_SHARE = 4
"""A save of less than a quarter of the largest one's bytes is neither delayed nor measured."""
TRY_AGAIN_SAVES = 100
"""After so many that went without, since delay had brought nothing, one is delayed again: storage
changes.
"""
FIRST_SHARE = 0.5
"""Of the time that a drain takes without: the window to begin with."""
OFF_SHARE = 20
"""A window of less than a twentieth of it is none."""
CROWDED = 1.15
"""A save that takes so much longer than the best one is a sign that nodes have come too close
together.
"""
TOGETHER = 0.8
LOOK_AGAIN_S = 0.25
"""Whether somebody waits, or RAM is short, is asked so often while streams are delayed."""


class Stagger:
    """Delays, and measures what came of it."""

    def __init__(
        self,
        window_s: float,
        place: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """`window_s`: the last node begins at most so long after the first; 0: all at once.

        `place`: this node's place among those that live: 0 the first, near 1 the last.
        """
        self._window_s_max = window_s
        self._place = place
        self._clock = clock
        self._window_s = 0.0
        self._began: float | None = None
        self._delay_s = 0.0
        self._logged_bytes = 0
        self._staged_bytes = 0
        self._bytes_max = 0
        self._undelayed: float | None = None
        """Seconds that a save took which was not delayed, if it had as many bytes as the largest
        one.
        """
        self._best_s = math.inf
        """The shortest that a delayed one took, delay and all."""
        self._best_window_s = math.inf
        """The window of that one."""
        self._is_settled = False
        self._saves_without = 0
        self.delays = 0
        self.delayed_s = 0.0
        """By all saves together, as it was in the end."""

    def logged(self, size: int) -> None:
        """A large version is to be streamed."""
        if self._began is None:
            self._began = self._clock()
            self._logged_bytes = 0
            self._staged_bytes = 0
            self._delay_s = self._chosen_s()
        self._logged_bytes += size

    def staged(self, size: int) -> None:
        """One of them is on the backing directory."""
        self._staged_bytes += size
        if self._began is not None and self._staged_bytes >= self._logged_bytes:
            self._end(self._began)

    def emptied(self) -> None:
        """Nothing is left to do at all: what was not staged was left out."""
        if self._began is not None:
            self._end(self._began)

    def delay_s(self, *, pressed: bool) -> float:
        """0: begin; else so many seconds are left.

        `pressed`: somebody waits, or RAM is short, and the delay ends here.
        """
        if self._began is None or not self._delay_s:
            return 0.0
        elapsed = self._clock() - self._began
        if pressed:
            self._delay_s = min(self._delay_s, elapsed)
        return max(0.0, self._delay_s - elapsed)

    def _chosen_s(self) -> float:
        if self._undelayed is None or self._window_s * OFF_SHARE < self._undelayed:
            return 0.0
        return self._place() * self._window_s

    def _end(self, began: float) -> None:
        """A save is over."""
        took_s = self._clock() - began
        size = self._staged_bytes
        self._began = None
        if size * SMALLER_SHARE < self._bytes_max or not size:
            return
        took_s *= self._bytes_max / size if self._bytes_max else 1.0
        self._bytes_max = max(self._bytes_max, size)
        if not self._delay_s:
            self._went_without(took_s)
        else:
            self._went_with(took_s, min(self._delay_s, took_s))

    def _went_without(self, took_s: float) -> None:
        self._saves_without += 1
        if self._undelayed is None or self._saves_without > TRY_AGAIN_SAVES:
            self._saves_without = 0
            self._undelayed = took_s
            self._best_s = math.inf
            self._best_window_s = math.inf
            self._is_settled = False
            self._window_s = min(self._window_s_max, took_s * FIRST_SHARE)

    def _went_with(self, took_s: float, delayed_s: float) -> None:
        """Later than without: half the window.

        Else the nodes move together, until they are in each other's way, and one step back.
        """
        assert self._undelayed is not None
        self._saves_without = 0
        self.delays += 1
        self.delayed_s += delayed_s
        if took_s < self._best_s:
            self._best_s = took_s
            self._best_window_s = self._window_s
        if took_s > self._undelayed:
            self._window_s = min(self._window_s / 2, self._best_window_s)
        elif took_s > self._best_s * CROWDED:
            self._window_s = self._best_window_s
            self._is_settled = True
        elif not self._is_settled:
            self._window_s *= TOGETHER
