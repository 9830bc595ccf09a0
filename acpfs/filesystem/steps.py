"""How file system calls wait: coroutines that await only `concurrent.futures.Future`, and the
drivers that run them.

See docs/internals/state-and-steps.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import trio

from acpfs.filesystem.spare_threads import SpareThreads
from acpfs.ram.state import StateDatabase, is_answer
from acpfs.runtime.clock import Clock

T = TypeVar("T")
Call = Coroutine["Future[Any] | Unlocked", Any, T]
"""A file system call under way: yields futures to wait for, returns T or raises OSError."""


@types.coroutine
def wait(future: Future[T]) -> Generator[Future[T], T, T]:
    """Wait for a future; the step ends here, and the lock is free meanwhile.

    Costs nothing when it is done already.
    """
    if future.done():
        return future.result()
    return (yield future)


def broken_off() -> InterruptedError:
    """What a call is told whose caller does not wait any more; if that lives, it is told the
    same.
    """
    return InterruptedError(errno.EINTR, os.strerror(errno.EINTR))


def shared() -> Future[None]:
    """A future that any number of calls wait for: a caller that is killed leaves it alone, where it
    would cancel one of its own.
    """
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


async def outlast(call: Future[T]) -> T:
    """What a thread answers, waited for even by a dying caller.

    The thread uses what the caller would give back, or what it does could still come over newer
    bytes.
    """
    while True:
        try:
            return await wait(call)
        except InterruptedError:
            if call.cancelled() or (call.done() and call.exception() is not None):
                raise  # no thread had begun it


class Unlocked(NamedTuple):
    """Something short to do in the calling thread without the lock."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@types.coroutine
def unlocked(function: Callable[..., T], *arguments: Any) -> Generator[Unlocked, T, T]:
    """Copy bytes between two steps, in the same thread but with the lock free, so that several
    threads copy at the same time.
    """
    return (yield Unlocked(function, arguments))


class Steps:
    """Runs calls step by step: each step under the lock, each step one transaction."""

    def __init__(self, lock: RLock, state: StateDatabase, clock: Clock) -> None:
        """The database's transaction ends at the end of every step, before the lock is free."""
        self._now = clock.now
        self.lock = lock
        self.spare = SpareThreads()
        """Of those that run steps: where a call of the storage need not be handed to another
        one.
        """
        self._state = state
        self._withheld: dict[Call[Any], Future[Any] | BaseException] = {}
        """What a step came to whose changes are late, until they are recorded."""
        self.last_at = 0.0
        """Monotonic time, seconds, of the last step."""

    def step(self, call: Call[T], done: Future[Any] | None) -> Future[Any]:
        """Run one step; `done` is the future that the call waited for (None at the start).

        Returns the next future to wait for. Raises StopIteration with the call's value, or what the
        call raised. Where the step's changes are late that comes after one more future: an answer
        that the next worker knows nothing of would be a lie. A caller that is killed meanwhile is
        let go. A step that ends by a bug, and has changed something, never happened: see
        `StateDatabase.abandon`.
        """
        withheld = self._withheld.pop(call, None)
        if isinstance(withheld, BaseException):
            raise withheld
        if withheld is not None and not (done is not None and done.cancelled()):
            return withheld  # else the call is told, as if it had waited for this already
        error: BaseException | None = None
        value: Any = None
        self.last_at = self._now()
        if done is not None:
            error = broken_off() if done.cancelled() else done.exception()
            value = None if error is not None else done.result()
        changes = self._state.changes
        while True:
            with self.lock:
                if self._state.is_abandoned:
                    return (
                        Future()
                    )  # what there is in memory is half done, and the process is about to end
                # The transaction ends before the lock is free, also where the call fails: who gets
                # the lock next, or takes over after a kill -9 in between, sees a whole step or none
                # of it.
                try:
                    request = call.send(value) if error is None else call.throw(error)
                except BaseException as outcome:
                    if not isinstance(outcome, StopIteration) and self._is_bug(outcome):
                        raise
                    if self._state.commit() or self._state.changes == changes:
                        raise
                    return self._withhold(call, outcome)
                if (
                    not self._state.commit()
                    and self._state.changes != changes
                    and not isinstance(request, Unlocked)
                ):
                    return self._withhold(call, request)
            if not isinstance(request, Unlocked):
                return request
            value = None
            error = None
            try:
                value = request.function(*request.arguments)
            except OSError as failure:
                error = failure

    def _is_bug(self, outcome: BaseException) -> bool:
        """Whether a step ended by one; what it has changed is never recorded.

        One that has changed nothing is just an answer, EIO.
        """
        if is_answer(outcome):
            return False
        if self._state.is_changed_by_step:
            self._state.abandon(outcome)
        return True

    def _withhold(self, call: Call[Any], outcome: Future[Any] | BaseException) -> Future[None]:
        self._withheld[call] = outcome
        return self._state.when_recorded()

    def run(self, call: Call[T], timeout_s: float | None = None) -> T:
        """Run a call to its end in this thread."""
        done: Future[Any] | None = None
        while True:
            try:
                done = self.step(call, done)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            done.exception(timeout_s)

    async def drive(self, call: Call[T], done: Future[Any] | None = None) -> T:
        """Run a call to its end from trio; a cancelled task closes the call.

        `done`: for what it waits since its last step; None: it has not begun.
        """
        try:
            while True:
                if done is not None:
                    await settled(done)
                try:
                    done = self.step(call, done)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
        finally:
            self._withheld.pop(call, None)
            call.close()

    def start(self, call: Call[T], reply: Callable[[T | None, BaseException | None], None]) -> None:
        """Run a call; whatever thread completes a future goes on with it, and at last calls
        `reply(value, error)` once.
        """
        self._go_on(call, None, reply)

    def _go_on(
        self,
        call: Call[T],
        done: Future[Any] | None,
        reply: Callable[[T | None, BaseException | None], None],
    ) -> None:
        try:
            future = self.step(call, done)
        except StopIteration as stop:
            reply(stop.value, None)
        except BaseException as error:  # noqa: BLE001 - handed on to whoever asked
            reply(None, error)
        else:
            future.add_done_callback(lambda f: self._go_on(call, f, reply))


async def settled(future: Future[Any]) -> None:
    """Wait in trio until a future is done, whatever its outcome; on cancellation the future goes
    on.
    """
    if future.done():
        return
    event = trio.Event()
    token = trio.lowlevel.current_trio_token()
    future.add_done_callback(lambda _f: _tell(token, event))
    await event.wait()


def _tell(token: trio.lowlevel.TrioToken, event: trio.Event) -> None:
    with contextlib.suppress(trio.RunFinishedError):  # the waiting task is gone with its loop
        token.run_sync_soon(event.set)
