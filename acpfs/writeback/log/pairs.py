"""A content and the rename that comes next: both are carried out as one, straight to the last name.

Programs write a file under a temporary name and rename it. Carried out as two, the first would put
it under the temporary name on the backing directory, perhaps much later than the program did. If
members share that name (`latest.tmp`), another one's newer file lies there by then: it would be
replaced, renamed away, and missing when its own program renames it. So nothing of a pair ever has
the temporary name there, and what others have put there stays (S630).

Which two may be a pair follows from the log and the committed tree. They are begun together and
recorded together, and the rename's row says in between that they are one (`Op.is_with_content`): so
a next worker takes them for one, and two that were tried one by one for two. Used under the file
system's lock.
"""

from __future__ import annotations

from acpfs.writeback.log.log import CONTENTS, OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.log.ops import Op, OpKind


class Pairs:
    """See above."""

    def __init__(self, log: OperationLog, tree: LowerTree) -> None:
        self._log = log
        self._tree = tree

    def move_of(self, op: Op) -> Op | None:
        """The rename with which a content is carried out; None: it is carried out alone."""
        if op.kind not in CONTENTS or op.committed:
            return None
        move = self._log.move_of(op)
        return move if move is not None and self._are_one(op, move) else None

    def content_of(self, op: Op) -> Op | None:
        """The content that is carried out with a rename; None: it is carried out alone."""
        if op.kind is not OpKind.RENAME or op.committed:
            return None
        content = self._log.before_of(op)
        return content if content is not None and self.move_of(content) is op else None

    def _are_one(self, content: Op, move: Op) -> bool:
        if move.committed:
            return False
        if content.begun or move.begun:
            # what was begun alone may lie under the temporary name
            return move.is_with_content
        places = self._tree.places(content.ino)
        return not places or places == [(content.parent, content.name)]
