"""What a history does where trio would wait for files: threads have turns, and time goes on.

In each of trio's rounds, before its tasks go on, each life's threads have a turn. Where no task can
go on there is no round: turns follow each other until one can, and when no thread has a turn to
come, time goes on until somebody is due. What threads have to tell tasks comes after each turn.

So nothing here waits for a file: trio's own ways to be woken are not used (`install`). Owns trio's
clock. Knows of lives only that they have turns, and timers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any, Protocol

import trio
import trio._core._run as trio_run
from trio import sleep as _sleep
from trio._core._io_epoll import EpollIOManager
from trio._core._wakeup_socketpair import WakeupSocketpair

from tests.sim.virtual import MACHINE

ROUNDS_MAX = 300
"""Of tasks, at one moment; more than a write in the passthrough lane takes."""
STEP_MIN_S = 0.0005
TICK_S = 2.0**-20
"""Time is a whole number of these: sums and differences of it are exact, and what is due is over.

Else whoever waits for the rest of a time could ask for ever for less than the clock can tell.
"""
STEP_MAX_S = 5.0


class Takes(Protocol):
    """Those who have turns: one life, or several."""

    def step(self) -> bool:
        """One of the threads has a turn; whether one could."""
        ...

    def is_anyone_ready(self) -> bool:
        """Whether a turn is to come, also where none could have one now."""
        ...

    def next_s(self) -> float:
        """For how long no timer is due."""
        ...


class MachineClock(trio.abc.Clock):
    """Trio's time is the machine's, to the last bit: a difference of them may be waited for."""

    def start_clock(self) -> None:
        """It goes on by itself."""

    def current_time(self) -> float:
        return MACHINE.moment_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """`Rounds` have it pass."""
        return 0.0


class Rounds:
    """Those of one history."""

    current: Rounds | None = None

    def __init__(self, takes: Takes, failed: Callable[[], None]) -> None:
        """`failed`: ends the history; called by trio's thread, when no task runs."""
        self._takes = takes
        self._failed = failed
        self._idle_rounds = 0
        self._naps: list[tuple[float, int, _Nap]] = []
        self._looking: list[_Nap] = []
        """Whose time is over, and who looks before anything goes on."""
        self._numbers = itertools.count()
        self.failure: BaseException | None = None
        """By which turns ended."""
        Rounds.current = self

    def come(self) -> None:
        """Before one of trio's rounds."""
        runner = trio_run.GLOBAL_RUN_CONTEXT.runner
        self._hear(runner)
        if self.failure is not None:
            return
        try:
            self._go_on(runner)
        except BaseException as failure:  # noqa: BLE001 - told by who runs the history
            self.failure = failure
            self._failed()

    def _go_on(self, runner: trio_run.Runner) -> None:
        """Until a task can go on; one turn at least, where there is one."""
        takes = self._takes
        next_deadline = runner.deadlines.next_deadline
        self._idle_rounds += 1
        while True:
            did = takes.step()
            self._hear(runner)
            is_awaited = did or takes.is_anyone_ready()
            if is_awaited:
                self._idle_rounds = 0
            others = bool(runner.runq) or next_deadline() <= MACHINE.moment_s
            if (others or self._looking) and self._idle_rounds <= ROUNDS_MAX:
                if others or self._has_found():
                    self._wake_looking()
                    return
                self._idle_rounds += 1  # as if there had been a round
                continue
            if not is_awaited:
                self._let_time_pass(runner)

    def _let_time_pass(self, runner: trio_run.Runner) -> None:
        """Nobody can do anything before that: until a task, or a timer, is due."""
        tasks_s = runner.deadlines.next_deadline() - MACHINE.moment_s
        naps = self._naps
        while naps and naps[0][2].task is None:
            heapq.heappop(naps)
        nap_s = naps[0][0] - MACHINE.moment_s if naps else math.inf
        least_s = max(STEP_MIN_S, min(tasks_s, nap_s, self._takes.next_s(), STEP_MAX_S))
        MACHINE.moment_s += math.ceil(least_s / TICK_S) * TICK_S
        self._idle_rounds = 0
        self._wake()

    async def until(self, found: Callable[[], bool], every_s: float) -> None:
        """Until that is so, when it is asked after each such time.

        A task that is alone then, and asks in vain, costs no round; whoever else has a turn has it
        as if there had been one.
        """
        while not found():
            await self.nap(every_s, found)

    async def nap(self, seconds: float, found: Callable[[], bool] | None = None) -> None:
        """As `trio.sleep`, for a tenth of the price: no scope ends by an exception.

        `found`: see `until`.
        """
        await self.rest(_Nap(trio.lowlevel.current_task(), seconds, found))

    async def rest(self, nap: _Nap) -> None:
        """Until its time is over, or it is woken."""
        if nap.seconds < math.inf:
            self._put(nap)

        def cancelled(_raise: object) -> trio.lowlevel.Abort:
            nap.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(cancelled)

    def _put(self, nap: _Nap) -> None:
        heapq.heappush(self._naps, (MACHINE.moment_s + nap.seconds, next(self._numbers), nap))

    def _wake(self) -> None:
        while self._naps and self._naps[0][0] <= MACHINE.moment_s:
            nap = heapq.heappop(self._naps)[2]
            if nap.found is not None:
                self._looking.append(nap)
            else:
                nap.wake()

    def _has_found(self) -> bool:
        """Whether somebody has who looks, and nobody else can go on; where two look they have their
        round.
        """
        [nap, *more] = self._looking
        if more or nap.found is None or nap.found():
            return True
        self._looking.clear()
        self._put(nap)
        return False

    def _wake_looking(self) -> None:
        if self._looking:
            for nap in self._looking:
                nap.wake()
            self._looking.clear()

    def _hear(self, runner: trio_run.Runner) -> None:
        """What `TrioToken.run_sync_soon` was asked for."""
        entries = runner.entry_queue
        while entries.queue or entries.idempotent_queue:
            while entries.queue:
                function, arguments = entries.queue.popleft()
                function(*arguments)
            for function, arguments in list(entries.idempotent_queue):
                del entries.idempotent_queue[function, arguments]
                function(*arguments)


