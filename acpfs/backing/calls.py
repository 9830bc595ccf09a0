"""Calls on the backing directory: threads of their own, and patience that ends before the call
does.

A call may hang for ever; it then costs one thread of a bounded number and nothing else. Nothing
here knows what is called. Threads are daemons and are never joined: a hung one must not keep the
process from ending. Thread-safe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from acpfs.backing.health import Health
from acpfs.runtime.clock import Timer
from acpfs.runtime.given import Runtime

T = TypeVar("T")

WAITING_CALLS_MAX = 10_000
"""Calls that may wait for a thread; more means that the backing directory hangs, and the next ones
fail at once.
"""

LATE_PATIENCE_S = 0.1
"""Patience while an earlier call is out for longer than that was, of callers that have older
knowledge.
"""
FILL_THREADS = 16
"""Several files at a time, `filesystem.content.fill.READERS` for each."""
VERIFY_THREADS = 2
"""For all who verify: more would take the storage's bandwidth from the drain, and from each
other.
"""


class BackingTimeoutError(TimeoutError):
    """The backing directory did not answer in time; the call goes on in its thread."""

    def __init__(self, label: str) -> None:
        """`label`: what was called."""
        super().__init__(errno.ETIMEDOUT, f"{label}: no answer from the backing directory")


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """One pool's threads and calls."""

    name: str
    threads: int
    threads_max: int
    in_flight: int
    waiting: int
    oldest_s: float
    """Age of the call that is out the longest; 0 for none."""
    calls: dict[str, int]
    """Calls ever submitted, by label."""
    timed_out: int
    """How often somebody's patience ended before the call did."""


@dataclass(slots=True)
class _Job:
    label: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: _Call[Any]


class _Call(Future[T]):
    """A call's answer; who cancels it while it waits takes it out of the queue."""

    def __init__(self, leave: Callable[[Future[T]], bool]) -> None:
        super().__init__()
        self._leave = leave

    def cancel(self) -> bool:
        """Whether it will not be made."""
        cancelled = super().cancel()
        if cancelled and self._leave(self):
            self.set_running_or_notify_cancel()
        return cancelled


