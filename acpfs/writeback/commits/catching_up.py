"""Moves that were carried out although they failed, and that are recorded before it is their turn again.

Where a flush failed, too, what was committed ahead of such a move may have to be stored again. It belongs where the move has put it: at its
old place another file may lie by now, and the move, when it is tried again, would find itself done. Called in the commit thread.
"""

from __future__ import annotations

from threading import RLock

from acpfs.ram.state import StateDatabase
from acpfs.writeback.commits.conflicts import Conflicts
from acpfs.writeback.evidence.whereabouts import Whereabouts
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.manifest.manifest import Manifest


class CatchingUp:
    """Looks, and records."""

    def __init__(
        self,
        there: Whereabouts,
        tree: LowerTree,
        log: OperationLog,
        manifest: Manifest,
        state: StateDatabase,
        lock: RLock,
        conflicts: Conflicts,
    ) -> None:
        """`conflicts`: says where names lie."""
        self._there, self._tree, self._log, self._manifest = there, tree, log, manifest
        self._state, self._lock, self._conflicts = state, lock, conflicts

    def before(self, op: Op) -> None:
        """The operation is about to be carried out.

        Raises:
            OSError: the backing directory does not say where things are.
        """
        for other in self._there.moved(op):
            with self._lock:
                self._tree.begin_move()
                try:
                    self._record(other)
                finally:
                    self._tree.end_move()
                    self._state.commit()

    def _record(self, op: Op) -> None:
        at, to = self._conflicts.place(op, op.parent, op.name), self._conflicts.place(op, op.new_parent, op.new_name)
        source, target = self._tree.path_at(*at), self._tree.path_at(*to)
        if source is None or target is None:
            return
        if op.kind is OpKind.EXCHANGE:
            self._tree.exchange(at, to)
            self._manifest.exchange(source, target)
        else:
            self._tree.move(at, to)
            self._manifest.move(source, target)
        self._log.mark_committed(op)
