"""Who goes on next: each thread of a life has turns, and a seed chooses.

One thread runs at a time. The main one runs trio, and lets one of the others go on for a turn:
until it begins or ends a call on the storage. Nothing in acpfs holds the file system's lock there
(the storage checks it), so these are the only places where another thread has to get in. A thread
is a real one, so its locks and its thread-local state are what they are in a daemon; it waits for
its turn.

Owns the turns, the pools and the timers of one life. Knows neither storage nor file system.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures._base import PENDING
from typing import Any, Protocol, TypeVar, cast

from acpfs.backing.calls import BackingTimeoutError, CallPool
from acpfs.backing.health import Health
from acpfs.ram.file_calls import RamFileCalls
from acpfs.runtime.given import Runtime
from acpfs.runtime.threads import Running, Threads
from acpfs.types import TierId
from tests.sim.virtual import MACHINE

T = TypeVar("T")


class Killed(BaseException):
    """The life has ended by kill -9; whoever notices does nothing more."""


class _Carrier:
    """A thread of this process that carries jobs, one after the other, also those of other
    lives.
    """

    def __init__(self) -> None:
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.run: Callable[[], None] = lambda: None
        self.is_idle = True
        self.failure: BaseException | None = None
        threading.Thread(target=self._carry, name="turns", daemon=True).start()

    def resume(self) -> None:
        """Called by the main thread: until the job has ended its turn."""
        self._go.release()
        self._back.acquire()
        if self.failure is not None:
            failure = self.failure
            self.failure = None
            raise failure

    def pause(self) -> None:
        """Called by the job: until its next turn."""
        self._back.release()
        self._go.acquire()

    def _carry(self) -> None:
        while True:
            self._go.acquire()
            try:
                self.run()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001
                # a defect of the simulation: the main thread ends by it
                self.failure = error
            self.run = lambda: None
            self.is_idle = True
            self._back.release()


class _Job:
    """What a thread of a life does."""

    __slots__ = ("carrier", "name", "run")

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self.run = run
        self.carrier: _Carrier | None = None


class Turns:
    """Those of one life."""

    _carriers: list[_Carrier] = []  # noqa: RUF012 - of the process: threads are dear to start
    current: Turns
    """Of the life whose parts are being made: some of them make pools by themselves; then of whose
    turn it was last.
    """

    def __init__(self, chance: random.Random, *, in_order: bool = False) -> None:
        """`in_order`: first come, first served, for a history that is being made shorter."""
        self.is_over = False
        self.count = 0
        self._bits = chance.getrandbits
        self._in_order = in_order
        self._ready: list[_Job] = []
        self._waiting: list[tuple[Callable[[], bool], _Job]] = []
        self._running: _Job | None = None
        Turns.current = self

    @property
    def name(self) -> str:
        """Of the thread that has its turn; "" for the main one."""
        return "" if self._running is None else self._running.name

    @property
    def is_main(self) -> bool:
        return self._running is None

    def spawn(self, name: str, run: Callable[[], None]) -> None:
        """Have a thread do this."""
        self._ready.append(_Job(name, run))

    def turn(self) -> bool:
        """Called by the main thread: let one of the others go on; whether one could."""
        if self._waiting:
            self._look_at_waiting()
        ready = self._ready
        if not ready:
            return False
        self.count += 1
        at = 0
        if not self._in_order:
            # as `randrange` has it, in each Python there is, for a third of the time
            bits = len(ready).bit_length()
            at = self._bits(bits)
            while at >= len(ready):
                at = self._bits(bits)
        self._resume(ready.pop(at))
        return True

    def _look_at_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for until, job in waiting:
            if until():
                self._ready.append(job)
            else:
                self._waiting.append((until, job))

    @property
    def is_anyone_ready(self) -> bool:
        if self._waiting:
            self._look_at_waiting()
        return bool(self._ready)

    def _resume(self, job: _Job) -> None:
        if job.carrier is None:
            job.carrier = self._carriers.pop() if self._carriers else _Carrier()
            job.carrier.run = job.run
            job.carrier.is_idle = False
        self._running = job
        try:
            job.carrier.resume()
        finally:
            self._running = None
            if job.carrier.is_idle:
                self._carriers.append(job.carrier)

    def point(self) -> None:
        """Called where a thread's turn ends; returns in its next one. The main thread has none."""
        if (job := self._running) is not None:
            self._ready.append(job)
            self._pause(job)

    def wait(self, until: Callable[[], bool]) -> None:
        """`point`, but the next turn comes only when that is so."""
        if (job := self._running) is not None:
            self._waiting.append((until, job))
            self._pause(job)

    def _pause(self, job: _Job) -> None:
        assert job.carrier is not None
        job.carrier.pause()
        if self.is_over:
            raise Killed

    def until(self, is_done: Callable[[], bool]) -> bool:
        """Whoever calls waits in the midst of its turn, while the others go on; False: none of them
        can.
        """
        if self._running is not None:
            self.wait(is_done)
            while not is_done():  # somebody else had a turn since
                self.wait(is_done)
            return True
        while not is_done():
            if self.is_over:
                raise Killed
            if not self.turn():
                return False
        return True

    def bury(self) -> None:
        """The life is over: each of its threads ends where it stands, and its steps are of no
        effect.
        """
        self.is_over = True
        jobs = [*self._ready, *(job for _until, job in self._waiting)]
        self._ready.clear()
        self._waiting.clear()
        for job in jobs:
            while job.carrier is not None and not job.carrier.is_idle:
                self._resume(job)


