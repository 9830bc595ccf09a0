"""What of the operation log is left for somebody who waits, and whether it will come by itself.

When something is parked, the engine looks past it only so far (`Order`): where all that it looks at
is parked, or held up by that, nothing behind comes either. Pure; used under the file system's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from acpfs.control.reports import PaceReport, Remaining
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op
from acpfs.writeback.order.order import SCAN_OPS_MAX, SET_ASIDE_OPS_MAX

COUNTED_OPS_MAX = SCAN_OPS_MAX + SET_ASIDE_OPS_MAX
"""Operations that are counted one by one, under the lock, four times a second while somebody waits;
beyond, a bound is told.
"""


PACE_S = 30.0
"""Over so long it is looked how fast operations come and go."""
BEHIND_OPS_MIN = 1000
"""Fewer that wait are no queue that anybody has to hear of: one save of a checkpoint may log as
many.
"""


class DrainPace:
    """Whether the drain keeps up with what comes: by how many operations were logged, and how many
    have left, lately.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, int]] = deque()

    def look(self, now: float, log: OperationLog) -> None:
        """Once a second or so; `now`: monotonic."""
        self._looks.append((now, int(log.last_seq), len(log)))
        while len(self._looks) > 2 and self._looks[1][0] <= now - PACE_S:
            self._looks.popleft()

    def report(self) -> PaceReport:
        """Operations per second that came and that left, and whether more and more of them wait."""
        if len(self._looks) < 2:
            return PaceReport(0.0, 0.0, falls_behind=False)
        (since, logged, queued) = self._looks[0]
        (until, logged_now, queued_now) = self._looks[-1]
        span_s = max(until - since, 1e-3)
        came = logged_now - logged
        left = came - (queued_now - queued)
        grows = queued_now > queued and queued_now >= BEHIND_OPS_MIN
        return PaceReport(came / span_s, left / span_s, falls_behind=grows and span_s >= PACE_S / 2)


def remaining(
    log: OperationLog, until: int, paths: Sequence[bytes], path_of: Callable[[Op], bytes]
) -> Remaining:
    """What is left up to a log number; with `paths`, without what is parked (or held up by that)
    elsewhere.
    """
    front = log.front(COUNTED_OPS_MAX + 1)
    ours = [op for op in front[:COUNTED_OPS_MAX] if op.seq <= until]
    beyond = 0
    if len(front) > COUNTED_OPS_MAX and front[-1].seq <= until:
        beyond = max(1, len(log) - max(0, log.last_seq - until) - len(ours))
    if not any(op.parked for op in ours):
        return Remaining(
            len(ours) + beyond, log.sizes.dirty_bytes if beyond else _bytes_of(ours), stuck=False
        )
    wanted = [op for op in ours if not op.is_stuck or not paths or is_below_any(path_of(op), paths)]
    stuck = bool(wanted or beyond) and all(op.is_stuck for op in ours)
    withheld = stuck and not any(op.parked and not op.withheld for op in ours)
    return Remaining(len(wanted) + beyond, _bytes_of(wanted), stuck=stuck, withheld=withheld)


def is_below_any(name: bytes, paths: Iterable[bytes]) -> bool:
    """Whether a path is one of these, or lies below it."""
    return any(not path or name == path or name.startswith(path + b"/") for path in paths)


def _bytes_of(ops: Iterable[Op]) -> int:
    return sum(op.version.size for op in ops if op.version is not None)
