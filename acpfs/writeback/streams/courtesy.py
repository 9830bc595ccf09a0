"""Applications first: small work of the drain stands back while requests come in.

A small file costs the daemon about as much of its one interpreter to drain as to save, so a drain
that begins at once halves the speed of the burst that feeds it, and commits one or two files per
group. Standing back costs nothing that was promised: what waits is in RAM and in order. It ends
when requests pause, when somebody waits for the drain or for room, and it is bounded: after the
first seconds a quarter of the time belongs to the drain, all of it once it lags. Large files never
stand back: their bytes are copied without the interpreter. Used under the file system's lock.
"""

from __future__ import annotations

from collections.abc import Callable

QUIET_S = 0.02
"""No request for this long: the burst is over (requests of one come every 0.1-0.5 ms)."""
BURST_S = 4.0
"""So long a burst has all of the time: more than most have need of (10,000 small files take 2-3
s).
"""
PERIOD_S = 1.0
STAND_BACK_S = 0.75
"""Of each period, while requests keep coming."""
LAG_S_MAX = 10.0
"""After this long the drain stands back no more."""


class Courtesy:
    """Says how long small work is to wait."""

    def __init__(
        self,
        idle_s: Callable[[], float],
        is_awaited: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """`idle_s`: seconds since the last request; `is_awaited`: whether somebody waits for
        operations to be persisted, or for room.
        """
        self._clock = clock
        self._idle_s = idle_s
        self._is_awaited = is_awaited
        self._since: float | None = None

    def delay_s(self) -> float:
        """0: go ahead; else look again after so many seconds."""
        idle_s = self._idle_s()
        if idle_s >= QUIET_S:
            self._since = None
            return 0.0
        now = self._clock()
        if self._since is None:
            self._since = now
        elapsed = now - self._since
        if (
            self._is_awaited()
            or elapsed > LAG_S_MAX
            or (elapsed > BURST_S and elapsed % PERIOD_S > STAND_BACK_S)
        ):
            return 0.0
        return QUIET_S - idle_s
