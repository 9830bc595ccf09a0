"""How many large files are written at a time: the fewest that bring as much as more do.

Each further writer takes from the oldest file what it brings the younger ones, so it has to be
worth something. One writer fills a disk, or a server that takes all it is given; four are needed
where each piece is a round trip, or each file has a server of its own. Nothing tells which it is
but the bytes that arrive. So twice as many are tried for a moment, and kept where they bring more;
and half as many, and kept where they bring as much. Only the first try is of all that wait: a
storage of many servers is to have all of them at work within the first save, and the oldest file,
or a large part of it, is written by then. What was found stays from one save to the next. Pure: the
clock is the caller's.
"""

from __future__ import annotations

import math

GAIN = 1.5
"""Twice as many writers bring so much more, or they are not worth it. Files that lie on servers of
their own bring twice as much. Beside others who write, what arrives is a third more or less from
one window to the next, whoever writes.
"""
WINDOW_S = 0.2
"""So long bytes are counted. The kernel's own limits work in slices of 0.1 s."""
PIECES_MIN = 1
"""Of each writer in that time, at least: a window begins and ends when one has arrived."""
QUICK_WINDOW_S = 0.02
QUICK_PIECES_MIN = 32
"""So many are enough in a shorter time: a fast storage is known soon."""
REST_WINDOWS = 8
"""Between two tries, while they bring nothing."""


class Width:
    """Used under the lock of `Scheduler`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = 1
        self.now = 1
        """Writers at a time: `_kept`, or what is tried."""
        self._rate = 0.0
        """What `_kept` brought: bytes per second; 0: nothing is known."""
        self._is_first_try = True
        self._rest = 1
        """Windows until the next try."""
        self._is_next_wider = True
        self._since: float | None = None
        """When the window began; None: with the next piece."""
        self._changed_at = -math.inf
        """When `now` became what it is."""
        self._bytes = 0
        self._pieces = 0

    def set_most(self, most: int) -> None:
        """No more writers than this from now on."""
        self._most = most
        self._kept = min(self._kept, most)
        self._settle()

    def begin(self) -> None:
        """What came before says nothing of what comes now: nobody wrote, or all stood still."""
        self._since = None

    def wrote(self, count: int, writers: int, began: float, now: float) -> bool:
        """A piece has arrived that was out since `began`. `writers`: those that could write if
        there were no limit.

        Returns whether `now` is another number than before.
        """
        before = self.now
        self._count(count, writers, began, now)
        if self.now != before:
            self._changed_at = now
        return self.now != before

    def _count(self, count: int, writers: int, began: float, now: float) -> None:
        if writers < 2:
            self._settle()  # there is nothing to choose
        elif began < self._changed_at:
            pass  # it had the bytes, and the neighbours, of another number of writers
        elif self._since is None and self._rate:
            self._since = now
            self._bytes = 0
            self._pieces = 0
        else:
            if self._since is None:
                self._since = began  # nobody else has written, so this piece counts whole
                self._bytes = 0
                self._pieces = 0
            self._bytes += count
            self._pieces += 1
            seconds = now - self._since
            if self._is_enough(seconds):
                self._judge(self._bytes / seconds, writers)
                self._since = None

    def _is_enough(self, seconds: float) -> bool:
        if seconds >= WINDOW_S:
            return self._pieces >= PIECES_MIN * self.now
        return seconds >= QUICK_WINDOW_S and self._pieces >= QUICK_PIECES_MIN

    def _settle(self) -> None:
        """Try nothing for now."""
        self.now = self._kept
        self._since = None

    def _judge(self, rate: float, writers: int) -> None:
        if self.now == self._kept:
            self._rate = rate
            self._rest -= 1
            if self._rest <= 0:
                self._try(writers, wider=self._is_next_wider)
            return
        wider = self.now > self._kept
        if rate > self._rate * GAIN if wider else rate * GAIN >= self._rate:
            self._kept = self.now
            self._rate = rate
            self._try(writers, wider=wider)  # perhaps more of that is better still
        else:
            self._is_next_wider = not wider
            self.now = self._kept
            self._rest = REST_WINDOWS

    def _try(self, writers: int, *, wider: bool) -> None:
        most = self._most if writers > self._kept else self._kept
        self.now = min(self._kept * 2, most) if wider else max(self._kept // 2, 1)
        if wider and self._is_first_try:
            self.now = max(self._kept, min(writers, most))
            self._is_first_try = False
        if self.now == self._kept:  # there is no such number, or nobody waits
            self._is_next_wider = not wider
            self._rest = REST_WINDOWS
