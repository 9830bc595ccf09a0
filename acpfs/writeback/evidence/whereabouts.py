"""Where things lie while an operation is in doubt: handed to the backing directory, and neither
recorded nor known to be refused.

A call can be carried out and still fail, when a server dies with the answer, and it can be carried
out long after it failed. Until it was tried again the committed tree may be behind the backing
directory: a directory that was renamed is not where the tree has it, a file that was unlinked has
its other names only. Who believed the "not found" that follows would take for removed what only
lies elsewhere. So a path that such an operation touches, or that leads through one, is looked for
at both ends first. What is in doubt follows from the log, so a next worker knows it too. Called in
threads, never under the lock, which it takes for a moment.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock
from typing import TypeVar

from acpfs.backing.lower import Lower, LowerEntry, LowerPath, LowerStat, lstat_each
from acpfs.types import Ino
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.log.ops import Op, OpKind

MOVING = frozenset({OpKind.RENAME, OpKind.EXCHANGE})
TAKING = frozenset({OpKind.RENAME, OpKind.EXCHANGE, OpKind.UNLINK})
"""What takes the name of its own node from it."""

T = TypeVar("T")
Move = tuple[Op, LowerPath, LowerPath, int | None]
"""The operation, its two paths, and the inode number of what it moves, if that is known."""


class Whereabouts:
    """Questions about paths of the committed tree, asked where things are."""

    def __init__(
        self,
        lower: Lower,
        tree: LowerTree,
        log: OperationLog,
        lock: RLock,
        left_as: Callable[[Ino], tuple[int, int, int, int] | None],
    ) -> None:
        """`left_as`: `Listener.left_as`."""
        self._lower = lower
        self._tree = tree
        self._log = log
        self._lock = lock
        self._left_as = left_as

    # -- questions, as `Lower` has them

    def lstat(self, path: LowerPath) -> LowerStat:
        return self._ask(self._lower.lstat, path)

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        if not self._is_in_doubt():
            found = self._lower.lstat_many(directory, names)
            if None not in found or not self._is_in_doubt():
                return found
        return lstat_each(self.lstat, directory, names)

    def _is_in_doubt(self) -> bool:
        with self._lock:
            return bool(self._log.in_doubt())

    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        return self._ask(self._lower.listdir, path)

    def open_read(self, path: LowerPath) -> int:
        return self._ask(self._lower.open_read, path)

    def readlink(self, path: LowerPath) -> bytes:
        return self._ask(self._lower.readlink, path)

    def xattrs(self, path: LowerPath) -> dict[bytes, bytes]:
        return self._ask(self._lower.xattrs, path)

    def _ask(self, question: Callable[[LowerPath], T], path: LowerPath) -> T:
        while True:
            found = self.find(path)
            try:
                return question(found)
            except OSError:  # what was in doubt may have been carried out just now
                if self.find(path) == found:
                    raise

    # -- where

    def find(self, path: LowerPath) -> LowerPath:
        """Where what the committed tree has at `path` lies.

        Raises:
            OSError: ENOENT, it was replaced; or what keeps the backing directory from answering.
        """
        with self._lock:
            doubtful = self._log.in_doubt()
            if not doubtful:
                return path
            path = self._by_another_name(path, doubtful)
            moves = [move for op in doubtful if (move := self._move(op)) is not None]
            contents = self._contents_for(path, doubtful)
        for move in moves:
            path = self._through(move, path)
        for content in contents:
            if self._is_there(content, path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # it was replaced
        return path

    def _contents_for(self, path: LowerPath, doubtful: list[Op]) -> list[Op]:
        """What is put there straight, in place of what lay there (`Pairs`)."""
        return [
            content
            for op in doubtful
            if (content := self._log.content_begun_with(op)) is not None
            and self._tree.path_at(op.new_parent, op.new_name) == path
        ]

    def _is_there(self, content: Op, path: LowerPath) -> bool:
        if content.version is not None:
            return self._number_at(path) == content.version.staging_ino
        with suppress(OSError):
            return self._lower.readlink(path) == content.payload
        return False

    def moved(self, op: Op) -> list[Op]:
        """Others in doubt that were carried out, and have moved what the operation is about."""
        with self._lock:
            moves = [
                move
                for other in self._log.in_doubt()
                if other is not op and (move := self._move(other)) is not None
            ]
            if not moves:
                return []
            places = {*self._tree.places(op.ino), *op.touches()}
            paths = [path for place in places if (path := self._tree.path_at(*place)) is not None]
        return [move[0] for move in moves if any(self._has_moved(move, path) for path in paths)]

    def _has_moved(self, move: Move, path: LowerPath) -> bool:
        op, source, target, _number = move
        ends = (source, target) if op.kind is OpKind.EXCHANGE else (source,)
        if not any(path[: len(end)] == end for end in ends):
            # what an exchange brought to one end says that it was made, though the other may have
            # been lost since
            return False
        return any(
            self._through(move, end) == other
            for end, other in ((source, target), (target, source))[: len(ends)]
        )

    def _by_another_name(self, path: LowerPath, doubtful: list[Op]) -> LowerPath:
        """A file has another name that nothing is to be done with: it lies there for certain."""
        touched = {place: op for op in doubtful for place in op.touches()}
        for place, op in touched.items():
            node = self._tree.node_at(*place)
            if (
                node is None
                or (node == op.ino and op.kind not in TAKING)
                or self._tree.path_at(*place) != path
            ):
                continue
            for other in self._tree.places(node):
                found = self._tree.path_at(*other)
                if other not in touched and found is not None:
                    return found
        return path

    def _move(self, op: Op) -> Move | None:
        if op.kind not in MOVING or op.is_with_content:
            return None
        place = (
            (op.parent, op.name)
            if self._tree.node_at(op.parent, op.name) == op.ino
            else self._tree.place(op.ino)
        )
        source = None if place is None else self._tree.path_at(*place)
        target = self._tree.path_at(op.new_parent, op.new_name)
        if source is None or target is None:
            return None
        if op.kind is OpKind.EXCHANGE:
            return op, source, target, int(op.payload.split()[0]) if op.payload else None
        left = self._left_as(op.ino)
        return op, source, target, left[0] if left is not None else None

    def _through(self, move: Move, path: LowerPath) -> LowerPath:
        """The path as it is by now, if the move touches it."""
        op, source, target, number = move
        if path[: len(source)] == source:
            return self._end(op, number, source, target) + path[len(source) :]
        if path[: len(target)] == target:
            if op.kind is OpKind.EXCHANGE:
                number = int(op.payload.split()[1]) if op.payload else None
                return self._end(op, number, target, source) + path[len(target) :]
            if self._end(op, number, source, target) == target:
                raise FileNotFoundError(
                    errno.ENOENT, os.strerror(errno.ENOENT)
                )  # what lay there was replaced
        return path

    def _end(self, op: Op, number: int | None, before: LowerPath, after: LowerPath) -> LowerPath:
        """Where something that is moved from `before` to `after` lies: by its number, else as it
        will be judged at the next try.

        Looks in the order in which it moves, so it cannot be missed; what lies nowhere was removed
        from outside.
        """
        if op.kind is OpKind.EXCHANGE:
            if not op.payload:
                return before  # the numbers are noted before it is begun
            ways = (before, self._lower.exchange_aside(before, after), after)
            return next((way for way in ways if self._number_at(way) == number), before)
        here = self._number_at(before)
        there = self._number_at(after)
        if number is not None and number in (here, there):
            return before if here == number else after
        return before if there is None or here is not None else after

    def _number_at(self, path: LowerPath) -> int | None:
        try:
            return self._lower.lstat(path).ino
        except (FileNotFoundError, NotADirectoryError):
            return None
