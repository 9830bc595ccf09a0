"""Directories are listed ahead: when a name is made in one, so that its names are known when the
backing directory does not answer later.

Nobody waits for such a listing, and it answers nothing as long as the backing directory does. Used
under the file system's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import RLock

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import LowerEntry
from acpfs.filesystem.known_names import Inquiry
from acpfs.filesystem.nodes import UPPER_INO_FIRST, Node, NodeTable
from acpfs.types import ROOT, Ino
from acpfs.writeback.evidence.whereabouts import Whereabouts
from acpfs.writeback.log.lower_tree import LowerTree

BYTES_MAX = 8 << 20
"""Larger directories (by st_size) are not listed ahead: about 100,000 entries, which take 25 MB
here, and a second of a thread.
"""
AGAIN_MAX = 1000
"""So many directories are listed when a worker begins."""
AT_ONCE = 4
"""Of the threads for requests; a backing directory that hangs keeps them."""


class ListingsAhead:
    """Directories that are to be listed, and those that are being listed."""

    def __init__(
        self,
        lower: Whereabouts,
        calls: CallPool,
        tree: LowerTree,
        table: NodeTable,
        lock: RLock,
        take: Callable[[Node, int, Inquiry, Sequence[LowerEntry]], None],
    ) -> None:
        """`take`: takes over a listing: the directory, its `notes` and the time when it was asked
        for, the entries.
        """
        self._lower = lower
        self._calls = calls
        self._tree = tree
        self._table = table
        self._lock = lock
        self._take = take
        self._wanted: dict[Ino, None] = {}
        self._under_way: set[Ino] = set()
        self._beginning = False

    def made_a_name_in(self, parent: Node) -> None:
        """Have the directory listed, if this worker never did. Does not wait."""
        if parent.dir.listed_at <= 0 and parent.ino in self._tree and parent.size <= BYTES_MAX:
            self._wanted[parent.ino] = None
            self._begin()

    def taken_over(self) -> None:
        """Another worker begins, whose listings are those that were kept.

        The top, and where this mount has made names, are listed anew.
        """
        parents = {
            parent
            for node in self._table
            if node.ino >= UPPER_INO_FIRST
            for parent, _name in node.names
        }
        for ino in (
            ROOT,
            *sorted(parents - {ROOT})[:AGAIN_MAX],
        ):  # those that were there before the mount first: save_dirs, mostly
            node = self._table.get(ino)
            if node is not None and node.is_dir:
                self.made_a_name_in(node)

    def _begin(self) -> None:
        if self._beginning:
            return  # a call that is refused at once is told at once, in here
        self._beginning = True
        try:
            self._begin_some()
        finally:
            self._beginning = False

    def _begin_some(self) -> None:
        while self._wanted and len(self._under_way) < AT_ONCE:
            ino = next(iter(self._wanted))
            del self._wanted[ino]
            parent = self._table.get(ino)
            path = self._tree.path(ino)
            if parent is None or path is None or ino in self._under_way or parent.dir.listed_at > 0:
                continue
            self._under_way.add(ino)
            clock = self._calls.clock
            inquiry = Inquiry(clock.now(), clock.serial())
            asked = (parent, parent.dir.notes, inquiry, self._tree.epoch)
            self._calls.submit("listdir", self._lower.listdir, path).add_done_callback(
                lambda done, asked=asked: self._listed(asked, done)  # type: ignore[misc]
            )

    def _listed(
        self, asked: tuple[Node, int, Inquiry, int], done: Future[list[LowerEntry]]
    ) -> None:
        """What went wrong is not told: the next name that is made has the directory listed
        again.
        """
        parent, notes, inquiry, epoch = asked
        with self._lock:
            self._under_way.discard(parent.ino)
            if (
                not done.cancelled()
                and done.exception() is None
                and epoch % 2 == 0
                and epoch == self._tree.epoch
            ):
                self._take(parent, notes, inquiry, done.result())
            self._begin()
