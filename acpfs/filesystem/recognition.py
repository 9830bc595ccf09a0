"""Which node an entry of the backing directory is.

An inode number is no identity: a file system gives the number of a deleted file to the next new
one. Who then wrote to that would overwrite the other, with a valid checksum. So an entry is the
node that is known under its name, or the node of which it is a hard link: a second look, at another
name of that node, shows the very same inode now. Else it is a new node. `look` runs in threads of
the pool and takes the lock for a moment; all else runs under the lock.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence
from threading import RLock
from typing import NamedTuple

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.types import NO_INO, Ino
from acpfs.writeback.evidence.whereabouts import Whereabouts
from acpfs.writeback.log.lower_tree import LowerTree

NAMES_LOOKED_AT_MAX = 16
"""Of a node, to see whether an entry is one more of its names: the first that is still its own
tells, and it may have thousands.
"""

LOOKS_AT_CHANGING_MAX = 8
"""At two names that show one inode number, while the file changes between the looks; each time
something has to have changed it anew.
"""


class Seen(NamedTuple):
    """What the backing directory says about a name."""

    st: LowerStat | None
    """None: there is nothing."""
    twin: Ino = NO_INO
    """The node of which the entry is a further hard link; 0: of none that is known."""


NOTHING = Seen(None)


class Recognition:
    """Looks at entries, and says whose they are."""

    def __init__(self, lower: Whereabouts, tree: LowerTree, table: NodeTable, lock: RLock) -> None:
        self._lower = lower
        self._tree = tree
        self._table = table
        self._lock = lock

    def look(self, path: LowerPath) -> Seen:
        """What lies at a path; costs a second question where it has several names, and this one is
        new here.
        """
        return self._seen(path, self._lstat(path))

    def look_at_all(self, directory: LowerPath, names: Sequence[bytes]) -> list[Seen]:
        """`look` for names of one directory."""
        found = self._lower.lstat_many(directory, names)
        return [
            Seen(st) if st is None or st.nlink < 2 else self._seen((*directory, name), st)
            for name, st in zip(names, found, strict=True)
        ]

    def _seen(self, path: LowerPath, st: LowerStat | None) -> Seen:
        if st is None or stat.S_ISDIR(st.mode) or st.nlink < 2:
            return Seen(st)
        for twin, other in self._elsewhere(st.ino, path):
            for _look in range(LOOKS_AT_CHANGING_MAX):
                there = self._lstat(other)
                if there is None or there.ino != st.ino:
                    break
                if there.identity() == st.identity():
                    return Seen(st, twin)
                # Of two names of one file, one look came before a change of it and one after: the
                # drain gives it a further name, say, which changes its ctime.
                here = self._lstat(path)
                if here is None or here.ino != st.ino:
                    return self._seen(path, here)  # replaced meanwhile
                st = here
        return Seen(st)

    def _lstat(self, path: LowerPath) -> LowerStat | None:
        try:
            return self._lower.lstat(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise

    def _elsewhere(self, lower_ino: int, path: LowerPath) -> list[tuple[Ino, LowerPath]]:
        """The nodes that had an inode number when they were last looked at, and where they lie; but
        for the one that lies at `path`.
        """
        with self._lock:
            here = self._tree.at(path)
            return [
                (node.ino, found)
                for node in self._table.by_lower(lower_ino)
                if node.ino != here
                for place in self._tree.first_places(node.ino, NAMES_LOOKED_AT_MAX)
                if (found := self._tree.path_at(*place)) is not None
            ]

    def node(
        self, known: Node | None, st: LowerStat, twin: Ino, asked: int, *, in_use: bool
    ) -> Node:
        """The node of an entry that was looked at.

        `known`: under its name; `in_use`: somebody relies on that one.

        `asked`: serial of the question.
        """
        same_kind = known is not None and stat.S_IFMT(known.mode) == stat.S_IFMT(st.mode)
        same = (
            known
            if known is not None and same_kind and (known.lower_ino in (0, st.ino) or known.is_dir)
            else None
        )
        if same is not None and in_use:
            return same
        other = self._table.get(twin) or self._seen_meanwhile(st, asked)
        if other is not None and other.lower_ino == st.ino:
            return other
        return same or self._table.found(st)

    def is_in_doubt(self, seen: Seen, asked: int) -> bool:
        """Whether an answer may be of another name of a node that was looked at since the question
        (its serial: `asked`), with a change of the file between the two looks: to be asked anew.
        """
        st = seen.st
        if st is None or seen.twin or stat.S_ISDIR(st.mode) or st.nlink < 2:
            return False
        since = [node for node in self._table.by_lower(st.ino) if node.checked >= asked]
        return bool(since) and all(node.identity != st.identity() for node in since)

    def _seen_meanwhile(self, st: LowerStat, asked: int) -> Node | None:
        """The node of which another name was looked at since, as those of one listing are; `asked`:
        serial of the question.
        """
        if stat.S_ISDIR(st.mode) or st.nlink < 2:
            return None
        nodes = (node for node in self._table.by_lower(st.ino) if node.checked >= asked)
        return next((node for node in nodes if node.identity == st.identity()), None)
