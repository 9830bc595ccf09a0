"""How pyfuse3's tasks take requests from the kernel: one of them waits, and goes on with the next
request that has come already.

pyfuse3 has each request waited for by another task: a lock that is handed on in turn, a
registration with epoll and two rounds of trio's loop, which cost more than half of a write of 4
KiB. It takes all of these from the module that it knows as `trio`, and has that exchanged for
asyncio; here it is exchanged for trio with another lock and another way to wait. Whatever pyfuse3
does not take from there stays as it is. Trio's thread only, which has to be the main one.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pyfuse3
import trio

PATIENCE = 20
"""Looks, of about 1.5 us each, for the next request before trio waits for it: as `native.reader`
does, and for the same reason.
"""
BURST_MAX = 16
"""Requests in a row before trio's other tasks get their turn: control, and the drain.

About a millisecond of small ones.
"""
READ_LIMIT_S = 0.2
"""So long, and at most twice, a read of /dev/fuse may wait with the interpreter."""
_TAKER: Any = pyfuse3
"""Its stubs do not tell of `trio`."""


class RequestTurns:
    """Whose turn it is to wait for requests; stands in for the lock, and for `wait_readable`, that
    pyfuse3 uses for that.

    It is given up before a request is carried out. Whoever stands by is called then, and finds it
    taken again where the request was done without waiting for anything; where it was not, it goes
    on reading. So one that waits keeps nobody from being served.
    """

    def __init__(self, before_read: Callable[[], None]) -> None:
        """`before_read`: called each time, with nothing between it and the read that may wait."""
        self._before_read = before_read
        self._taken = False
        self._called = False
        """Somebody was called and did not run yet: nobody else need be."""
        self._standing_by = trio.lowlevel.ParkingLot()
        self._polls: dict[int, select.poll] = {}
        self._burst = 0

    async def __aenter__(self) -> None:
        while self._taken:
            await self._standing_by.park()
            self._called = False
        self._taken = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._taken = False
        if self._standing_by and not self._called:
            self._called = True
            self._standing_by.unpark()

    async def wait_readable(self, fd: int) -> None:
        """As trio's; at once where a request is there, and another task would serve the next one if
        this one waited.
        """
        if self._burst < BURST_MAX and self._is_anybody_left() and self._is_readable_soon(fd):
            self._burst += 1
        else:
            self._burst = 0
            await trio.lowlevel.wait_readable(fd)
        self._before_read()

    def _is_anybody_left(self) -> bool:
        """Where nobody is, pyfuse3 has just started a task, or is about to: that has to run to
        stand by.
        """
        return self._called or bool(self._standing_by)

    def _is_readable_soon(self, fd: int) -> bool:
        poll = self._polls.get(fd)
        if poll is None:
            poll = select.poll()
            self._polls[fd] = poll
            poll.register(fd, select.POLLIN)
        return any(poll.poll(0) for _ in range(PATIENCE))


class ReadAlarm:
    """Gets pyfuse3 out of a read that finds no request.

    There was one a moment before; but whose caller is killed before it is read, the kernel takes
    away. pyfuse3 reads with the interpreter held, so then all of the worker would stand still until
    anybody calls: control, the drain, and what tells the supervisor that it lives. Only a signal
    ends such a read (pyfuse3 goes on after EINTR), and only the kernel's timer can send it. (A
    descriptor that does not block would have pyfuse3 raise EAGAIN out of its task, whose buffer of
    a megabyte nobody could free.)
    """

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._renew_at = 0.0
        """Monotonic time, seconds: until then the timer will go off late enough."""
        self._before: Any = None

    def __enter__(self) -> ReadAlarm:
        self._before = signal.signal(signal.SIGALRM, self._rang)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def set(self) -> None:
        """A read comes. Costs a look at the clock, but for once in half of READ_LIMIT_S.

        While requests come it never goes off.
        """
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + READ_LIMIT_S / 2
            # again and again: a signal that comes just before the read does not end it
            signal.setitimer(signal.ITIMER_REAL, READ_LIMIT_S, READ_LIMIT_S)

    def _rang(self, _number: int, _frame: object) -> None:
        """Between `set` and the read, or anywhere else: only trio's loop knows that there is no
        read.
        """
        self._token.run_sync_soon(self._put_off, idempotent=True)

    def _put_off(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._renew_at = 0.0


class _Instead:
    """A module with some names of our own."""

    def __init__(self, module: Any, **ours: Any) -> None:
        self._module = module
        self._ours = ours

    def __getattr__(self, name: str) -> Any:
        return self._ours[name] if name in self._ours else getattr(self._module, name)


@contextlib.contextmanager
def taken_in_turns() -> Iterator[RequestTurns]:
    """Have pyfuse3 take its requests so, from before its main loop begins; within trio's run."""
    with ReadAlarm(trio.lowlevel.current_trio_token()) as alarm:
        turns = RequestTurns(alarm.set)
        before = _TAKER.trio
        lowlevel = _Instead(trio.lowlevel, wait_readable=turns.wait_readable)
        _TAKER.trio = _Instead(trio, lowlevel=lowlevel, Lock=lambda: turns)
        try:
            yield turns
        finally:
            _TAKER.trio = before
