"""Signals as something to read, for a process that waits for descriptors.

Standard library only; the main thread's.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Collection


def heed(numbers: Collection[int]) -> int:
    """A descriptor from which the numbers of signals come, as bytes; children are not waited
    for.
    """
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    atexit.register(_ignore, numbers)
    return woken


def _ignore(numbers: Collection[int]) -> None:
    """One that comes while Python is taken down would end the process by the signal, whatever its
    exit code is to be.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
