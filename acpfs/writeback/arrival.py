"""Between trio and threads: waiting for a future, and being rung at from any thread."""

from __future__ import annotations

import contextlib
import math
import threading
from concurrent.futures import Future
from typing import TypeVar

import trio

T = TypeVar("T")


async def outcome(future: Future[T]) -> T:
    """The future's result; on cancellation the future goes on without us (a hung backing call
    cannot be ended).
    """
    if future.done():
        return future.result()
    event = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def tell(_done: Future[T]) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(event.set)

    future.add_done_callback(tell)
    await event.wait()
    return future.result()


class Bell:
    """Wakes one trio task; rung from any thread, as often as one likes, before the task listens or
    while it works.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._event: trio.Event | None = None
        self._rung = False

    def ring(self) -> None:
        """Cheap when it was rung already."""
        with self._lock:
            if self._rung:
                return
            self._rung = True
            if self._event is None or self._token is None:
                return
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._event.set)

    async def heard(self, until: float = math.inf) -> None:
        """Wait until it was rung since the last time, or until trio's clock says `until`."""
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
            event = trio.Event()
            self._event = event
            if self._rung:
                event.set()
        if until < math.inf:
            with trio.move_on_at(until):
                await event.wait()
        else:
            await event.wait()
        with self._lock:
            self._event = None
            self._rung = False
