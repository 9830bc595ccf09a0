"""Removals of files, a run of them at a time: begun in one step, carried out one by one, recorded
in one step.

Each one that is begun alone costs two transactions, and where another member holds a copy of the
log, a wait until its journal says so. Files are mostly removed in large numbers; so those that come
one behind the other are begun together, and what has to be known ahead of a call is known ahead of
all of them. All else is as for one alone (`Committer`).

A run that ends early leaves those behind its end as never begun, but for their rows. Nobody relies
on more than that: a next worker, and whoever adopts the log, takes each for one that may have been
carried out. If the worker dies, all of the run is in doubt. So it is short: under each of its names
others may have put a file before a next worker looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from acpfs.types import Ino
from acpfs.writeback.commits.group import GroupOutcome
from acpfs.writeback.commits.store_runs import RUN_OPS_MAX, begin_together
from acpfs.writeback.evidence.whereabouts import MOVING
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.parts import DrainParts


def begin_removals(
    parts: DrainParts, ops: Sequence[Op], before: Callable[[Sequence[Op]], None], run: GroupOutcome
) -> list[Op]:
    """Those at the front that were begun together; none: the first one is to be begun alone, or
    `run` has ended.

    `before`: see `Committer`. Called in the commit thread.
    """
    return begin_together(parts, lambda: _plain(parts.log, ops), before, run)


def _plain(log: OperationLog, ops: Sequence[Op]) -> list[Op]:
    if any(op.kind in MOVING for op in log.in_doubt()):
        return []  # it may have to be recorded before one that it concerns is begun
    found: dict[Ino, Op] = {}
    for op in ops[:RUN_OPS_MAX]:
        # what was begun before is looked at alone; a journal takes no two of one node in a row
        if op.kind is not OpKind.UNLINK or op.begun or op.ino in found or log.get(op.seq) is not op:
            break
        found[op.ino] = op
    return list(found.values())
