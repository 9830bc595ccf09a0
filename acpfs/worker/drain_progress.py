"""What of the operation log is left for somebody who waits, and whether it will come by itself.

When something is parked, the engine looks past it only so far (`Order`): where all that it looks at is parked, or held up by that, nothing
behind comes either. Pure; used under the file system's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from acpfs.control.reports import Remaining
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op
from acpfs.writeback.order.order import SCAN_OPS_MAX, SET_ASIDE_OPS_MAX

COUNTED_OPS_MAX = SCAN_OPS_MAX + SET_ASIDE_OPS_MAX
"""Operations that are counted one by one, under the lock, four times a second while somebody waits; beyond, a bound is told."""


def remaining(
    log: OperationLog, until: int, paths: Sequence[bytes], path_of: Callable[[Op], bytes]
) -> Remaining:
    """What is left up to a log number; with `paths`, without what is parked (or held up by that) elsewhere."""
    front = log.front(COUNTED_OPS_MAX + 1)
    ours = [op for op in front[:COUNTED_OPS_MAX] if op.seq <= until]
    beyond = 0
    if len(front) > COUNTED_OPS_MAX and front[-1].seq <= until:
        beyond = max(1, len(log) - max(0, log.last_seq - until) - len(ours))
    if not any(op.parked for op in ours):
        return Remaining(
            len(ours) + beyond, log.dirty_bytes if beyond else _bytes_of(ours), stuck=False
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