_result = Future.result
_exception = Future.exception


class _NoCondition:
    """One thread goes on at a time, and none is sent away within a future's own code."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_what: object) -> None: ...

    def notify_all(self) -> None:
        """Whoever waits looks by itself (`Turns.until`)."""


_NO_CONDITION = _NoCondition()


class _Answer(Future[T]):
    """Of a pool's thread: without the lock of each future, which costs more than its call."""

    def __init__(self, turns: Turns) -> None:
        # as the constructor it is instead of
        self._condition = cast("threading.Condition", _NO_CONDITION)
        self._state = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[Any]], object]] = []
        self.turns = turns


def _wait_for(future: Future[Any], timeout_s: float | None) -> None:
    turns = future.turns if isinstance(future, _Answer) else Turns.current
    if not future.done() and not turns.until(future.done):
        if timeout_s is not None:
            raise FutureTimeoutError
        msg = "the main thread waits for what no thread can do before time goes on"
        raise AssertionError(msg)


def result_in_turns(future: Future[T], timeout: float | None = None) -> T:
    """In the place of `Future.result`: whoever waits in the midst of a step lets the others go
    on.
    """
    _wait_for(future, timeout)
    return _result(future)


def exception_in_turns(future: Future[T], timeout: float | None = None) -> BaseException | None:
    """In the place of `Future.exception`."""
    _wait_for(future, timeout)
    return _exception(future)