class _Nap:
    """Of a task; None: it was woken otherwise."""

    __slots__ = ("found", "seconds", "task")

    def __init__(
        self, task: trio.lowlevel.Task, seconds: float, found: Callable[[], bool] | None
    ) -> None:
        self.task: trio.lowlevel.Task | None = task
        self.seconds = seconds
        self.found = found

    def wake(self) -> None:
        """Once."""
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)
            self.task = None


class Call:
    """Wakes the one task that waits for it, for some time at most: as an event and a scope with a
    deadline, for a tenth of the price.
    """

    def __init__(self) -> None:
        self._nap: _Nap | None = None
        self._has_come = False

    def come(self) -> None:
        """Called by trio's thread."""
        self._has_come = True
        if self._nap is not None:
            self._nap.wake()

    async def heard(self, most_s: float) -> None:
        """Until it has come since the last time; `most_s`: more than 0."""
        assert Rounds.current is not None
        if self._has_come:
            await trio.lowlevel.checkpoint()
        else:
            self._nap = _Nap(trio.lowlevel.current_task(), most_s, None)
            await Rounds.current.rest(self._nap)
        self._nap = None
        self._has_come = False


async def until(found: Callable[[], bool], every_s: float) -> None:
    """See `Rounds.until`."""
    assert Rounds.current is not None
    await Rounds.current.until(found, every_s)


async def sleep(seconds: float) -> None:
    """In the place of `trio.sleep`."""
    if seconds > 0 and Rounds.current is not None:
        await Rounds.current.nap(seconds)
    else:
        await _sleep(seconds)


def replaced() -> list[tuple[Any, str, Any]]:
    """What of trio is another in a history: it waits for no file, and is woken by none."""
    wait_for_files = EpollIOManager.get_events

    def come(manager: EpollIOManager, timeout: float) -> Any:
        if Rounds.current is None:
            return wait_for_files(manager, timeout)
        Rounds.current.come()
        return []

    return [
        (trio, "sleep", sleep),
        (EpollIOManager, "get_events", come),
        (WakeupSocketpair, "wakeup_thread_and_signal_safe", lambda _self: None),
    ]
