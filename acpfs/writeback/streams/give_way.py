"""Applications first, for large files: streams stand back between two pieces while somebody writes
and the processors are all in use.

A save of several ranks closes its first file while the others still write, and a stream that begins
then takes from them what they would have finished with: on 2 cores, 4 writers lost a fifth of their
speed. Standing back costs nothing that was promised. It needs an open writer, ends where somebody
waits for the drain or RAM is short, leaves a quarter of the time to the drain, and a version that
is `AGE_S_MAX` old stands back no more: a machine whose processors are never idle drains all the
same. (`courtesy` does this for small work.) Called in stream threads, without the lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from acpfs.runtime.given import Runtime

LOOK_AGAIN_S = 0.005
PERIOD_S = 1.0
STAND_BACK_S = 0.75
"""Of each period."""
AGE_S_MAX = 5.0
"""Long enough for all ranks of a node to finish a save of some ten gigabytes, and short beside its
drain.
"""


class GiveWay:
    """Asked by each stream before each piece."""

    def __init__(
        self,
        is_writing: Callable[[], bool],
        is_pressed: Callable[[], bool],
        age_s: Callable[[float], float],
        runtime: Runtime,
    ) -> None:
        """`is_writing`: some file is open for writing.

        `is_pressed`: somebody waits for the drain, or RAM is short.

        `age_s`: of the clock that operations are stamped with (the wall clock may have been set
        since).
        """
        self._is_writing = is_writing
        self._is_pressed = is_pressed
        self._age_s = age_s
        self._running = runtime.machine.runnable  # the caller's own thread is among them
        self._clock = runtime.clock.now
        self._processors = os.cpu_count() or 1
        self._pause = runtime.threads.event()

    def is_busy(self) -> bool:
        """Whether applications write and want all processors, and nobody waits for the drain."""
        return self._is_writing() and not self._is_pressed() and self._running() > self._processors

    def should(self, logged_at: float) -> bool:
        """Whether a stream of a version that was logged then is to stand back now."""
        if self._age_s(logged_at) > AGE_S_MAX or self._clock() % PERIOD_S > STAND_BACK_S:
            return False
        return self.is_busy()

    def wait(self, logged_at: float, is_over: Callable[[], bool]) -> None:
        """Stand back as long as that is right; `is_over`: nobody needs the stream any more."""
        while not is_over() and self.should(logged_at):
            self._pause.wait(LOOK_AGAIN_S)
