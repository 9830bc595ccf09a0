"""Time as it is given to everything from `ram` to `worker`, and what is to be done at a later time.

Nothing there reads a clock of the machine by itself: a history of `tests/sim` has one of its own.
A clock measures; what came before what is said by `serial`, since a clock may stand still between
two looks.

Owns the thread that ends patience. Does not know for what anybody waits. Thread-safe.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Protocol, final

from acpfs.runtime.threads import Threads


class Timer:
    """Something short that is to be done later."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None] | None = None) -> None:
        self.action = action

    def stop(self) -> None:
        """Too late is fine for who sets a result: that is set only once."""
        self.action = None


class Timers(Protocol):
    """Who does it then."""

    def start(self, delay_s: float, timer: Timer) -> None:
        """Run the timer's action after so long, if it has one then."""


class TimerThread:
    """One thread for all ends of patience of a process, started with the first."""

    _SWEEP_AT = 4096
    """Stopped timers are swept out when the heap has grown to this,

    then to twice what was left.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._changed = threads.condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = itertools.count()
        self._sweep_at = self._SWEEP_AT
        self._running = False

    def __len__(self) -> int:
        """Timers that are kept, also stopped ones."""
        return len(self._heap)

    def start(self, delay_s: float, timer: Timer) -> None:
        """Run the timer's action on the timer thread after `delay_s`."""
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + delay_s, next(self._number), timer))
            if len(self._heap) > self._sweep_at:
                self._heap = [entry for entry in self._heap if entry[2].action is not None]
                heapq.heapify(self._heap)
                self._sweep_at = max(self._SWEEP_AT, 2 * len(self._heap))
            if not self._running:
                self._running = True
                self._threads.start("patience", self._work)
            elif self._heap[0][2] is timer:
                self._changed.notify()

    def _next(self) -> Timer:
        with self._changed:
            while True:
                while self._heap and self._heap[0][2].action is None:
                    heapq.heappop(self._heap)
                left_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(left_s)

    def _work(self) -> None:
        while True:
            action = self._next().action
            if action is not None:
                action()
                del action


@final
class Clock:
    """The clocks of one worker.

    Each of them is an attribute that is called, so that a look at a real one costs no more than
    a look at the machine's.
    """

    __slots__ = ("kernel_ns", "now", "serial", "since_boot", "sleep", "start", "wall", "wall_ns")

    def __init__(
        self,
        now: Callable[[], float],
        wall: Callable[[], float],
        wall_ns: Callable[[], int],
        kernel_ns: Callable[[], int],
        since_boot: Callable[[], float],
        sleep: Callable[[float], None],
        timers: Timers,
    ) -> None:
        self.now = now
        """Seconds; no step of the wall clock touches them. The same in all processes of a boot."""
        self.wall = wall
        """Seconds since the epoch."""
        self.wall_ns = wall_ns
        """The same in nanoseconds."""
        self.kernel_ns = kernel_ns
        """The one that the kernel gives files their times by: up to a tick behind."""
        self.since_boot = since_boot
        """Seconds; they go on while the machine sleeps."""
        self.sleep = sleep
        """For a thread that nobody else needs: those of pools wait for futures."""
        self.serial: Callable[[], int] = itertools.count(1).__next__
        """A larger number each time: for what came before what."""
        self.start = timers.start
        """As `Timers` says."""

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Callable[[], None]:
        """Run something short after so long, on the thread that ends patience.

        Returns what stops it, if it is not too late.
        """
        timer = Timer(action)
        self.start(delay_s, timer)
        return timer.stop

    def after(self, delay_s: float) -> Future[None]:
        """Done after so long; no thread waits meanwhile.

        Whoever goes on then does something short on the thread that ends patience.
        """
        passed: Future[None] = Future()
        passed.set_running_or_notify_cancel()
        self.call_later(delay_s, partial(passed.set_result, None))
        return passed

    def at_most(self, awaited: Future[Any], delay_s: float) -> Future[None]:
        """Done when that is, whatever its outcome, or after so long, as `after` is.

        Who leaves cancels neither.
        """
        either: Future[None] = Future()
        either.set_running_or_notify_cancel()

        def end(_done: object = None) -> None:
            with contextlib.suppress(InvalidStateError):  # the other one was quicker
                either.set_result(None)

        stop = self.call_later(delay_s, end)
        either.add_done_callback(lambda _either: stop())
        awaited.add_done_callback(end)
        return either
