"""A failure of an operation as state: noted, told in the log file, and what follows, which is another try later or parking.

Decides nothing by itself (`retry` does) and carries nothing out. Used under the file system's lock.
"""

from __future__ import annotations

import errno

import trio

from acpfs.errors import errno_name
from acpfs.logger import get_logger
from acpfs.types import Seq
from acpfs.writeback.listener import Listener
from acpfs.writeback.log import OperationLog
from acpfs.writeback.ops import Op, VersionState
from acpfs.writeback.retry import RetryPolicy
from acpfs.writeback.stream_queue import StreamQueue
from acpfs.writeback.verify import OnlyCopyError

_log = get_logger(__name__)


class Failures:
    """Notes failures."""

    def __init__(self, log: OperationLog, queue: StreamQueue, retry: RetryPolicy, due: dict[Seq, float], listener: Listener) -> None:
        """`due`: when operations that failed are to be tried again."""
        self._ops, self._queue, self._retry, self._due, self._listener = log, queue, retry, due, listener

    def failed(self, op: Op, error: OSError) -> None:
        """Try again later, or park: at once where another try would succeed without bringing the bytes back."""
        delay_s = self._retry.failed(op, error)
        if isinstance(error, OnlyCopyError):
            delay_s, op.next_attempt_at = None, 0.0
        if op.version is not None and op.version.state is VersionState.STREAMING:
            op.version.state = VersionState.COMPLETE
        if delay_s is None:
            self._ops.park(op)
        else:
            self._due[op.seq] = trio.current_time() + delay_s
            self._ops.save(op)
            if op.version is not None and op.version.state is VersionState.COMPLETE:
                self._queue.add(op)
        self._tell(op, error, parked=delay_s is None)

    def staging_lost(self, op: Op) -> None:
        """The staging file was removed from outside, or lost by the backing file system: streamed again where RAM has the bytes."""
        assert op.version is not None
        if op.version.tier_id:
            op.version.state, op.version.staging_name = VersionState.COMPLETE, ""
            self._ops.save_version(op.version)
            self.failed(op, OSError(errno.EIO, "the staging file is gone"))
        else:
            op.last_error, op.last_detail = errno.EIO, "the staging file is gone, and its bytes are not in RAM any more"
            self._ops.park(op)  # only an alarm can help
            self._tell(op, OSError(op.last_error, op.last_detail), parked=True)

    def _tell(self, op: Op, error: OSError, *, parked: bool) -> None:
        """In the log file: each first failure and each parking; retries only when they become rare."""
        if parked or op.tries & (op.tries - 1) == 0:
            path = self._listener.display_path(op).decode("utf-8", "backslashreplace")
            level = _log.error if parked else _log.warning
            event = "backing directory failed; will be retried"
            if isinstance(error, OnlyCopyError):
                event = "bytes that are nowhere else may be lost: retry stores what is left of them, discard drops them"
            elif parked:
                event = "backing directory refuses for good; kept until retry or discard"
            level(event, path=path, kind=op.kind.value, error=errno_name(op.last_error), detail=error.strerror, tries=op.tries)
