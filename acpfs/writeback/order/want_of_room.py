"""Operations that the backing directory has no room for, and since when.

Used under the file system's lock.

What waits behind them may be what makes room: when they have failed for long enough, removals may
pass them (`Order`).
"""

from __future__ import annotations

import math

from acpfs.errors import FULL_ERRNOS
from acpfs.types import Seq
from acpfs.writeback.guard.guarded import SPACE_PATIENCE_S
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, VersionState

LOOK_EVERY_S = 1.0


class WantOfRoom:
    """Says whether removals may pass what there is no room for."""

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        self.resume()

    def resume(self) -> None:
        """Another run of the engine begins, whose clock is another one."""
        self._wanting: dict[Seq, Op] = {}
        """Those that have failed for want of room, and are not tried again yet."""
        self._tried: dict[Seq, Op] = {}
        """Those that are tried again since something was removed."""
        self._looked_at = -math.inf
        self._since = math.inf
        """On trio's clock: since when there has been no room."""

    def failed(self, op: Op, number: int | None, now: float) -> None:
        """An operation failed: is it for want of room?"""
        self._tried.pop(op.seq, None)
        if number in FULL_ERRNOS:
            self._look(now)
            self._wanting[op.seq] = op
            self._since = min(self._since, now)

    def try_again(self) -> list[Op]:
        """Something was removed: those that want room, which are to be tried again now."""
        again = [op for op in self._wanting.values() if self._is_to_do(op)]
        self._tried.update(self._wanting)
        self._wanting.clear()
        return again

    def due(self, now: float) -> float:
        """When removals may pass, on trio's clock; infinity: they may now, or nothing wants
        room.
        """
        until = self._since + SPACE_PATIENCE_S
        return until if until > now else math.inf

    def is_wanted_by(self, op: Op, now: float) -> bool:
        """Whether the operation, on which all others wait, has no room, and there has been none for
        so long that removals may pass it.
        """
        self._look(now)
        if not self._is_to_do(op) or (
            op.version is not None and op.version.state is not VersionState.COMPLETE
        ):
            return False  # it is done, or being tried
        return self._wanting.get(op.seq) is op and now >= self._since + SPACE_PATIENCE_S

    def _look(self, now: float) -> None:
        """Forget those that have got room, or are gone.

        There may be very many, so not at each question.
        """
        if now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = now
        for ops in (self._wanting, self._tried):
            for op in [op for op in ops.values() if not self._is_to_do(op)]:
                del ops[op.seq]
        if not (self._wanting or self._tried):
            self._since = math.inf

    def _is_to_do(self, op: Op) -> bool:
        if self._log.get(op.seq) is not op or op.last_error not in FULL_ERRNOS or op.parked:
            return False
        return op.version is None or not op.version.is_staged