class TurnPool(CallPool):
    """A pool whose threads have turns."""

    def __init__(
        self,
        name: str,
        threads_max: int,
        runtime: Runtime,
        health: Health | None = None,
    ) -> None:
        super().__init__(name, threads_max, runtime, health)
        self._turns = Turns.current
        self._busy = 0
        self._held: deque[tuple[str, Callable[[], None]]] = deque()

    def submit(self, label: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
        answer: Future[T] = _Answer(self._turns)
        if self._turns.is_over:
            raise Killed
        self._calls[label] += 1
        if self._closed:
            answer.set_exception(BackingTimeoutError(label))
            return answer

        def run() -> None:
            try:
                if answer.set_running_or_notify_cancel():
                    self._answer(label, answer, function, arguments)
            finally:
                self._leave_thread()

        self._held.append((f"{self.name}: {label}", run))
        self._give_threads()
        return answer

    def later(self, label: str, function: Callable[..., object], *arguments: Any) -> None:
        self.submit(label, function, *arguments)

    def be_ready(self) -> None:
        """Threads are there when they are needed."""

    def _give_threads(self) -> None:
        while self._held and self._busy < self.threads_max:
            self._busy += 1
            self._turns.spawn(*self._held.popleft())

    def _leave_thread(self) -> None:
        self._busy -= 1
        if not self._turns.is_over:
            self._give_threads()

    def _answer(
        self,
        label: str,
        answer: Future[T],
        function: Callable[..., T],
        arguments: tuple[Any, ...],
    ) -> None:
        try:
            with self.health.call(self.name, label):
                result = function(*arguments)
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it was, it belongs to the caller
            answer.set_exception(error)
        else:
            answer.set_result(result)


class TurnFileCalls(RamFileCalls):
    """Calls on RAM files, in the order in which they came, each in a turn."""

    def __init__(self, threads: Threads, is_written: Callable[[TierId], bool]) -> None:
        """`is_written`: whether a write of an application keeps others from the file."""
        super().__init__(threads)
        self._turns = Turns.current
        self._is_written = is_written

    def submit(self, tier_id: TierId, function: Callable[..., T], *arguments: Any) -> Future[T]:
        turns = self._turns
        answer: Future[T] = _Answer(turns)
        waiting = cast("deque[Any]", self._waiting.setdefault(tier_id, deque()))
        waiting.append(answer)  # the order is what counts

        def run() -> None:
            while waiting[0] is not answer:  # who comes first may wait for a later time
                turns.wait(lambda: waiting[0] is answer)
            while self._is_written(tier_id):
                turns.wait(lambda: not self._is_written(tier_id))
            try:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(function(*arguments))
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001
                # whatever it was, it belongs to the caller
                answer.set_exception(error)
            finally:
                waiting.popleft()
                if not waiting:
                    self._waiting.pop(tier_id, None)

        turns.spawn(f"RAM file {tier_id}", run)
        return answer


class TurnEvent(threading.Event):
    """Whoever waits for it has no turn before it comes, or his patience ends."""

    def __init__(self, turns: Turns, start: Callable[[float, _Timer], None]) -> None:
        """`start`: as `Timers.start`."""
        super().__init__()
        self._turns = turns
        self._start = start

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Event`."""
        over = Alarm()
        if timeout is not None and not self.is_set():
            over.action = over.ring
            self._start(timeout, over)
        self._turns.until(lambda: self.is_set() or over.has_rung)
        over.action = None
        return self.is_set()


class TurnCondition(threading.Condition):
    """The same. Nobody else has a turn while it is held, so that takes no lock."""

    def __init__(self, turns: Turns, start: Callable[[float, _Timer], None]) -> None:
        """`start`: as `Timers.start`."""
        super().__init__()
        self._turns = turns
        self._start = start
        self._told = 0

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition`."""
        told = self._told
        return self.wait_for(lambda: self._told != told, timeout)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """See `threading.Condition`."""
        over = Alarm()
        if timeout is not None:
            over.action = over.ring
            self._start(timeout, over)
        self.release()
        try:
            self._turns.until(lambda: bool(predicate()) or over.has_rung)
        finally:
            self.acquire()
            over.action = None
        return predicate()

    def notify_all(self) -> None:
        """See `threading.Condition`."""
        self._told += 1


class TurnLock:
    """One that is kept over turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_held = False

    def __enter__(self) -> bool:
        self._turns.until(lambda: not self._is_held)
        self._is_held = True
        return True

    def __exit__(self, *_what: object) -> None:
        self._is_held = False

    def locked(self) -> bool:
        """See `threading.Lock`."""
        return self._is_held


class NoThreads(Threads):
    """A history has turns only."""

    in_turns = frozenset({"mirror", "mirror mark"})
    """What is started by name, and takes turns."""

    def __init__(self, turns: Turns, timers: Timers) -> None:
        super().__init__()
        self._turns = turns
        self._timers = timers

    def event(self) -> threading.Event:
        return TurnEvent(self._turns, self._timers.start)

    def condition(self, lock: threading.Lock | None = None) -> threading.Condition:
        if lock is not None:  # whoever waits with that waits in a task's thread
            return super().condition(lock)
        return TurnCondition(self._turns, self._timers.start)

    def lock(self) -> threading.Lock:
        return cast("threading.Lock", TurnLock(self._turns))

    def start(
        self, name: str, function: Callable[..., object], *arguments: Any, patience_s: float = 0.0
    ) -> Running:
        if name not in self.in_turns:
            msg = f"a history has no thread {name}: give it turns in tests/sim/scheduler.py"
            raise AssertionError(msg)
        running = Running(name, function, arguments, lambda _running: False)
        self._turns.spawn(name, running._run)
        return running


class _Timer(Protocol):
    action: Callable[[], None] | None


class Alarm:
    """Something to be done when a time is over; None: no more."""

    def __init__(self) -> None:
        self.action: Callable[[], None] | None = lambda: None
        self.has_rung = False

    def ring(self) -> None:
        self.has_rung = True


class Timers:
    """Ends of patience, in virtual time; in the place of the process's thread for them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Timer]] = []
        self._number = itertools.count()

    def start(self, delay_s: float, timer: _Timer) -> None:
        heapq.heappush(self._heap, (MACHINE.moment_s + delay_s, next(self._number), timer))

    def at(self, delay_s: float) -> None:
        """Time goes on no further than to there without a look at who is ready."""
        self.start(delay_s, Alarm())

    def fire(self) -> None:
        """Those that are due."""
        heap = self._heap
        while heap and heap[0][0] <= MACHINE.moment_s:
            action = heapq.heappop(heap)[2].action
            if action is not None:
                action()

    def next_s(self) -> float:
        """For how long nothing is due."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] - MACHINE.moment_s if self._heap else math.inf
