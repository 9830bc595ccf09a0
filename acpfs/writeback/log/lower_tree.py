"""The committed tree: where each known node lies in the backing directory after the commits so far.

Changed by the engine as it commits, and by the file system as it discovers entries of the backing
directory. Used under the file system's lock. A path computed here is only good as long as no commit
moves things: whoever calls the backing directory with one compares `epoch` before and after (odd: a
move is under way).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

from acpfs.backing.lower import LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.ops import Op

Place = tuple[Ino, bytes]
"""Directory and name."""

DDL = """
CREATE TABLE IF NOT EXISTS place (
  parent INTEGER NOT NULL, name BLOB NOT NULL, ino INTEGER NOT NULL,
  PRIMARY KEY (parent, name)) WITHOUT ROWID;
"""


class LowerTree:
    """Both directions of (directory, name) ↔ node, persisted in the state database."""

    def __init__(self, state: StateDatabase) -> None:
        """Load what the last worker left."""
        self._state = state
        self._nodes: dict[Place, Ino] = {}
        self._places: dict[Ino, Place] = {}
        """The first one."""
        self._further: dict[Ino, dict[Place, None]] = {}
        """All others of the few that have any, the oldest first.

        A file may have as many as its file system takes links (ext4: 65,000), and loses one at a
        time.
        """
        self._unrecorded: set[Ino] = set()
        """Whose places are known from the backing directory alone, and have no rows."""
        self.epoch = 0
        self._at_rest: Future[None] = Future()
        self._at_rest.set_result(None)
        state.create(DDL)
        for parent, name, ino in state.rows("SELECT parent, name, ino FROM place"):
            self._insert((Ino(parent), name), Ino(ino))

    def _insert(self, place: Place, ino: Ino) -> None:
        self._nodes[place] = ino
        if self._places.setdefault(ino, place) != place:
            self._further.setdefault(ino, {})[place] = None

    def _take_out(self, place: Place, ino: Ino) -> None:
        further = self._further.get(ino)
        if self._places[ino] != place:
            assert further is not None, place
            del further[place]
        elif further:
            first = next(iter(further))
            self._places[ino] = first
            del further[first]
        else:
            del self._places[ino]
        if further is not None and not further:
            del self._further[ino]

    def _each(self, ino: Ino) -> Iterable[Place]:
        """All places of a node, without a copy: there may be many, and most ask for the first."""
        first = self._places.get(ino)
        if first is None:
            return ()
        further = self._further.get(ino)
        return (first,) if further is None else itertools.chain((first,), further)

    def __contains__(self, ino: Ino) -> bool:
        """Whether the node is on the backing directory."""
        return ino == ROOT or ino in self._places

    def node_at(self, parent: Ino, name: bytes) -> Ino | None:
        """The node known to lie there, if any."""
        return self._nodes.get((parent, name))

    def has_what_it_removes(self, op: Op) -> bool:
        """Whether what the operation is to remove is known to lie under its name."""
        return self._nodes.get((op.parent, op.name)) in (op.ino, op.old_content)

    def places(self, ino: Ino) -> list[Place]:
        """All places of a node; [] when it is not on the backing directory."""
        return list(self._each(ino))

    def first_places(self, ino: Ino, count: int) -> list[Place]:
        """At most so many."""
        return list(itertools.islice(self._each(ino), count))

    def at(self, path: LowerPath) -> Ino | None:
        """The node known to lie at a path, if any."""
        ino: Ino | None = ROOT
        for name in path:
            ino = None if ino is None else self._nodes.get((ino, name))
        return ino

    def places_count(self, ino: Ino) -> int:
        """How many."""
        return (ino in self._places) + len(self._further.get(ino, ()))

    def path(self, ino: Ino) -> LowerPath | None:
        """Path of a node by its first place that is still there; None when it is not on the backing
        directory.

        A file can have a place in a directory that somebody else has moved away, and another where
        it was seen since.
        """
        if ino == ROOT:
            return ()
        for parent, name in self._each(ino):
            base = self._directory_path(parent)
            if base is not None:
                return (*base, name)
        return None

    def place(self, ino: Ino) -> Place | None:
        """The place that `path` goes by."""
        return next(
            (place for place in self._each(ino) if self._directory_path(place[0]) is not None),
            None,
        )

    def _directory_path(self, ino: Ino) -> LowerPath | None:
        names: list[bytes] = []
        while ino != ROOT:
            place = self._places.get(ino)
            if place is None:
                return None
            ino, name = place
            names.append(name)
        return tuple(reversed(names))

    def path_at(self, parent: Ino, name: bytes) -> LowerPath | None:
        """Path of a name in a directory; None when the directory is not on the backing
        directory.
        """
        base = self.path(parent)
        return None if base is None else (*base, name)

    def add(self, ino: Ino, parent: Ino, name: bytes) -> None:
        """The node lies there now; what was known to lie there before does not any more."""
        place = (parent, name)
        if self._nodes.get(place) == ino:
            return
        self.remove(parent, name)
        self._insert(place, ino)
        if ino not in self._unrecorded:
            self._save(place, ino)

    def add_unrecorded(self, ino: Ino, parent: Ino, name: bytes) -> None:
        """`leave_out` and `add` for a node and a place of which nothing is known."""
        self._unrecorded.add(ino)
        place = (parent, name)
        self._nodes[place] = ino
        self._places[ino] = place

    def _save(self, place: Place, ino: Ino) -> None:
        self._state.change("INSERT OR REPLACE INTO place VALUES (?, ?, ?)", (*place, ino))

    def _unsave(self, place: Place) -> None:
        self._state.change("DELETE FROM place WHERE parent = ? AND name = ?", place)

    def leave_out(self, ino: Ino) -> None:
        """A next worker does not need the node: it finds it on the backing directory."""
        if ino not in self._unrecorded:
            self._unrecorded.add(ino)
            for place in self.places(ino):
                self._unsave(place)

    def record(self, ino: Ino) -> None:
        """A next worker needs the node."""
        if ino in self._unrecorded:
            self._unrecorded.discard(ino)
            for place in self.places(ino):
                self._save(place, ino)

    def remove(self, parent: Ino, name: bytes) -> Ino | None:
        """Nothing lies there now; returns the node that was known to."""
        place = (parent, name)
        ino = self._nodes.pop(place, None)
        if ino is None:
            return None
        self._take_out(place, ino)
        if ino not in self._unrecorded:
            self._unsave(place)
        return ino

    def move(self, source: Place, target: Place) -> None:
        """What lay at `source` lies at `target` now."""
        ino = self.remove(*source)
        if ino is not None:
            self.add(ino, *target)

    def exchange(self, a: Place, b: Place) -> None:
        """Swap what lies at two places."""
        ino_a = self.remove(*a)
        ino_b = self.remove(*b)
        if ino_b is not None:
            self.add(ino_b, *a)
        if ino_a is not None:
            self.add(ino_a, *b)

    def forget(self, ino: Ino) -> None:
        """Drop all knowledge of a node that nobody needs any more."""
        for parent, name in self.places(ino):
            self.remove(parent, name)
        self._unrecorded.discard(ino)

    def begin_move(self) -> None:
        """Paths are about to change on the backing directory."""
        self.epoch += 1
        self._at_rest = Future()
        # who loses patience with it must not cancel it for the others
        self._at_rest.set_running_or_notify_cancel()

    def end_move(self) -> None:
        """Paths have changed (or the change failed)."""
        self.epoch += 1
        self._at_rest.set_result(None)

    def at_rest(self) -> Future[None]:
        """Done when no move is under way; at once when none is."""
        return self._at_rest

    def __iter__(self) -> Iterator[tuple[Place, Ino]]:
        return iter(self._nodes.items())
