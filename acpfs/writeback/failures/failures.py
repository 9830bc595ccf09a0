"""A failure of an operation as state: noted, told in the log file, and what follows, which is
another try later or parking.

Decides nothing by itself (`retry` does) and carries nothing out. Used under the file system's lock.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable

import trio

from acpfs.errors import errno_name
from acpfs.logger import get_logger, shown
from acpfs.types import Seq
from acpfs.writeback.evidence.verify import MisreadError, OnlyCopyError
from acpfs.writeback.failures.retry import PARKED_DELAY_MIN_S, RetryPolicy
from acpfs.writeback.log.ops import Op, VersionState
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.streams.stream_queue import StreamQueue

_log = get_logger(__name__)


TRIED_AT_ONCE = 64
TRIED_EVERY_S = 10.0
"""Parked operations that are tried again by themselves at the same time, and when the next ones
are.
"""


class Failures:
    """Notes failures."""

    def __init__(
        self, parts: DrainParts, queue: StreamQueue, retry: RetryPolicy, due: dict[Seq, float]
    ) -> None:
        """`due`: when operations that failed are to be tried again."""
        self._parts = parts
        self._ops = parts.log
        self._queue = queue
        self._retry = retry
        self._due = due
        self._parked_until: dict[Seq, float] = {}
        """Parked operations that are tried again by themselves, and when, on trio's clock."""
        self._look_at = math.inf
        """Not later than the first of these times: there may be very many."""

    def failed(self, op: Op, error: OSError) -> None:
        """Try again later, or park: at once where another try would succeed without bringing the
        bytes back.
        """
        self._parts.counters.retries += 1
        delay_s = self._retry.failed(op, error)
        again = self._retry.was_parked(op)
        if isinstance(error, OnlyCopyError):
            delay_s = None
            op.next_attempt_at = 0.0
        if op.version is not None and op.version.state is VersionState.STREAMING:
            op.version.state = VersionState.COMPLETE
        if delay_s is None:
            until_s = (
                None
                if isinstance(error, (OnlyCopyError, MisreadError))
                else self._retry.parked_delay_s(op)
            )
            if until_s is not None:
                self._put_aside(op.seq, trio.current_time() + until_s)
            self._ops.park(op)
        else:
            self._due[op.seq] = trio.current_time() + delay_s
            self._ops.save(op)
            if op.version is not None and op.version.state is VersionState.COMPLETE:
                self._queue.add(op)
        self._tell(op, error, parked=delay_s is None and not again)

    # -- parked operations that are tried again by themselves

    def resume(self) -> None:
        """Another run of the engine begins, whose clock is another one."""
        self._parked_until = {}
        self._look_at = math.inf
        for op in self._ops.parked():
            if op.next_attempt_at and not op.withheld:
                self._put_aside(op.seq, trio.current_time() + PARKED_DELAY_MIN_S)

    def _put_aside(self, seq: Seq, until: float) -> None:
        self._parked_until[seq] = until
        self._look_at = min(self._look_at, until)

    def next_parked(self) -> float:
        """When to look for those that are to be tried, on trio's clock."""
        return self._look_at

    def try_parked(self, now: float) -> bool:
        """Bring those back into the order whose time has come, the oldest first, some at a time;
        whether there were any.
        """
        if now < self._look_at:
            return False
        due = sorted(seq for seq, until in self._parked_until.items() if until <= now)
        for seq in due[TRIED_AT_ONCE:]:
            self._parked_until[seq] = now + TRIED_EVERY_S
        for seq in due[:TRIED_AT_ONCE]:
            del self._parked_until[seq]
        self._look_at = min(self._parked_until.values(), default=math.inf)
        self.unpark(
            op
            for seq in due[:TRIED_AT_ONCE]
            if (op := self._ops.get(seq)) is not None and op.parked
        )
        return bool(due)

    def unpark(self, ops: Iterable[Op]) -> None:
        """They are to be tried again, now."""
        for op in ops:
            self._parked_until.pop(op.seq, None)
            self._ops.unpark(op)
            if op.version is not None and op.version.state is VersionState.COMPLETE:
                self._queue.add(op)

    def persisted(self, op: Op) -> None:
        """What was refused has been done: those that were refused for the same reason are tried at
        once.
        """
        if self._parked_until and self._retry.was_parked(op):
            self.unpark(
                [
                    other
                    for other in self._ops.parked()
                    if other.seq in self._parked_until and other.last_error == op.last_error
                ]
            )

    def forget(self, op: Op) -> None:
        """The operation is done, or starts afresh."""
        self._parked_until.pop(op.seq, None)
        self._retry.forget(op)

    # -- the bytes are gone

    def staging_lost(self, op: Op) -> None:
        """The staging file was removed from outside, or lost by the backing file system: streamed
        again where RAM has the bytes.
        """
        assert op.version is not None
        if op.version.is_local:
            op.version.state = VersionState.COMPLETE
            op.version.staging_name = ""
            self._ops.save_version(op.version)
            self._parts.listener.unstaged(op.version)
            self.failed(op, OSError(errno.EIO, "the staging file is gone"))
        else:
            # Its bytes left RAM and the backing directory lost them: only an alarm can help.
            error = OSError(
                errno.EIO, "the staging file is gone, and its bytes are not in RAM any more"
            )
            op.last_error = error.errno
            op.last_detail = error.strerror or ""
            op.next_attempt_at = 0.0
            self._ops.park(op)
            self._tell(op, error, parked=True)

    def _tell(self, op: Op, error: OSError, *, parked: bool) -> None:
        """In the log file: each first failure and each parking; retries only when they become
        rare.
        """
        if parked or op.tries & (op.tries - 1) == 0:
            path = shown(self._parts.listener.display_path(op))
            level = _log.error if parked else _log.warning
            event = "backing directory failed; will be retried"
            if isinstance(error, OnlyCopyError):
                event = (
                    "bytes that are nowhere else may be lost: retry stores what is left of them, "
                    "discard drops them"
                )
            elif parked:
                event = "backing directory refuses; kept, until retry or discard"
                event += "" if op.next_attempt_at else ", and not tried again by itself"
            level(
                event,
                path=path,
                kind=op.kind.value,
                error=errno_name(op.last_error),
                detail=error.strerror,
                tries=op.tries,
            )
