"""How far a long call has come: patience with it goes by that, and it ends when nobody wants what
it brings.

A call that reads a large file lasts as long as the file is large, so the time since it began says
nothing; that no byte comes any more does. While it waits for a thread, bytes count that the calls
move which share the threads. The health check is told of both as progress. Thread-safe.
"""

from __future__ import annotations

import errno
import os
import threading

from acpfs.backing.health import current_call_goes_on


class Progress:
    """Of one call, or of several that do one thing."""

    def __init__(self, sharing: Progress | None = None) -> None:
        """`sharing`: of all calls that share the threads with this one."""
        self._sharing = sharing
        self._bytes = 0
        self._begun = False
        self._lock = threading.Lock()
        self.wanted = True
        """Whether anybody still waits for it."""

    def begin(self) -> None:
        """It has its thread, and is on its own from now on."""
        self._begun = True

    def moved(self, count: int) -> None:
        """So many bytes more have been read; called before they are written.

        Raises:
            OSError: ECANCELED: nobody wants them.
        """
        current_call_goes_on()
        self.count(count)
        if not self.wanted:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def count(self, count: int) -> None:
        """So many bytes more, by whichever call."""
        with self._lock:
            self._bytes += count
        if self._sharing is not None:
            self._sharing.count(count)

    def give_up(self) -> None:
        """Nobody waits any more: what is read from now on is not written."""
        self.wanted = False

    def mark(self) -> tuple[bool, int]:
        """Is another one as long as there is something to wait for."""
        return (
            (self._begun, self._bytes)
            if self._begun or self._sharing is None
            else self._sharing.mark()
        )