class CallPool:
    """Runs calls on up to `threads_max` daemon threads, started as needed."""

    def __init__(
        self,
        name: str,
        threads_max: int,
        runtime: Runtime,
        health: Health | None = None,
    ) -> None:
        """`health`: shared by the pools of one backing directory; its own when None."""
        self._starts = runtime.threads
        self.clock = runtime.clock
        """By which patience ends."""
        self.name = name
        self.threads_max = threads_max
        self.health = health or Health(runtime.clock)
        self._waiting: OrderedDict[Future[Any], _Job] = OrderedDict()
        self._lock = threading.Lock()
        self._came = runtime.threads.condition(self._lock)
        self._threads = 0
        self._idle = 0
        self._timed_out = 0
        self._calls: Counter[str] = Counter()
        self._closed = False

    def submit(self, label: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `function(*arguments)` on a thread of the pool; waits for a free thread beyond
        `threads_max`.
        """
        call: _Call[T] = _Call(self._leave)
        with self._lock:
            self._calls[label] += 1
            if self._closed or len(self._waiting) >= WAITING_CALLS_MAX:
                call.set_exception(BackingTimeoutError(label))
            else:
                self._put(_Job(label, function, arguments, call))
        return call

    def in_place(self, label: str, function: Callable[..., T], *arguments: Any) -> T:
        """Make the call in the calling thread, which nobody needs meanwhile, and which waits for as
        long as it takes.
        """
        with self._lock:
            self._calls[label] += 1
        with self.health.call(self.name, label):
            return function(*arguments)

    def close_later(self, fd: int) -> None:
        """Close a descriptor of the backing directory: that may hang, too."""
        self.later("close", os.close, fd)

    def later(self, label: str, function: Callable[..., object], *arguments: Any) -> None:
        """`submit` for what nobody waits for. Never refused, for nobody would try again."""
        with self._lock:
            self._calls[label] += 1
            self._put(_Job(label, function, arguments, _Call(self._leave)))

    def _put(self, job: _Job) -> None:
        self._waiting[job.future] = job
        if self._idle < len(self._waiting) and self._threads < self.threads_max:
            self._have_another()
        self._came.notify()

    def _have_another(self) -> None:
        """One that the machine has not got yet counts as there: the job waits for it, or is done by
        another one.
        """
        self._threads += 1
        self._starts.start(f"{self.name}-{self._threads}", self._work)

    def be_ready(self) -> None:
        """Have one thread before there is anything to do, so that the pool goes on where the
        machine has none left then.
        """
        with self._lock:
            if not self._threads:
                self._have_another()

    def _leave(self, call: Future[T]) -> bool:
        """It was cancelled; whether no thread had taken it."""
        with self._lock:
            return self._waiting.pop(call, None) is not None

    def patient(
        self,
        future: Future[T],
        patience_s: float,
        *,
        when_stuck: float | None = None,
        moved: Callable[[], object] | None = None,
    ) -> Future[T]:
        """A future that fails with BackingTimeoutError after `patience_s`, while the call itself
        goes on.

        `when_stuck`: the patience to use instead while the backing directory is known to be stuck,
        for callers that have older knowledge to go on with; little more while somebody has lost
        patience with another call that is still out: a save asks many questions, and must not wait
        so for each.
        `moved`: patience begins anew as long as this has become another (`Progress.mark`). A call
        that still waits for a thread when patience ends is never started.
        """
        if future.done():
            return future
        if when_stuck is not None:
            if self.health.is_stuck():
                patience_s = when_stuck
            elif self.health.is_late(self.name, patience_s):
                patience_s = min(patience_s, LATE_PATIENCE_S)
        result: Future[T] = Future()
        timer = Timer()
        self._be_patient(future, result, timer, patience_s, moved)
        future.add_done_callback(partial(_copy, result, timer))
        return result

    def _be_patient(
        self,
        call: Future[T],
        result: Future[T],
        timer: Timer,
        patience_s: float,
        moved: Callable[[], object] | None,
    ) -> None:
        before = None if moved is None else moved()

        def end() -> None:
            if moved is None or moved() == before:
                self._lose_patience(call, result)
            elif not call.done():
                self._be_patient(call, result, timer, patience_s, moved)

        timer.action = end
        self.clock.start(patience_s, timer)

    def _lose_patience(self, call: Future[T], result: Future[T]) -> None:
        if call.done():
            return
        with self._lock:
            self._timed_out += 1
        with contextlib.suppress(InvalidStateError):
            result.set_exception(BackingTimeoutError(self.name))
        call.cancel()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            del job  # a waiting thread must not keep the last call's arguments and result alive

    def _next(self) -> _Job | None:
        with self._lock:
            self._idle += 1
            while not self._waiting and not self._closed:
                self._came.wait()
            self._idle -= 1
            if self._waiting:
                return self._waiting.popitem(last=False)[1]
            self._threads -= 1  # it is closed, and this one ends
            return None

    def _run(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            with self.health.call(self.name, job.label):
                result = job.function(*job.arguments)
        except BaseException as error:  # noqa: BLE001 - whatever it was, it belongs to the caller
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def statistics(self) -> CallStatistics:
        """What `status`, the metrics and the tests see."""
        in_flight = self.health.in_flight(self.name)
        with self._lock:
            oldest_s = max((call.age_s() for call in in_flight), default=0.0)
            return CallStatistics(
                self.name,
                self._threads,
                self.threads_max,
                len(in_flight),
                len(self._waiting),
                oldest_s,
                dict(self._calls),
                self._timed_out,
            )

    def close(self) -> None:
        """Let idle threads end; what is in flight goes on, nobody waits for it."""
        with self._lock:
            self._closed = True
            self._came.notify_all()


@dataclass(frozen=True, slots=True)
class CallPools:
    """The threads of one backing directory by purpose, so that a hang of one kind does not starve
    the others.
    """

    requests: CallPool
    """What a file system call waits for."""
    streams: CallPool
    """Copies of file contents."""
    commits: CallPool
    """Commits in log order (one at a time), the manifest."""
    syncs: CallPool
    """fsync of directories."""
    fills: CallPool
    """Reading ahead of what is asked for: cold files on their way to RAM."""
    verifies: CallPool
    """Files that somebody has verified, one call each; a large one takes minutes."""
    health: Health

    @classmethod
    def make(
        cls, runtime: Runtime, *, requests: int = 32, streams: int = 64, syncs: int = 16
    ) -> CallPools:
        """Pools with that many threads at most, one health."""
        health = Health(runtime.clock)
        return cls(
            CallPool("requests", requests, runtime, health),
            CallPool("streams", streams, runtime, health),
            CallPool("commits", 4, runtime, health),
            CallPool("syncs", syncs, runtime, health),
            CallPool("fills", FILL_THREADS, runtime, health),
            CallPool("verifies", VERIFY_THREADS, runtime, health),
            health,
        )

    def all(self) -> tuple[CallPool, ...]:
        """Each pool."""
        return (self.requests, self.streams, self.commits, self.syncs, self.fills, self.verifies)

    def statistics(self) -> tuple[CallStatistics, ...]:
        """Of each pool."""
        return tuple(pool.statistics() for pool in self.all())

    def be_ready(self) -> None:
        """Each with a thread."""
        for pool in self.all():
            pool.be_ready()

    def close(self) -> None:
        """Close all pools; nothing is joined."""
        for pool in self.all():
            pool.close()


def _copy(result: Future[T], timer: Timer, done: Future[T]) -> None:
    timer.stop()
    with contextlib.suppress(InvalidStateError):
        if done.cancelled():
            if result.cancel():  # not when patience has ended, which is what cancelled the call
                result.set_running_or_notify_cancel()
            return
        error = done.exception()
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(done.result())
