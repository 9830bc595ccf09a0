"""The node's clock: what operations are stamped with, and what watermarks are made of.

It starts as the wall clock and then runs with the kernel's clock since boot, which no step of the
wall clock touches; so it never goes back, not over a change of workers either. Where somebody has
set the wall clock, the difference (`drift_s`) is known exactly, is told to other members, which add
it to their clock bound, and is worked off at half speed. The one place that reads the wall clock
for the order between nodes. Used under the file system's lock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from acpfs.ram.state import StateDatabase
from acpfs.runtime.clock import Clock

OFFSET_VARIABLE = "ACPFS_CLOCK_OFFSET_S"
"""For tests: seconds that this node's wall clock is ahead; a number, or the path of a file that
holds one.
"""
WORK_OFF_RATE = 0.5
"""A clock that was set by a minute is right again after two, and its bound with it.

Faster forward than this would be a step.
"""
DRIFT_S_MIN = 0.001
"""Less is how the two clocks are read one after the other."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

DDL = """
CREATE TABLE IF NOT EXISTS node_clock (
  one INTEGER PRIMARY KEY CHECK (one = 1), boot_id TEXT NOT NULL, base REAL NOT NULL,
  last REAL NOT NULL);
CREATE TABLE IF NOT EXISTS node_clock_past (
  one INTEGER PRIMARY KEY CHECK (one = 1), boot_id TEXT NOT NULL, until REAL NOT NULL,
  least REAL NOT NULL, most REAL NOT NULL);
"""


def wall_offset_s() -> float:
    """By how much a test wants this node's wall clock to be ahead."""
    wanted = os.environ.get(OFFSET_VARIABLE)
    if wanted is None:
        return 0.0
    return float(Path(wanted).read_text(encoding="ascii") if "/" in wanted else wanted)


def boot_id() -> str:
    """Of the running kernel; "" where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class NodeClock:
    """Seconds since the epoch, never going back."""

    def __init__(
        self,
        state: StateDatabase,
        clock: Clock,
        boot_id: Callable[[], str] = boot_id,
    ) -> None:
        """Go on where the last worker of this boot was. `boot_id`: replaced by tests."""
        self._state = state
        self._clock = clock
        self._running = clock.since_boot
        state.create(DDL)
        self._boot_id = boot_id()
        self._base = self._wall() - self._running()
        self._last = 0.0
        for known, base, last in state.rows("SELECT boot_id, base, last FROM node_clock"):
            self._last = last
            if known == self._boot_id:
                self._base = base
        self._worked_off_at = self._running()
        self._moved_until = -math.inf
        """The last stamp that was given before the clock was moved."""
        # of all bases that it had since stamps were last right
        self._least_base = self._base
        self._most_base = self._base
        past = "SELECT boot_id, until, least, most FROM node_clock_past"
        for known, until, least, most in state.rows(past):
            if known != self._boot_id:
                continue  # what the clock had then says nothing of this one
            self._moved_until = until
            self._least_base = min(self._base, least)
            self._most_base = max(self._base, most)

    def _wall(self) -> float:
        return self._clock.wall() + wall_offset_s()

    def now(self) -> float:
        """Later than, or equal to, everything that this gave before."""
        self._last = max(self._last, self._running() + self._base)
        return self._last

    def age_s(self, at: float) -> float:
        """How long ago something was stamped with this time.

        Changes nothing: may be asked without the lock.
        """
        return max(0.0, self._running() + self._base - at)

    def not_before(self, at: float) -> None:
        """Something was stamped with this time already."""
        self._last = max(self._last, at)

    @property
    def drift_s(self) -> float:
        """What the wall clock is ahead of this one, because somebody set it."""
        drift_s = self._wall() - self.now()
        return drift_s if abs(drift_s) >= DRIFT_S_MIN else 0.0

    def wrong_by_s(self, oldest: Callable[[], float]) -> float:
        """What stamps that still count may differ from the wall clock by, in seconds.

        By the wall clock as it is now, and this one as it was when it gave them: a difference that
        is worked off, or that somebody has taken back, is in them for as long as anything has them.

        `oldest`: tells the first stamp of all that is to come; infinity: nothing is.
        """
        drift_s = self.drift_s
        if not self._was_moved(oldest):
            return drift_s
        wall_base = self._wall() - self._running()
        wrong_s = (wall_base - self._least_base, wall_base - self._most_base, drift_s)
        largest_s = max(wrong_s, key=abs)
        return largest_s if abs(largest_s) >= DRIFT_S_MIN else 0.0

    def moved_s(self, oldest: Callable[[], float]) -> float:
        """By how much this clock was moved since it gave stamps that still count, in seconds.

        `oldest`: as for `wrong_by_s`.
        """
        if not self._was_moved(oldest):
            return 0.0
        return max(self._most_base - self._base, self._base - self._least_base)

    def _was_moved(self, oldest: Callable[[], float]) -> bool:
        """Whether it was, since it gave the first stamp that still counts."""
        if self._least_base != self._most_base and oldest() <= self._moved_until:
            return True
        self._least_base = self._base
        self._most_base = self._base
        return False

    def work_off(self) -> None:
        """Come nearer to the wall clock, by at most half of the time since the last call."""
        now = self._running()
        most = WORK_OFF_RATE * max(0.0, now - self._worked_off_at)
        self._worked_off_at = now
        drift_s = self.drift_s
        if drift_s:
            self._moved_until = self.now()
            self._base += max(-most, min(most, drift_s))
            self._least_base = min(self._least_base, self._base)
            self._most_base = max(self._most_base, self._base)
        self.keep()

    def keep(self) -> None:
        """For the next worker; part of the step's transaction."""
        self._state.change(
            "INSERT OR REPLACE INTO node_clock VALUES (1, ?, ?, ?)",
            (self._boot_id, self._base, self._last),
        )
        if self._least_base != self._most_base:
            self._state.change(
                "INSERT OR REPLACE INTO node_clock_past VALUES (1, ?, ?, ?, ?)",
                (self._boot_id, self._moved_until, self._least_base, self._most_base),
            )
