"""What parked operations, and those that are put off, have to do with: what comes after them and
would notice has to wait.

There may be very many (a deleted tree that is withheld because a node is missing), and they stay
for long, so what is known of them is kept over the forming of groups: it grows as more are parked,
and is made anew when one leaves, or directories move. An operation waits only for those before it.
Used under the file system's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from acpfs.types import NO_INO, ROOT, Ino, Seq
from acpfs.writeback.log.lower_tree import LowerTree, Place
from acpfs.writeback.log.ops import ATTRIBUTES, Op, OpKind
from acpfs.writeback.members.scopes import Scope
from acpfs.writeback.order.standing_pointers import Awaited
from acpfs.writeback.parts import DrainParts

_OF_ALL_BELOW = frozenset({OpKind.RENAME, OpKind.EXCHANGE, OpKind.RMDIR})
_NEVER = Seq(1 << 62)
TOLD_OPS_MAX = 1024
"""Their keys take 10 us each under the lock."""


class Touched:
    """Operations that wait: by what they touch, the number of the first of them."""

    def __init__(self, tree: LowerTree, *ops: Op) -> None:
        self._tree = tree
        self._nodes: dict[Ino, Seq] = {}
        self._places: dict[Place, Seq] = {}
        self._below: dict[Ino, Seq] = {}
        self._above: dict[Ino, Seq] = {}
        for op in ops:
            self.add(op)

    def add(self, op: Op) -> None:
        """Nothing may overtake it that would notice."""
        nodes = {op.ino, op.victim} - {NO_INO}
        for node in nodes:
            self._nodes[node] = min(op.seq, self._nodes.get(node, _NEVER))
        for place in op.touches():
            self._places[place] = min(op.seq, self._places.get(place, _NEVER))
        if op.kind in ATTRIBUTES:
            return
        for node in nodes:
            self._below[node] = min(op.seq, self._below.get(node, _NEVER))
        for directory, _name in op.touches():
            for above in self._upwards(directory):
                self._above[above] = min(op.seq, self._above.get(above, _NEVER))

    def meets(self, op: Op) -> bool:
        """Same node or name, something below a node that is not as it should be yet, or a move or
        removal of a directory above.
        """
        nodes = {op.ino, op.victim} - {NO_INO}
        if any(self._nodes.get(node, _NEVER) < op.seq for node in nodes):
            return True
        if any(self._places.get(place, _NEVER) < op.seq for place in op.touches()):
            return True
        if op.kind in _OF_ALL_BELOW and any(
            self._above.get(node, _NEVER) < op.seq for node in nodes
        ):
            return True
        return any(
            self._below.get(ino, _NEVER) < op.seq
            for directory, _name in op.touches()
            for ino in self._upwards(directory)
        )

    def _upwards(self, directory: Ino) -> Iterator[Ino]:
        while directory != ROOT:
            yield directory
            places = self._tree.places(directory)
            if not places:
                return
            directory = places[0][0]


class Told:
    """Keys (`members.scopes`) of operations that wait, and the number of the first that tells each;
    made when a pointer asks.
    """

    def __init__(self, scope_of: Callable[[Op], Scope]) -> None:
        self._scope_of = scope_of
        self._new: list[Op] = []
        self._count = 0
        self._first: dict[str, Seq] = {}

    def add(self, op: Op) -> None:
        self._new.append(op)
        self._count += 1

    def concerns(self, op: Op) -> bool:
        """Whether a later pointer has to do with one of them.

        Where they are very many it waits for all.
        """
        if not self._count or self._count > TOLD_OPS_MAX:
            return self._count > 0
        while self._new:
            earlier = self._new.pop()
            for key in self._scope_of(earlier).tells():
                self._first[key] = min(earlier.seq, self._first.get(key, _NEVER))
        return any(self._first.get(key, _NEVER) < op.seq for key in self._scope_of(op).asks())


class WithheldRuns:
    """Runs (`Scope.runs`) of which something is withheld: numbers of the oldest and the newest;
    found out when a deletion asks.
    """

    def __init__(self, scope_of: Callable[[Op], Scope]) -> None:
        self._scope_of = scope_of
        self._new: list[Op] = []
        self._count = 0
        self._known: dict[bytes, tuple[Seq, Seq]] = {}
        self._directories: dict[Ino, set[bytes]] = {}
        """Where what is deleted lies: there may be very many deletions in one directory, and their
        scopes take 10 us each.
        """

    def add(self, op: Op) -> None:
        self._new.append(op)
        self._count += 1

    def hold_up(self, deletion: Op, newest_in: Callable[[bytes], int]) -> bool:
        """Whether it lies at or below one of which no later pointer was persisted.

        Where they are very many it waits for all.
        """
        if self._count > TOLD_OPS_MAX:
            return True
        while self._new:
            op = self._new.pop()
            for run in self._scope_of(op).runs:
                oldest, newest = self._known.get(run, (op.seq, op.seq))
                self._known[run] = (min(oldest, op.seq), max(newest, op.seq))
        waiting = [
            run
            for run, (oldest, newest) in self._known.items()
            if oldest < deletion.seq and newest > newest_in(run)
        ]
        return bool(waiting) and any(
            not run or directory == run or directory.startswith(run + b"/")
            for directory in self._directories_of(deletion)
            for run in waiting
        )

    def _directories_of(self, deletion: Op) -> set[bytes]:
        if deletion.new_parent or deletion.parent not in self._directories:
            paths = self._scope_of(deletion).paths
            self._directories[deletion.parent] = {path.rpartition(b"/")[0] for path in paths}
        return self._directories[deletion.parent]


def regions(tree: LowerTree, is_directory: Callable[[Ino], bool], op: Op) -> set[bytes]:
    """The directories at the top that an operation lies in; b"" for the top itself, or where that
    is not known: it may lie anywhere.
    """

    def region(directory: Ino, name: bytes) -> bytes:
        if directory == ROOT:
            return name if is_directory(op.ino) else b""
        while places := tree.places(directory):
            directory, name = places[0]
            if directory == ROOT:
                return name
        return b""

    return {region(directory, name) for directory, name in op.touches()}


class Parked:
    """All that are parked, or all that are put off."""

    def __init__(
        self,
        parts: DrainParts,
        elide: Callable[[Op], bool],
        after: Callable[[int], Iterable[Op]],
        is_missed: Callable[[Op], bool],
        scope_of: Callable[[Op], Scope],
        is_waited_for: Callable[[Op], bool],
        awaited: Callable[[], Awaited],
    ) -> None:
        """`elide`: leaves out what need not be done.

        `after`: those that were parked after the first so many.

        `is_missed`: whether the backing directory is broken, for those who rely on it, without the
        operation. `is_waited_for`: whether later pointers wait for it while it is withheld.
        `awaited`: knows no change of a pointer yet.
        """
        self._no_changes = awaited
        self._scope_of = scope_of
        self._is_waited_for = is_waited_for
        self._log = parts.log
        self._tree = parts.tree
        self._elide = elide
        self._after = after
        self._is_missed = is_missed
        self._is_directory = parts.listener.is_directory
        self._known = (-1, -1)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._count = 0
        self._stores: list[Op] = []
        self._aside = Touched(self._tree)
        self.refused = False
        """Whether the backing directory has refused one of them that is missed."""
        self._regions: set[bytes] = set()
        """Where those lie."""
        self.newest_withheld = 0
        """Number of the newest that waits for a missing node."""
        self._told = Told(self._scope_of)
        """By those that are withheld, and not because of what is lost."""
        self._runs = WithheldRuns(self._scope_of)
        self.changes = self._no_changes()
        """Of pointers, withheld for whatever reason."""

    def __bool__(self) -> bool:
        return self._count > 0

    def renew(self) -> None:
        """Take notice of what was parked, or has left, since the last time."""
        if not self._is_known():
            self._begin_anew()
        for op in (*self._stores, *self._after(self._count)):
            if self._log.get(op.seq) is op:
                self._elide(
                    op
                )  # superseded while it was on its way here, or by what may stand for it only now
        if not self._is_known():
            self._begin_anew()
        self._known = (self._log.unparked, self._tree.epoch)
        for op in self._after(self._count):
            self._count += 1
            self._aside.add(op)
            if op.kind is OpKind.STORE:
                self._stores.append(op)
            if op.withheld:
                self.newest_withheld = max(self.newest_withheld, op.seq)
                self.changes.add(op)
                if self._is_missed(op):
                    self._runs.add(op)
                if self._is_missed(op) and self._is_waited_for(op):
                    self._told.add(op)
            elif op.parked and self._is_missed(op):
                self.refused = True
                self._regions |= regions(self._tree, self._is_directory, op)

    def _is_known(self) -> bool:
        return self._known == (self._log.unparked, self._tree.epoch)

    def meets(self, op: Op) -> bool:
        """Whether the operation has to wait for one of them."""
        return self._aside.meets(op)

    def is_near(self, op: Op) -> bool:
        """Whether something that is missed lies below the same directory at the top, or either at
        the top itself.
        """
        if not self.refused:
            return False
        found = regions(self._tree, self._is_directory, op)
        return b"" in self._regions or b"" in found or not self._regions.isdisjoint(found)

    def may_be_named_by(self, op: Op) -> bool:
        """Whether a pointer or a directory's new name may name what is withheld, or what a withheld
        pointer still names.
        """
        return self._told.concerns(op)

    def is_last_of_its_run(self, op: Op, newest_in: Callable[[bytes], int]) -> bool:
        """Whether what a deletion removes lies in a run of which something is withheld that was to
        replace it, and nothing else has.

        `newest_in`: number of the newest pointer of a run that was persisted since.
        """
        return self._runs.hold_up(op, newest_in)

    def met_by(self, op: Op) -> list[Op]:
        """Those that it has to wait for."""
        return [one for one in self._after(0) if Touched(self._tree, one).meets(op)]
