"""Lookups and attributes that are answered from memory: there is nothing to wait for, and no row
changes.

They are most of the requests for small files, and a coroutine with its step costs more than such an
answer. Whatever is not that simple (None) goes the way of every call, and comes to the same result
there. Takes the lock.
"""

from __future__ import annotations

import errno

from acpfs.config import Settings
from acpfs.filesystem.attribute_calls import NEVER_KEPT, AttributeCalls
from acpfs.filesystem.lowerview import HIDDEN, LowerView
from acpfs.filesystem.names import NAME_BYTES_MAX
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.records import Attributes
from acpfs.filesystem.steps import Steps
from acpfs.runtime.clock import Clock
from acpfs.types import Ino

_ASKED = frozenset({b".", b"..", HIDDEN})
"""Names with a meaning of their own."""


class AtOnce:
    """Answers what needs no call."""

    def __init__(
        self,
        settings: Settings,
        table: NodeTable,
        view: LowerView,
        attributes: AttributeCalls,
        steps: Steps,
        clock: Clock,
    ) -> None:
        self._now = clock.now
        self._settings = settings
        self._table = table
        self._view = view
        self._attributes = attributes
        self._steps = steps

    def attributes(self, ino: Ino) -> Attributes | None:
        """As `FileSystem.getattr`."""
        with self._steps.lock:
            now = self._now()
            self._steps.last_at = now
            node = self._table.get(ino)
            if node is None or not (
                self._view.held(node) or self._view.is_fresh(node.checked_at, now)
            ):
                return None
            return self._of(node)

    def entry(self, parent_ino: Ino, name: bytes) -> Attributes | int | None:
        """As `FileSystem.lookup`, with a reference taken, or an errno."""
        if name in _ASKED or len(name) > NAME_BYTES_MAX:
            return None
        with self._steps.lock:
            now = self._now()
            self._steps.last_at = now
            parent = self._table.get(parent_ino)
            if parent is None or not parent.is_dir:
                return None
            child = parent.dir.children.get(name)
            if not self._view.is_settled(parent, name, child, now, since=0.0):
                return None
            if child is None or not child.ino:
                return None if self._settings.wait_for_peers_s else errno.ENOENT
            node = self._table[child.ino]
            found = self._of(node)
            node.lookups += found is not None
            return found

    @staticmethod
    def never_kept(name: bytes) -> int | None:
        """As `FileSystem.getxattr` of an extended attribute that no file has (S269): an errno.

        Where the kernel cannot leave set-uid bits to us (libfuse, Linux before 5.12) it asks for
        security.capability before each write.
        """
        return errno.EOPNOTSUPP if name in NEVER_KEPT else None

    def _of(self, node: Node) -> Attributes | None:
        """None: the kernel writes to it, and what it wrote is taken over first, which may change
        its row.
        """
        return None if node.kernel_writers else self._attributes.of(node)
