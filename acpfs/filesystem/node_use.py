"""How long the file system keeps a file in mind that somebody has open, or is in a call on.

Used under the file system's lock; nothing here waits.
"""

from __future__ import annotations

from acpfs.filesystem.changes import Changes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.warming import Warming
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Node, NodeTable


class NodeUse:
    """Begins and ends with who counts himself in `Node.handles`."""

    def __init__(
        self,
        table: NodeTable,
        changes: Changes,
        warming: Warming,
        contents: Contents,
        view: LowerView,
    ) -> None:
        self._table = table
        self._changes = changes
        self._warming = warming
        self._contents = contents
        self._view = view

    def needed(self, node: Node) -> None:
        """Somebody has it open now."""
        self._table.needed(node)

    def closed(self, node: Node) -> None:
        """One user of the node less."""
        node.handles -= 1
        if node.handles == 0:
            self._table.needed_no_more(node)
            if node.body.modified and not node.body.interrupted:
                self._changes.freeze(
                    node
                )  # by a call that was broken off, and whose handle never heard of it
            self._warming.closed(node)
            self._contents.closed(node)
            self._view.nameless.closed(node)
            self._view.reap(node)
