"""What lies under the name of a half: a file that the mount shows as replaced, and that stays until
the half is published.

A half (`interrupted`, or with a write that failed) that was never logged can be renamed over a file
that is complete on the backing directory, or will be. That is no operation as long as nobody has
decided: the complete one keeps its place in the committed tree, without a name in the upper tree.
It goes when the half is stored there, or leaves the name; it is back when the half is discarded. No
row is kept of this: it follows from the log and the two trees. Used under the file system's lock;
nothing here waits.
"""

from __future__ import annotations

from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.types import NO_INO, Ino
from acpfs.writeback.log.log import REMOVING, OperationLog
from acpfs.writeback.log.lower_tree import LowerTree, Place
from acpfs.writeback.log.ops import Op, OpKind


class Beneath:
    """Covered files by their names; there are few."""

    def __init__(self, table: NodeTable, log: OperationLog, tree: LowerTree) -> None:
        """Finds what an earlier worker left."""
        self._table = table
        places = [place for node in table if node.unlogged for place in node.names]
        will_lie = {place: tree.node_at(*place) or NO_INO for place in places}
        if will_lie:
            for op in log:
                for place, ino in _after(op):
                    if place in will_lie:
                        will_lie[place] = ino
        self._covered = {place: ino for place, ino in will_lie.items() if ino in table}

    def cover(self, place: Place, node: Node) -> None:
        """A half takes the name of a file that was logged."""
        self._covered[place] = node.ino

    def uncover(self, place: Place) -> Node | None:
        """The half was stored, has left or was dropped; returns what lies there, if anything."""
        return self._table.get(self._covered.pop(place, NO_INO)) if self._covered else None

    def __contains__(self, ino: Ino) -> bool:
        """Whether the node is covered somewhere."""
        return bool(self._covered) and ino in self._covered.values()


def _after(op: Op) -> tuple[tuple[Place, Ino], ...]:
    """What lies at the places that an operation touches, once it is carried out."""
    here = (op.parent, op.name)
    there = (op.new_parent, op.new_name)
    if op.kind in REMOVING:
        return ((here, NO_INO),)
    if op.kind is OpKind.RENAME:
        return (here, NO_INO), (there, op.ino)
    if op.kind is OpKind.EXCHANGE:
        return (here, op.victim), (there, op.ino)
    return ((here, op.ino),) if op.touches() else ()
