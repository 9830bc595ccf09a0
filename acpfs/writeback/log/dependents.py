"""Operations that cannot be carried out without others that are given up.

Used under the file system's lock.
"""

from __future__ import annotations

from acpfs.types import Ino, Seq
from acpfs.writeback.log.log import CREATING, OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.log.ops import Op


def with_dependents(log: OperationLog, tree: LowerTree, seqs: set[Seq]) -> list[Op]:
    """Those operations, and the ones that need what they would have made (below a directory that
    will not be made), in order.
    """
    chosen: list[Op] = []
    never_made: set[Ino] = set()
    for op in log:
        needed = {op.ino, op.victim, op.parent, op.new_parent}
        if (op.seq in seqs or needed & never_made) and not op.started:
            chosen.append(op)
            if op.kind in CREATING and op.ino not in tree:
                never_made.add(op.ino)
    return chosen
