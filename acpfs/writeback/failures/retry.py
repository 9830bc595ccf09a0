"""What becomes of an operation that failed: tried again after a growing, jittered delay, or parked,
and then tried again now and then.

Delays run on trio's monotonic clock; the wall clock time in `Op.next_attempt_at` is for people to
read, so a clock jump changes nothing. Used under the file system's lock.
"""

from __future__ import annotations

import errno

from acpfs.errors import PERMANENT_ERRNOS
from acpfs.runtime.given import Runtime
from acpfs.types import Seq
from acpfs.writeback.evidence.verify import MisreadError
from acpfs.writeback.log.ops import Op, OpKind

PERMANENT_TRIES = 3
"""Refusals in a row, for the same reason, before an operation is parked: a replicated file system
in trouble answers with wrong errnos.

One that names another reason each time (GlusterFS with `debug.error-gen`: EROFS, EINVAL, EISDIR)
refuses nothing, it is ill. Also streams in a row that read back differently: storage that spoils
what it is given is not written to for ever.
"""
PARKED_DELAY_MIN_S = 120.0
PARKED_DELAY_MAX_S = 600.0
"""How long a parked operation stays before it is tried by itself.

Each try holds up what comes after it for as long as it takes.
"""
_REFUSALS = PERMANENT_ERRNOS | {errno.ENOENT}
"""ENOENT reaches us only when repair did not help: the place is gone and cannot be made again."""
_MOVES = frozenset({OpKind.RENAME, OpKind.EXCHANGE, OpKind.RMDIR})
"""EBUSY refuses these: of a directory that something is mounted on, which is so until somebody
unmounts it.

All else that says so is tried again soon: a server that others keep a file open on (SMB), a device
that is busy.
"""
_ENDING = (_REFUSALS | {errno.EBUSY}) - {
    errno.EFBIG,
    errno.EMLINK,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.EOPNOTSUPP,
}
"""Refusals that somebody may end: a file system becomes writable again, a permission is given, a
foreign file removed.

The others are for good, and to try them again may take a stream of the whole file.
"""


class RetryPolicy:
    """Counts failures and decides."""

    def __init__(
        self,
        delay_min_s: float,
        delay_max_s: float,
        runtime: Runtime,
    ) -> None:
        self._delay_min_s = delay_min_s
        self._delay_max_s = max(delay_min_s, delay_max_s)
        self._wall_clock = runtime.clock.wall
        self._random = runtime.chance.source
        self._refusals: dict[Seq, tuple[int, int]] = {}
        """Errno of the last refusal, and how often in a row."""
        self._parked: dict[Seq, tuple[int, int]] = {}
        """Errno that it was parked for last, and how often."""

    def delay_s(self, tries: int) -> float:
        """Between half and all of min · 2^(tries-1), at most max: many nodes must not come back in
        step.
        """
        full = min(self._delay_max_s, self._delay_min_s * 2.0 ** min(tries - 1, 60))
        return full * self._random.uniform(0.5, 1.0)

    def failed(self, op: Op, error: OSError) -> float | None:
        """Note a failure on the operation; seconds until the next attempt, or None: park it."""
        op.tries += 1
        op.last_error = error.errno or errno.EIO
        op.last_detail = error.strerror or str(error)
        if _is_refusal(op) or isinstance(error, MisreadError):
            reason, times = self._refusals.get(op.seq, (op.last_error, 0))
            self._refusals[op.seq] = (op.last_error, times + 1 if reason == op.last_error else 1)
            if (
                self._refusals[op.seq][1] >= PERMANENT_TRIES
                or self._parked.get(op.seq, (0, 0))[0] == op.last_error
            ):
                self._refusals.pop(op.seq, None)
                op.next_attempt_at = 0.0
                return None
        else:
            self._refusals.pop(op.seq, None)
        delay_s = self.delay_s(op.tries)
        op.next_attempt_at = self._wall_clock() + delay_s
        return delay_s

    def parked_delay_s(self, op: Op) -> float | None:
        """Seconds after which the operation, which is being parked, is to be tried by itself; None:
        only when somebody says so.
        """
        if op.last_error not in _ENDING:
            return None
        number, times = self._parked.get(op.seq, (0, 0))
        times = times + 1 if number == op.last_error else 1
        self._parked[op.seq] = (op.last_error, times)
        delay_s = min(
            PARKED_DELAY_MAX_S, PARKED_DELAY_MIN_S * 2.0 ** (times - 1)
        ) * self._random.uniform(1.0, 1.25)
        op.next_attempt_at = self._wall_clock() + delay_s
        return delay_s

    def was_parked(self, op: Op) -> bool:
        """Whether the operation was parked before it was tried by itself."""
        return op.seq in self._parked

    def forget(self, op: Op) -> None:
        """The operation is done, or starts afresh."""
        self._refusals.pop(op.seq, None)
        self._parked.pop(op.seq, None)


def _is_refusal(op: Op) -> bool:
    return op.last_error in _REFUSALS or (op.last_error == errno.EBUSY and op.kind in _MOVES)
