"""Files of a listing that are seen for the first time: most of what a first `ls -lR` or `find`
shows.

`LowerView.learn` takes over an answer about a name, whatever is known of it. Of a new name that
leads to a new file with no other name nothing is known, so there is nothing to compare, to take
back or to tell, and no row to write: the next worker finds the file by itself. Used under the file
system's lock.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence

from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.recognition import Seen
from acpfs.runtime.clock import Clock
from acpfs.writeback.log.lower_tree import LowerTree


class FirstSight:
    """Makes the nodes of such files."""

    def __init__(self, table: NodeTable, tree: LowerTree, clock: Clock) -> None:
        self._now = clock.now
        self._table = table
        self._tree = tree

    def take(
        self, parent: Node, names: Sequence[bytes], answers: Sequence[Seen]
    ) -> list[tuple[bytes, Seen]]:
        """Take over the answers about names of a directory that are about new files; returns the
        others.

        Nothing was forgotten in the directory since it was asked about, and the directory is known
        and on the backing directory.
        """
        table = self._table
        children = parent.dir.children
        now = self._now()
        others: list[tuple[bytes, Seen]] = []
        for name, seen in zip(names, answers, strict=True):
            st = seen.st
            if (
                st is None
                or name in children
                or st.nlink > 1
                or stat.S_ISDIR(st.mode)
                or not table.is_free(st.ino)
                or self._tree.node_at(parent.ino, name) is not None
            ):
                others.append((name, seen))
            else:
                self._tree.add_unrecorded(
                    table.found_file(parent, name, st, now).ino, parent.ino, name
                )
        return others
