"""What two pointers have to do with each other, on one member or on two: by their paths, as keys
that fit into a member's record.

A pointer that is withheld *tells* keys, one that comes later *asks* for some; where they meet, the
later one waits. It does so:

* where both are of one name;
* where the withheld one makes something visible that the later one may name, which lies in a
  directory beside it or deeper;
* where the later one takes a directory's name away, and the withheld one is to change a pointer
  that may name it.

Two pointer files beside each other do not name each other. Why that is enough:
docs/internals/order-between-members.md. Pure but for `Scopes`, which looks into the trees under the
file system's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from acpfs.backing.lower import LowerPath
from acpfs.backing.member_records import ANYTHING
from acpfs.checkpoints import Checkpoint
from acpfs.types import Ino
from acpfs.writeback.log.log import REMOVING
from acpfs.writeback.log.lower_tree import LowerTree, Place
from acpfs.writeback.log.ops import Op, OpKind

EVERYBODYS = "*"
"""Told of a pointer that waits for a member for which all wait; asked for by every pointer that
waits for all members.
"""
KEYS_MAX = 128
"""Of 40 bytes each in a record.

They are as many as names and directories with withheld pointers; with more, `ANYTHING` is told.
"""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where an operation makes or takes a pointer."""

    paths: frozenset[bytes]
    """Below the mount point, all by which others may know it."""
    is_directory: bool = False
    """Whether a directory gets another name."""
    changes: bool = False
    """Whether something else is there until then."""
    waits_for_all: bool = True
    """Whether it waits for all other members: its writer has not said whom it needs."""
    runs: frozenset[bytes] = frozenset({b""})
    """Directories in which what it makes visible lies, or the checkpoint that this is part of."""
    replaces: bool = False
    """Whether what it changes or takes lies there under the very name."""
    made: frozenset[bytes] = frozenset()
    """Of `paths`, those under which a pointer file shows by it."""
    taken: frozenset[bytes] = frozenset()
    """Of `paths`, those under which nothing lies any more, or another directory, where it removes
    something or moves a directory.
    """

    def names_made(self) -> frozenset[str]:
        """Told of a pointer file that is there, asked of others by one that is not: whose name is
        it.
        """
        return frozenset(_key(b"name", path) for path in self.made)

    def tells(self) -> frozenset[str]:
        """While it is withheld."""
        return frozenset(self._tells())

    def _tells(self) -> Iterator[str]:
        for path in self.paths:
            yield _key(b"name", path)
            above = [*_above(path)]
            # a file beside the later pointer is none that it names; a directory may be
            for directory in above if self.is_directory else above[1:]:
                yield _key(b"below", directory)
            if self.changes:
                yield _key(b"change", _top(path, is_directory=self.is_directory))

    def asks_for_its_name(self) -> frozenset[str]:
        """Of members that its writer has not named: what is withheld there would take the name back
        when it comes.
        """
        return frozenset({ANYTHING, *(_key(b"name", path) for path in self.paths)})

    def asks(self) -> frozenset[str]:
        """Before it is committed.

        One whose writer said whom it needs is not withheld for others, so it asks for less. Of a
        withheld change of a pointer that may name the directory which it renames,
        `order.standing_pointers` says whether it does: else the last checkpoint of a job would be
        withheld for the node that died (S282).
        """
        return frozenset(self._asks())

    def _asks(self) -> Iterator[str]:
        yield ANYTHING
        if self.waits_for_all:
            yield EVERYBODYS
        for path in self.paths:
            yield _key(b"name", path)
            yield _key(b"below", next(_above(path)))
            if self.is_directory and self.waits_for_all:  # one at the top may name anything
                yield _key(b"change", _top(path, is_directory=True))
                yield _key(b"change", b"")


