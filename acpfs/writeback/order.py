"""Which operations may be committed next, and together.

Normally: the longest run of ready operations at the front of the log. A pointer file begins a new group, so that everything before
it is flushed first. While operations are parked, those that have nothing to do with them go on; what touches the same node or name or lies
above or below, every deletion, replacement and pointer file waits (`Op.held`): an old consistent checkpoint beats a new broken one.
Used under the file system's lock.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator

from acpfs.types import ROOT, Ino, Seq
from acpfs.writeback.log import OperationLog
from acpfs.writeback.lower_tree import LowerTree, Place
from acpfs.writeback.ops import Op, OpKind, VersionState

GROUP_OPS_MAX = 256
"""Operations per commit group: with 0.1-1 ms each, and a flush of some milliseconds at the end, larger groups gain nothing."""
SCAN_OPS_MAX = 1024
"""How far behind parked operations others are looked for; bounds the time under the lock to a few milliseconds."""

_ATTRIBUTES = frozenset({OpKind.SETATTR, OpKind.SETXATTR})
_DELETING = frozenset({OpKind.UNLINK, OpKind.RMDIR, OpKind.EXCHANGE})


class Order:
    """Forms commit groups."""

    def __init__(
        self,
        log: OperationLog,
        tree: LowerTree,
        pointer_patterns: Iterable[str],
        due: dict[Seq, float],
        elide: Callable[[Op], bool],
    ) -> None:
        """`due`: when operations that failed are to be tried again, on trio's clock. `elide`: leaves out what need not be done."""
        self._log, self._tree, self._due, self._elide = log, tree, due, elide
        self._pointers = re.compile("|".join(fnmatch.translate(pattern) for pattern in pointer_patterns) or r"(?!)")

    def is_pointer(self, op: Op) -> bool:
        """Whether the operation makes a file visible that points at others. Found out once: names of operations do not change."""
        if op.is_pointer is None:
            op.is_pointer = self._makes_pointer(op)
        return op.is_pointer

    def _makes_pointer(self, op: Op) -> bool:
        names: tuple[bytes, ...] = ()
        if op.kind in (OpKind.STORE, OpKind.SYMLINK, OpKind.LINK):
            names = (op.name,)
        elif op.kind is OpKind.RENAME:
            names = (op.new_name,)
        elif op.kind is OpKind.EXCHANGE:
            names = (op.name, op.new_name)
        return any(self._pointers.match(os.fsdecode(name)) for name in names)

    def group(self, now: float) -> tuple[list[Op], float]:
        """The next group, and, if it is empty, when to look again (infinity: when something happens)."""
        group: list[Op] = []
        for op in self._candidates():
            if self._log.get(op.seq) is not op or self._elide(op):
                continue
            if not self.is_ready(op, now) or (group and self.is_pointer(op)):
                return group, self._due.get(op.seq, math.inf)
            group.append(op)
            if len(group) >= GROUP_OPS_MAX:
                break
        return group, math.inf

    def is_ready(self, op: Op, now: float) -> bool:
        """Whether it could be committed, were it its turn."""
        if op.tentative or op.unsealed or self._due.get(op.seq, 0.0) > now:
            return False
        return op.version is None or op.committed or op.version.state is VersionState.STAGED

    def _candidates(self) -> Iterator[Op]:
        if not self._log.parked():
            for op in self._log.front(GROUP_OPS_MAX):
                op.held = False
                yield op
            return
        aside = _Aside(self._tree)
        for op in self._log.front(SCAN_OPS_MAX):
            op.held = not op.parked and (self._waits_for_all(op) or aside.meets(op))
            if op.parked or op.held:
                aside.add(op)
            else:
                yield op

    def _waits_for_all(self, op: Op) -> bool:
        """Whether the operation may destroy, or point at what is not there."""
        return op.kind in _DELETING or bool(op.victim) or self.is_pointer(op)


class _Aside:
    """What parked and held operations have to do with."""

    def __init__(self, tree: LowerTree) -> None:
        self._tree = tree
        self._nodes: set[Ino] = set()
        self._places: set[Place] = set()
        self._below: set[Ino] = set()
        self._above: set[Ino] = set()

    def add(self, op: Op) -> None:
        """Nothing may overtake it that would notice."""
        nodes = {op.ino, op.victim} - {Ino(0)}
        self._nodes |= nodes
        self._places.update(op.touches())
        if op.kind not in _ATTRIBUTES:
            self._below |= nodes
            for directory, _name in op.touches():
                self._above.update(self._upwards(directory))

    def meets(self, op: Op) -> bool:
        """Same node or name, something below a node that is not as it should be yet, or a move of a directory above."""
        nodes = {op.ino, op.victim} - {Ino(0)}
        if nodes & self._nodes or not self._places.isdisjoint(op.touches()):
            return True
        if op.kind in (OpKind.RENAME, OpKind.EXCHANGE) and nodes & self._above:
            return True
        return any(ino in self._below for directory, _name in op.touches() for ino in self._upwards(directory))

    def _upwards(self, directory: Ino) -> Iterator[Ino]:
        while directory != ROOT:
            yield directory
            places = self._tree.places(directory)
            if not places:
                return
            directory = places[0][0]
