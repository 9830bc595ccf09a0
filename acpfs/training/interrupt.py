"""Gets the main thread out of Python code that does not end by itself after a STOP: an asynchronous exception, again and again.

It never comes while an update is under way: a local update is finished, not torn. A thread that waits in C gets it when it is back;
closing sockets or aborting communicators is what brings it back, and is somebody else's (`torch.groups`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable


class Interrupted(BaseException):
    """A fault elsewhere: the rank goes to its protection's handler. No `Exception`, so that a retry loop does not swallow it."""


def _set_asynchronous(thread: int, exception: type[BaseException] | None) -> None:
    """What the thread raises next; None takes back what it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception) if exception else None)


class Interrupter:
    """Of one thread. `tick` belongs to another one."""

    def __init__(self, thread: int, updating: Callable[[], bool], after_s: float, every_s: float) -> None:
        """`thread`: its identifier. `updating`: whether it is to be left alone; once false it stays false until `disarm`."""
        self._thread, self._updating = thread, updating
        self._after_s, self._every_s = after_s, every_s
        self._sending = threading.Lock()
        self._due: float | None = None
        """When the next one is sent; None: not armed."""

    def arm(self) -> None:
        """From now on. Does nothing where it is armed already."""
        with self._sending:
            if self._due is None:
                self._due = time.monotonic() + self._after_s

    def tick(self) -> bool:
        """Send one if it is time; whether one was sent."""
        with self._sending:
            if self._due is None or time.monotonic() < self._due or self._updating():
                return False
            self._due = time.monotonic() + self._every_s
            _set_asynchronous(self._thread, Interrupted)
            return True

    def disarm(self) -> None:
        """In the thread itself: nothing comes after this returns, and what was on its way is swallowed."""
        while True:
            try:
                with self._sending:
                    self._due = None
                    _set_asynchronous(self._thread, None)
                return
            except Interrupted:
                continue
