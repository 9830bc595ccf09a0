"""What the backing directory has from earlier saves says how large the files of the next one will
be.

When a directory or a file is made whose name has a number, the newest entry beside it whose name
differs in numbers only is looked at behind the call: `step-100` when `step-200` is made, with what
lies in it. Nobody waits for that, and where the backing directory does not answer nothing is
learnt, and nothing else asked. Used under the file system's lock; the look runs on a thread of the
pool.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from threading import RLock

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower, LowerPath
from acpfs.filesystem.ahead import BYTES_MAX
from acpfs.filesystem.expectations import Expectations, pattern_of
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.types import Ino
from acpfs.writeback.log.lower_tree import LowerTree

ASKED_MAX = 1000
"""So many patterns are remembered as asked about; the oldest are forgotten, and asked about once
more.
"""
FILES_MAX = 512
DIRECTORIES_MAX = 64
DEPTH_MAX = 4
"""Of one earlier save: 512 questions take a second of one thread where each takes 2 ms."""
_NUMBER = re.compile(rb"\d+")

Sizes = list[tuple[LowerPath, int]]


class EarlierSaves:
    """Learns sizes from the backing directory."""

    def __init__(
        self,
        lower: Lower,
        calls: CallPool,
        tree: LowerTree,
        table: NodeTable,
        lock: RLock,
        expectations: Expectations,
        step: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`step`: of the state."""
        self._lower = lower
        self._calls = calls
        self._tree = tree
        self._table = table
        self._lock = lock
        self._expectations = expectations
        self._step = step
        self._asked: dict[tuple[Ino, bytes], None] = {}
        self._under_way = False

    def made(self, parent: Node, name: bytes) -> None:
        """A name was made in a directory. Does not wait."""
        pattern = pattern_of(name)
        path = self._tree.path(parent.ino)
        if (
            pattern == name
            or path is None
            or self._under_way
            or (parent.ino, pattern) in self._asked
            or parent.size > BYTES_MAX
        ):
            return
        self._asked[parent.ino, pattern] = None
        if len(self._asked) > ASKED_MAX:
            del self._asked[next(iter(self._asked))]
        self._under_way = True
        self._calls.submit("earlier saves", self._look, path, name).add_done_callback(
            lambda done: self._looked(parent, done)
        )

    def _looked(self, parent: Node, done: Future[Sizes]) -> None:
        """What went wrong is not told: sizes are a help, and the first save teaches them too."""
        with self._lock, self._step():
            self._under_way = False
            if (
                done.cancelled()
                or done.exception() is not None
                or self._table.get(parent.ino) is not parent
            ):
                return
            above = self._table.path(parent.ino)
            for path, size in done.result():
                self._expectations.learn(b"/".join((above, *path) if above else path), size)

    # -- on a thread of the pool

    def _look(self, directory: LowerPath, name: bytes) -> Sizes:
        """Files of the newest entry like `name`: their paths below the directory, and sizes."""
        pattern = pattern_of(name)
        alike = [
            entry.name
            for entry in self._lower.listdir(directory)
            if entry.name != name and pattern_of(entry.name) == pattern
        ]
        if not alike:
            return []
        newest = max(alike, key=lambda other: [int(number) for number in _NUMBER.findall(other)])
        return [(path[len(directory) :], size) for path, size in self._sizes((*directory, newest))]

    def _sizes(self, top: LowerPath) -> Iterator[tuple[LowerPath, int]]:
        """Of a file, or of all in a directory, as far as that is not too many; the outermost
        first.
        """
        waiting = [top]
        files = 0
        directories = 0
        for path in waiting:
            st = self._lower.lstat(path)
            if stat.S_ISREG(st.mode):
                files += 1
                yield path, st.size
            elif (
                stat.S_ISDIR(st.mode)
                and directories < DIRECTORIES_MAX
                and len(path) - len(top) < DEPTH_MAX
            ):
                directories += 1
                waiting += [(*path, entry.name) for entry in self._lower.listdir(path)][
                    : FILES_MAX + DIRECTORIES_MAX - len(waiting)
                ]
            if files >= FILES_MAX:
                return