def _key(kind: bytes, path: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(kind + b"\0" + path)


def _above(path: bytes) -> Iterator[bytes]:
    """The directories that it lies in, from the nearest to the top, which is b""."""
    while path:
        path = path.rpartition(b"/")[0]
        yield path


def _top(path: bytes, *, is_directory: bool) -> bytes:
    """The directory at the top that it is or lies in; b"": a file at the top itself."""
    top, slash, _rest = path.partition(b"/")
    return top if slash or is_directory else b""


def of_record(told: Iterable[tuple[frozenset[str], float]]) -> dict[str, float]:
    """Key → the earliest of the times at which what tells it was closed."""
    held: dict[str, float] = {}
    for keys, closed_at in told:
        for key in keys:
            held[key] = min(closed_at, held.get(key, closed_at))
    return held if len(held) <= KEYS_MAX else {ANYTHING: min(held.values())}


class CheckpointOf(Protocol):
    """See `Checkpoints.of`."""

    def __call__(self, path: bytes, *, directory: bool = False) -> Checkpoint | None: ...


class Scopes:
    """Knows the scopes of operations."""

    def __init__(
        self,
        tree: LowerTree,
        path_of: Callable[[Ino], bytes],
        is_directory: Callable[[Ino], bool],
        takes: Callable[[Op], bool],
        needs_of: Callable[[Op], tuple[str, ...] | None],
        checkpoint_of: CheckpointOf,
    ) -> None:
        """`path_of`: where the mount has a directory.

        `takes`: whether an operation removes a pointer.

        `needs_of`: whom it waits for, where its writer said so; None: all. Nobody else asks whether
        that is so. `checkpoint_of`: which one a path is or lies in.
        """
        self._checkpoint_of = checkpoint_of
        self._needs_of = needs_of
        self._tree = tree
        self._path_of = path_of
        self._is_directory = is_directory
        self._takes = takes

    def of(self, op: Op) -> Scope:
        """By the paths of the backing directory and of the mount: a directory above may be about to
        get another name.
        """
        paths = set(self._paths_of(op.touches()))
        moves = bool(op.new_parent) and any(map(self._is_directory, (op.ino, op.victim)))
        is_there = bool(self._tree.places(op.ino))
        replaces = bool(op.victim) or self._takes(op) or (op.kind is OpKind.STORE and is_there)
        made = op.touches() if op.kind is OpKind.EXCHANGE else op.touches()[-1:]
        runs = {run for place in made if place[0] > 0 for run in self._runs(*place, moves=moves)}
        taken_at: tuple[Place, ...] = ()
        if moves or op.kind in REMOVING:
            taken_at = op.touches() if op.kind is OpKind.EXCHANGE else op.touches()[:1]
        made_at = [] if moves else [*made, *(self._tree.places(op.ino) if op.version else ())]
        waits_for_all = self._needs_of(op) is None
        return Scope(
            paths=frozenset(paths),
            is_directory=moves,
            changes=replaces or is_there,
            waits_for_all=waits_for_all,
            runs=frozenset(runs),
            replaces=replaces,
            made=frozenset(self._paths_of(made_at)),
            taken=frozenset(self._paths_of(taken_at)),
        )

    def standing(self, op: Op) -> Iterator[LowerPath]:
        """Where pointer files lie now that an operation is to change, which makes or takes one."""
        places = {*(op.touches() if self._takes(op) else op.touches()[-1:])}
        if op.kind is OpKind.STORE:  # a file that is rewritten lies there, whatever it was called
            places.update(self._tree.places(op.ino))
        for place in places:
            node = self._tree.node_at(*place)
            path = None
            if node is not None and not self._is_directory(node):
                path = self._tree.path_at(*place)
            if path is not None:
                yield path

    def _paths_of(self, places: Iterable[Place]) -> Iterator[bytes]:
        for parent, name in places:
            if parent > 0:
                yield from (_joined(directory, name) for directory in self._directories(parent))

    def _runs(self, parent: Ino, name: bytes, *, moves: bool) -> Iterator[bytes]:
        for directory in self._directories(parent):
            path = _joined(directory, name)
            checkpoint = self._checkpoint_of(path, directory=moves)
            yield directory if checkpoint is None else checkpoint.save_dir

    def _directories(self, ino: Ino) -> set[bytes]:
        committed = self._tree.path(ino)
        found = {self._path_of(ino)}
        if committed is not None:
            found.add(b"/".join(committed))
        return found


def _joined(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
