"""Names that operations in the log will take from where they lie on the backing directory, or are
just taking.

Reads only; used under the file system's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.backing.lower import LowerPath
from acpfs.writeback.log.log import REMOVING, OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.log.ops import OpKind

_TAKING = REMOVING | {OpKind.RENAME, OpKind.EXCHANGE}


@dataclass(frozen=True, slots=True)
class MovingNames:
    """See above."""

    log: OperationLog
    tree: LowerTree

    def cover(self, path: LowerPath) -> bool:
        """Whether a path, or a directory that it lies in, is deleted or renamed by something that
        is not persisted yet.
        """
        places = (place for op in self.log if op.kind in _TAKING for place in op.touches())
        taken = (self.tree.path_at(*place) for place in places)
        return any(name is not None and path[: len(name)] == name for name in taken)
