"""Files whose writer was lost: what people decide about them. Used under the file system's lock."""

from __future__ import annotations

from collections.abc import Callable

from acpfs.filesystem.changes import Changes
from acpfs.filesystem.doubtful_closes import DoubtfulCloses
from acpfs.filesystem.file_reports import Reports
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.state import StateDatabase
from acpfs.types import TierId


class InterruptedFiles:
    """Stores them as they are, or gives them up."""

    def __init__(
        self,
        state: StateDatabase,
        table: NodeTable,
        reports: Reports,
        changes: Changes,
        closes: DoubtfulCloses,
        finish: Callable[[Node], None],
        is_kept_back: Callable[[TierId], bool],
    ) -> None:
        """`finish`: has what did not fit into RAM follow in the background. `is_kept_back`: whether
        processes of an earlier mount can still write a tier file.
        """
        self._state = state
        self._table = table
        self._reports = reports
        self._changes = changes
        self._closes = closes
        self._finish = finish
        self._is_kept_back = is_kept_back

    def store(self, path: bytes) -> int:
        """Store those below a path as they are, but for what others can still write; returns how
        many.
        """
        nodes = [
            node
            for node in self._reports.interrupted(path)
            if not self._is_kept_back(node.body.tier)
        ]
        with self._state.step():
            for node in nodes:
                node.body.failed = 0  # as it is
                node.body.failed_at = 0
                node.body.interrupted = False
                self._closes.fix(node)
                self._finish(node)
        return len(nodes)

    def discard(self, path: bytes) -> tuple[int, list[bytes]]:
        """Show what was there before those below a path; returns how many, and the paths of those
        that somebody has open, which stay.
        """
        nodes = self._reports.interrupted(path)
        left = [self._table.path(node.ino) for node in nodes if node.handles]
        with self._state.step():
            for node in nodes:
                if not node.handles:
                    self._changes.discard(node)
        return len(nodes) - len(left), left
