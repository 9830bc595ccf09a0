"""Calls that wait: continued when their future is done, broken off when their caller dies.

One thread continues all of them, so that whoever completes a future (a stream, the call pool, a
writer that made room, possibly under the file system's lock) is never held up by somebody else's
call. Reads and writes of file bytes that had to wait run here too, which is enough: what they
waited for is slower than they are.

Interrupts: on a local file system only a deadly signal ends a read or write early, so a caller that
merely got a signal goes on waiting, and one that is dying gets out at once even where the backing
directory hangs. The kernel sends INTERRUPT once per request, at the first signal of either kind; so
callers that were interrupted and live are looked at again until they are answered, however busy the
thread is with other calls. An INTERRUPT that comes while its call is between two waits is kept for
the next one. Of a caller that cannot be seen nobody knows which kind it was: after a while it is
let go, because a process that can never be killed is worse than a call that says EINTR.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from acpfs.filesystem.steps import Call, Steps
from acpfs.runtime.threads import THREADS, Running
from acpfs.transport.native.callers import Fate, fate_of
from acpfs.transport.native.operations import Operation
from acpfs.transport.native.request import Request

DYING_CHECK_INTERVAL_S = 0.5
UNSEEN_PATIENCE_S = 30.0
"""How long a caller that cannot be seen goes on waiting after a signal: most waits end sooner, and
then a harmless signal did no harm.
"""
EARLY_MAX = 1024
"""Interrupts that are kept for calls that do not wait (yet): far more than come within one step.

No request's number comes twice.
"""


@dataclass(slots=True, eq=False)
class SuspendedCall:
    """A call between two steps."""

    operation: Operation
    request: Request
    call: Call[Any]
    future: Future[Any]
    since_s: float
    """Monotonic time of its first wait."""


Begin = Callable[[Request], None]
Finish = Callable[[Operation, Request, Any], None]
Fail = Callable[[Request, BaseException], None]


class Continuations:
    """Calls under way that wait for something."""

    def __init__(self, steps: Steps, begin: Begin, finish: Finish, fail: Fail) -> None:
        """`finish` and `fail` answer the kernel; `begin` is told of each that goes on."""
        self._steps = steps
        self._begin = begin
        self._finish = finish
        self._fail = fail
        self._waiting: dict[int, SuspendedCall] = {}
        self._interrupted: dict[int, float] = {}
        """Calls whose callers got a signal → when, in monotonic time."""
        self._early: dict[int, float] = {}
        """The same of those that did not wait then: in a step, or answered by now.

        The oldest first.
        """
        self._looked_at = 0.0
        """Monotonic time, seconds, of the last look at interrupted callers."""
        self.current = 0
        """The kernel's number of the request that the thread goes on with; 0: none."""
        self._lock = threading.Lock()
        self.identity = 0
        """Of the thread."""
        self._done: SimpleQueue[SuspendedCall | None] = SimpleQueue()
        self._thread: Running | None = None

    def start(self) -> None:
        """Begin to continue calls."""
        self._thread = THREADS.start("fuse-continue", self._run)

    def stop(self) -> None:
        """Stop continuing; calls that still wait are left to their fate (the kernel will resend
        their requests to the next worker).
        """
        self._done.put(None)
        if self._thread is not None:
            self._thread.end()
        self.abandon()

    def abandon(self) -> None:
        """Close the calls that still wait."""
        with self._lock:
            left = list(self._waiting.values())
            self._waiting.clear()
        for waiting in left:
            waiting.call.close()

    def __len__(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    def waiting(self) -> list[SuspendedCall]:
        """Those that wait now."""
        with self._lock:
            return list(self._waiting.values())

    def suspend(
        self,
        operation: Operation,
        request: Request,
        call: Call[Any],
        future: Future[Any],
        since_s: float | None = None,
    ) -> None:
        """Continue the call when the future is done.

        `since_s`: when it began to wait, if that was for another future.
        """
        waiting = SuspendedCall(
            operation, request, call, future, time.monotonic() if since_s is None else since_s
        )
        with self._lock:
            self._waiting[request.unique] = waiting
            overtaken = self._early.pop(request.unique, None)
            if overtaken is not None:
                self._interrupted.setdefault(request.unique, overtaken)
        future.add_done_callback(lambda _future: self._done.put(waiting))
        if overtaken is not None:
            self._done.put(_LOOK)

    def interrupt(self, unique: int) -> None:
        """The kernel says that the caller of a request got a signal."""
        with self._lock:
            if unique not in self._waiting:  # in a step, after which it may wait; or answered
                self._early[unique] = time.monotonic()
                if len(self._early) > EARLY_MAX:
                    del self._early[next(iter(self._early))]
                return
            self._interrupted.setdefault(unique, time.monotonic())
        self._done.put(_LOOK)

    # -- the thread

    def _run(self) -> None:
        self.identity = threading.get_ident()
        while True:
            waiting = self._next()
            if waiting is None:
                return
            if waiting is _LOOK:
                self._break_off_the_dying()
            elif self._claim(waiting):
                self.current = waiting.request.unique
                self._go_on(waiting, waiting.future)
                self.current = 0

    def _next(self) -> SuspendedCall | None:
        """What is to be done: `_LOOK` also when that is due, since a queue that never runs empty
        must not keep the dying waiting.
        """
        left_s = (
            self._looked_at + DYING_CHECK_INTERVAL_S - time.monotonic()
            if self._interrupted
            else None
        )
        with suppress(Empty):
            if left_s is None or left_s > 0:
                return self._done.get(timeout=left_s)
        return _LOOK

    def _claim(self, waiting: SuspendedCall) -> bool:
        """Whether the call still waits for this; from now on it does not."""
        unique = waiting.request.unique
        with self._lock:
            if self._waiting.get(unique) is not waiting:
                return False
            del self._waiting[unique]
            return True

    def _go_on(self, waiting: SuspendedCall, done: Future[Any]) -> None:
        operation = waiting.operation
        request = waiting.request
        call = waiting.call
        self._begin(request)
        try:
            future = self._steps.step(call, done)
        except StopIteration as stop:
            self._interrupted.pop(request.unique, None)
            self._finish(operation, request, stop.value)
        except BaseException as error:  # noqa: BLE001 - `fail` logs what is not an errno
            self._interrupted.pop(request.unique, None)
            self._fail(request, error)
        else:
            self.suspend(operation, request, call, future, waiting.since_s)

    def _break_off_the_dying(self) -> None:
        self._looked_at = time.monotonic()
        unseen_until = self._looked_at - UNSEEN_PATIENCE_S
        with self._lock:
            self._interrupted = {
                unique: at for unique, at in self._interrupted.items() if unique in self._waiting
            }
            candidates = [(self._waiting[unique], at) for unique, at in self._interrupted.items()]
        for waiting, interrupted_at in candidates:
            fate = fate_of(waiting.request.pid)
            if fate is Fate.LIVES or (fate is Fate.UNSEEN and interrupted_at > unseen_until):
                continue
            if waiting.future.cancel():
                continue  # a cancelled future comes back through the queue
            if self._claim(waiting):
                broken_off: Future[Any] = Future()
                broken_off.cancel()
                self._go_on(waiting, broken_off)


_LOOK: SuspendedCall = object()  # type: ignore[assignment]
"""Queued to make the thread look at interrupted callers."""
