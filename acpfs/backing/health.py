"""Health of the backing directory, derived from its calls: how long the ones in flight have been
out, and whether they fail.

Gets worse at once and better only after a while, so that a flickering server does not make the rest
flicker. Costs no thread: the state is worked out when someone asks. Thread-safe.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from acpfs.runtime.clock import Clock

SLOW_AFTER_S = 2.0
"""A call that is out this long makes the backing directory slow; NFS and Lustre answer within this
under heavy load.
"""
STUCK_VARIABLE = "ACPFS_STUCK_AFTER"
"""For tests: the same in seconds."""
STUCK_AFTER_S = float(os.environ.get(STUCK_VARIABLE, "10"))
"""A call that is out this long counts as hung, until it returns."""
REFUSING_AFTER_FAILURES = 3
"""So many failures in a row, of one kind of call, and the backing directory counts as refusing."""
REFUSES_FOR_S = 300.0
"""What was refused is tried again sooner, and says then how it is. What is not was given up, or
removed: nobody can tell any more, and an alert that never ends is heeded by nobody. Longer where
retries are rarer (`Health.retries_every`).
"""
RECOVER_AFTER_S = 2.0
"""How long things must look better before the state says so."""

TROUBLE = frozenset(
    {
        errno.EIO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ENXIO,
        errno.ENODEV,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOMEM,
    }
)
"""Errors that say something about the backing directory; the others (ENOENT, EEXIST …) are answers
about a name.
"""


class HealthState(IntEnum):
    """From good to bad."""

    OK = 0
    SLOW = 1
    REFUSING = 2
    """Calls return, with errors."""
    STUCK = 3
    """At least one call does not return."""


@dataclass(frozen=True, slots=True)
class HealthStatistics:
    """What `status` and the metrics show."""

    state: str
    since: float
    """Wall clock, seconds: when the state was entered."""
    in_flight: int
    stuck: int
    oldest_s: float
    oldest_call: str
    """What is called by the call that is out longest; empty: none is out."""
    last_error: str
    """Of the latest call that failed, while no call of its kind has been answered since."""
    failures: int


_here = threading.local()


class CallInFlight:
    """One call that has not returned; around it, in the thread that makes it (`Health.call`)."""

    __slots__ = ("_health", "_outer", "clock", "label", "pool", "started")

    def __init__(self, health: Health, clock: Callable[[], float], pool: str, label: str) -> None:
        self._health = health
        self.clock = clock
        self._outer: CallInFlight | None = None
        self.pool = pool
        self.label = label
        self.started: float | None = None

    def __enter__(self) -> CallInFlight:
        self._outer = getattr(_here, "call", None)
        self._health.begin(self)
        _here.call = self
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        _here.call = self._outer
        self._health.end(self, error)

    def age_s(self) -> float:
        """How long it has made no progress."""
        started = self.started
        return 0.0 if started is None else self.clock() - started

    def progress(self) -> None:
        """The call is long, not hung: count from now."""
        self.started = self.clock()

    def pause(self) -> None:
        """The call waits for something that is not the backing directory; `progress` ends that."""
        self.started = None


def current_call() -> CallInFlight | None:
    """The call that this thread is making."""
    return getattr(_here, "call", None)


def current_call_goes_on() -> None:
    """The call that this thread is making, if it makes one, is long, not hung."""
    call = getattr(_here, "call", None)
    if call is not None:
        call.started = call.clock()


class Health:
    """Shared by all pools of one backing directory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock.now
        self._wall = clock.wall
        self._lock = threading.Lock()
        self._in_flight: set[CallInFlight] = set()
        self._failures_in_a_row: dict[str, int] = {}
        self._failed_at: dict[str, float] = {}
        """When the latest of those failed."""
        self._state = HealthState.OK
        self._since = self._wall()
        self._better_since: float | None = None
        self._errors: dict[str, str] = {}
        """Of each pool whose last call failed: what it said; the latest stands last.

        An error that was followed by a good call of the same kind explains nothing any more.
        """
        self._failures = 0
        self._refuses_for_s = REFUSES_FOR_S

    def retries_every(self, delay_s: float) -> None:
        """So long, at most, whoever was refused waits before it tries again: until then, and once
        more as some time may go by in a queue, what was refused says how it is.
        """
        self._refuses_for_s = max(REFUSES_FOR_S, 2 * delay_s)

    def call(self, pool: str, label: str) -> CallInFlight:
        """Around one call, in the thread that makes it."""
        return CallInFlight(self, self._clock, pool, label)

    def begin(self, call: CallInFlight) -> None:
        """A call begins."""
        with self._lock:
            # in one: who sees no call under way knows that the next one begins later
            call.started = self._clock()
            self._in_flight.add(call)

    def end(self, call: CallInFlight, error: BaseException | None) -> None:
        """It has returned; what is no error of the system says nothing."""
        with self._lock:
            self._in_flight.discard(call)
            if error is None:
                if call.pool in self._failures_in_a_row:
                    self._forget(call.pool)
            elif isinstance(error, OSError):
                self._count(call, error)
        if self._state is not HealthState.OK:
            self.state()

    def _count(self, call: CallInFlight, error: OSError) -> None:
        if error.errno not in TROUBLE:
            self._forget(call.pool)
            return
        self._failures += 1
        self._failures_in_a_row[call.pool] = self._failures_in_a_row.get(call.pool, 0) + 1
        self._failed_at[call.pool] = self._clock()
        self._errors.pop(call.pool, None)  # so that it is put in as the latest
        self._errors[call.pool] = f"{call.label}: {error.strerror or error}"

    def _forget(self, pool: str) -> None:
        self._failures_in_a_row.pop(pool, None)
        self._failed_at.pop(pool, None)
        self._errors.pop(pool, None)

    def in_flight(self, pool: str | None = None) -> list[CallInFlight]:
        """Calls that have not returned."""
        with self._lock:
            return [call for call in self._in_flight if pool is None or call.pool == pool]

    def state(self) -> HealthState:
        """As of now, with hysteresis."""
        with self._lock:
            found = self._look()
            now = self._clock()
            if found >= self._state:
                self._better_since = None
                if found > self._state:
                    self._enter(found)
            elif self._better_since is None:
                self._better_since = now
            elif now - self._better_since >= RECOVER_AFTER_S:
                self._enter(found)
            return self._state

    def _enter(self, state: HealthState) -> None:
        self._state = state
        self._since = self._wall()
        self._better_since = None

    def _look(self) -> HealthState:
        now = self._clock()
        for pool, failed_at in list(self._failed_at.items()):
            if now - failed_at > self._refuses_for_s:
                self._forget(pool)
        oldest = now
        for call in self._in_flight:  # asked for each question to the backing directory
            started = call.started
            if started is not None and started < oldest:
                oldest = started
        if now - oldest > STUCK_AFTER_S:
            return HealthState.STUCK
        if self._failures_in_a_row and (
            max(self._failures_in_a_row.values()) >= REFUSING_AFTER_FAILURES
        ):
            return HealthState.REFUSING
        return HealthState.SLOW if now - oldest > SLOW_AFTER_S else HealthState.OK

    def is_stuck(self) -> bool:
        """Whether calls that can be avoided should be."""
        return self.state() is HealthState.STUCK

    def is_late(self, pool: str, patience_s: float) -> bool:
        """Whether a call of that kind is out for longer than that."""
        now = self._clock()
        with self._lock:
            for call in self._in_flight:
                started = call.started
                if started is not None and call.pool == pool and now - started > patience_s:
                    return True
        return False

    def statistics(self) -> HealthStatistics:
        """What `status`, the metrics and the tests see."""
        state = self.state()
        with self._lock:
            calls = [(call.age_s(), call.label) for call in self._in_flight]
            oldest_s, oldest_call = max(calls, default=(0.0, ""))
            return HealthStatistics(
                state.name.lower(),
                self._since,
                len(calls),
                sum(age > STUCK_AFTER_S for age, _label in calls),
                oldest_s,
                oldest_call,
                next(reversed(self._errors.values()), ""),
                self._failures,
            )
