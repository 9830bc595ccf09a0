"""Handlers of signals wait for the end of an update: what they raise would tear it. No torch.

That of SIGINT does so by default. Only handlers in Python can raise, and Python calls them in the
main thread between two lines. They are taken away for an update, whoever has set them, and called
behind it. SIGTERM is left alone: `protection` answers it without raising anything.
"""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from types import FrameType
from typing import Any

HELD = (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)


class HeldSignals:
    """Of the main thread; in others nothing is to be held."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._came: dict[int, None] = {}
        """Each once, as the kernel does it, in the order in which they came."""

    def hold(self) -> None:
        """From here on they wait. May be called again."""
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in HELD:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._note:
                    self._before[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # of a handler that was called before it could be taken away
            self.give_back()
            raise

    def release(self) -> None:
        """The update is over: handlers are back, and called for what came.

        Raises:
            BaseException: whatever they raise.
        """
        self.give_back()
        self.deliver()

    def deliver(self) -> None:
        """Handlers are called for what came.

        Raises:
            BaseException: whatever they raise.
        """
        came = self._came
        self._came = {}
        with ExitStack() as calls:  # all of them, whatever one of them raises
            for number in reversed(came):
                calls.callback(signal.raise_signal, number)

    def drop(self) -> None:
        """The update is torn, and the job stops for that: handlers are back, what came is over."""
        self._came.clear()
        self.give_back()

    def give_back(self) -> None:
        """Handlers are back; what came waits for `deliver`."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._before:
            number, handler = self._before.popitem()
            if signal.getsignal(number) == self._note:  # one that was set meanwhile stays
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came[number] = None
