"""Conflicts: what is drained after the mount was away (or bypassed) must not overwrite what was
changed natively in between.

While the guard is on, an operation that was logged before looks at its names first. What is there
and is neither what acpfs left nor what the operation itself made is somebody else's: content goes
beside it (NAME.acpfs-conflict-N), and so does all that the log still has for that name; a deletion,
rename or attribute change of it is not carried out. Both are remembered and told. Between look and
change lies a moment that no file system call closes: a native change in just that moment is lost.
Called in the commit thread, never under the lock.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.drain_records import ConflictReport
from acpfs.logger import get_logger, shown
from acpfs.types import Ino, Seq
from acpfs.writeback.evidence import absence
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.parts import DrainParts

EVERYTHING = Seq(1 << 62)
"""Guard for a mount that is bypassed: also what is written through descriptors that are still
open.
"""
CONFLICTS_TOLD_MAX = 100
LEAVE_AFTER_TRIES = 2
"""Of a directory that the guard held back and that is not empty: it is left, not parked."""
NAME_BYTES_MAX = 255
_ASIDE = b".acpfs-conflict-%d"

DDL = """
CREATE TABLE IF NOT EXISTS guard (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS aside (
  parent INTEGER, name BLOB, aside BLOB, PRIMARY KEY (parent, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conflict (
  number INTEGER PRIMARY KEY, path BLOB, kind TEXT, kept_as BLOB, at REAL);
"""

_log = get_logger(__name__)
Guarding = tuple[Seq, frozenset[Ino]]
Look = tuple[int, int, int]
"""(type, size, mtime_ns): not inode and ctime, because our own renames and links change the ctime,
and some file systems the inode.
"""


class Conflicts:
    """Says, per operation, whether and where it may be carried out."""

    def __init__(self, parts: DrainParts) -> None:
        """Takes up what an earlier worker knew."""
        self._parts = parts
        self._left_as = parts.listener.left_as
        self._lower = parts.lower
        self._tree = parts.tree
        self._lock = parts.lock
        self._state = (state := parts.state)
        self._checks: dict[OpKind, Callable[[Op], LowerPath | None]] = {
            OpKind.STORE: self._store,
            OpKind.MKDIR: self._make,
            OpKind.SYMLINK: self._make,
            OpKind.MKNOD: self._make,
            OpKind.UNLINK: self._remove,
            OpKind.RMDIR: self._remove,
            OpKind.SETATTR: self._attributes,
            OpKind.SETXATTR: self._attributes,
            OpKind.LINK: self._link,
            OpKind.RENAME: self._rename,
            OpKind.EXCHANGE: self._exchange,
        }
        state.create(DDL)
        rows = state.rows("SELECT value FROM guard WHERE name = 'until'")
        self._until = Seq(rows[0][0] if rows else 0)
        self._inos: frozenset[Ino] = frozenset()
        self._aside: dict[Place, bytes] = {
            (Ino(p), name): aside
            for p, name, aside in state.rows("SELECT parent, name, aside FROM aside")
        }
        self._seen: dict[Ino, Look] = {}
        self._seen_in_group: dict[Ino, Look] = {}
        """The file system is told of a group when all of it is persisted."""
        self._made: dict[Ino, tuple[int, int]] = {}
        self._dated: dict[Ino, int] = {}
        """By what operations of the last worker can be known again: inode and size of a content, or
        its time.
        """
        rows = state.rows("SELECT path, kind, kept_as, at FROM conflict ORDER BY number")
        self.total = len(rows)
        self.told = [_report(*row) for row in rows[-CONFLICTS_TOLD_MAX:]]

    def guard(self, until: Seq, inos: Iterable[Ino] = ()) -> Guarding:
        """Be careful with operations up to that number, and with those of these nodes; returns what
        it was before. Under the lock.
        """
        before = self._until, self._inos
        self._until = until
        self._inos = frozenset(inos)
        self._seen.clear()
        self._state.change("INSERT OR REPLACE INTO guard VALUES ('until', ?)", (until,))
        return before

    def covers(self, op: Op) -> bool:
        """Whether the operation was logged when others may have changed things since."""
        return op.seq <= self._until or op.ino in self._inos

    def concerns(self, op: Op, *, is_doubtful: bool = False) -> bool:
        """Whether to look first: also before a removal that the guard or the gate held back, or
        that may have been carried out before, for others may have written there since.
        """
        is_late = op.let_go or op.delayed
        return self.covers(op) or ((is_late or is_doubtful) and self._may_hit_others(op, is_late))

    def _may_hit_others(self, op: Op, is_late: bool) -> bool:
        if op.kind is OpKind.RMDIR:
            # something is in it, and does not go
            return is_late and op.tries >= LEAVE_AFTER_TRIES
        return op.kind is OpKind.UNLINK and self._parts.node_at((op.parent, op.name)) == op.ino

    def noted(self, op: Op, st: LowerStat | None) -> None:
        """The operation was carried out: what is there now is ours."""
        if st is None:
            return
        look = (stat.S_IFMT(st.mode), st.size, st.mtime_ns)
        self._seen_in_group[op.ino] = look
        if self._until or self._inos:
            self._seen[op.ino] = look

    def begin_group(self) -> None:
        """What was noted so far is known to the file system."""
        self._seen_in_group.clear()

    def done_before(self, op: Op) -> None:
        """The last worker carried it out and did not live to say how it was left: what looks as the
        operation made it is ours.
        """
        if op.version is not None:
            self._made[op.ino] = (op.version.staging_ino, op.version.size)
        if op.meta.mtime_ns is not None:
            self._dated[op.ino] = op.meta.mtime_ns

    def place(self, op: Op, parent: Ino, name: bytes) -> Place:
        """Where a name that the operation mentions lies for it: beside, once there was a
        conflict.
        """
        aside = self._aside.get((parent, name))
        if aside is not None and (self.covers(op) or self._tree.node_at(parent, aside) == op.ino):
            return (parent, aside)
        return (parent, name)

    def is_foreign(self, place: Place, st: LowerStat) -> bool:
        """Not what the operations so far have left there. What never was looked at counts as
        ours.
        """
        node = self._parts.node_at(place)
        return node is None or not self._is_node(node, st)

    def number(self, ino: Ino) -> int | None:
        """Inode number of the node's entry as acpfs last knew it."""
        with self._lock:
            left = self._left_as(ino)
        return None if left is None else left[0]

    # -- looking

    def admit(self, op: Op) -> bool:
        """Whether to carry it out; where content would hit something foreign, its place has been
        moved aside.

        Raises:
            OSError: the backing directory does not say.
        """
        foreign = self._checks[op.kind](op)
        if foreign is not None:
            self._remember(foreign, op, b"")
        return foreign is None

    def _store(self, op: Op) -> LowerPath | None:
        with self._lock:
            places = self._tree.places(op.ino) or [self.place(op, op.parent, op.name)]
        for place in places:
            path, st = self._look(place)
            ours = op.version is not None and st is not None and op.version.staging_ino == st.ino
            if path is not None and st is not None and not ours and self.is_foreign(place, st):
                self._put_aside(op, place, path)
        return None

    def _make(self, op: Op) -> LowerPath | None:
        """MKDIR, SYMLINK, MKNOD: the same kind of thing there is met as before."""
        place = self.place(op, op.parent, op.name)
        path, st = self._look(place)
        if path is None or st is None or not self.is_foreign(place, st):
            return None
        if op.kind is OpKind.MKDIR:
            same = stat.S_ISDIR(st.mode)
        elif op.kind is OpKind.SYMLINK:
            same = stat.S_ISLNK(st.mode) and self._lower.readlink(path) == op.payload
        else:
            same = stat.S_IFMT(st.mode) == op.meta.file_type
        if not same:
            self._put_aside(op, place, path)
        return None

    def _remove(self, op: Op) -> LowerPath | None:
        place = self.place(op, op.parent, op.name)
        path, st = self._look(place)
        if path is None or st is None:
            return None
        if op.kind is OpKind.RMDIR:
            return path if not stat.S_ISDIR(st.mode) or self._lower.listdir(path) else None
        return path if self.is_foreign(place, st) else None

    def _attributes(self, op: Op) -> LowerPath | None:
        """Of a file with several names one is used, and looked at."""
        with self._lock:
            place = self._tree.place(op.ino)
        if place is None:
            return None
        path, st = self._look(place)
        is_changed = (
            st is not None and self.is_foreign(place, st) and st.mtime_ns != op.meta.mtime_ns
        )
        return path if is_changed else None

    def _link(self, op: Op) -> LowerPath | None:
        foreign = self._attributes(op)
        if foreign is not None:
            return foreign
        target = self.place(op, op.parent, op.name)
        path, st = self._look(target)
        if (
            path is not None
            and st is not None
            and not self._is_node(op.ino, st)
            and self.is_foreign(target, st)
        ):
            self._put_aside(op, target, path)
        return None

    def _rename(self, op: Op) -> LowerPath | None:
        source = self.place(op, op.parent, op.name)
        target = self.place(op, op.new_parent, op.new_name)
        source_path, source_st = self._look(source)
        path, st = self._look(target)
        if source_st is None:  # done before, or taken away natively
            if source_path is not None:
                absence.make_sure(self._lower, source_path)
            return path if st is not None and not self._is_node(op.ino, st) else None
        if self.is_foreign(source, source_st):
            return source_path
        if path is not None and st is not None and self.is_foreign(target, st):
            self._put_aside(op, target, path)
        return None

    def _exchange(self, op: Op) -> LowerPath | None:
        for place in (
            self.place(op, op.parent, op.name),
            self.place(op, op.new_parent, op.new_name),
        ):
            path, st = self._look(place)
            if (
                st is not None
                and not self._is_node(op.ino, st)
                and not self._is_node(op.victim, st)
            ):
                return path
        return None

    def _look(self, place: Place) -> tuple[LowerPath | None, LowerStat | None]:
        path = self._parts.path_at(place)
        return path, None if path is None else self._parts.look(path)

    def _is_node(self, node: Ino, st: LowerStat) -> bool:
        if self._made.get(node) == (st.ino, st.size) or self._dated.get(node) == st.mtime_ns:
            return True
        with self._lock:
            seen = self._seen_in_group.get(node) or self._seen.get(node)
            left = self._left_as(node) if seen is None else None
        kind = stat.S_IFMT(st.mode)
        if seen is not None:
            return kind == seen[0] and (kind == stat.S_IFDIR or (st.size, st.mtime_ns) == seen[1:])
        return left is None or kind == stat.S_IFDIR or (st.size, st.mtime_ns) == (left[1], left[2])

    # -- what comes of it

    def _put_aside(self, op: Op, place: Place, path: LowerPath) -> None:
        """From now on the name's log goes beside."""
        name = place[1]
        number = 0
        while True:
            number += 1
            suffix = _ASIDE % number
            aside = name[: NAME_BYTES_MAX - len(suffix)] + suffix
            if self._look((place[0], aside))[1] is None:
                break
        with self._lock:
            self._aside[place] = aside
            if self._tree.node_at(*place) == op.ino:
                self._tree.move(place, (place[0], aside))
            else:
                self._tree.remove(*place)
            self._state.change("INSERT OR REPLACE INTO aside VALUES (?, ?, ?)", (*place, aside))
        self._remember(path, op, b"/".join((*path[:-1], aside)))

    def _remember(self, path: LowerPath, op: Op, kept_as: bytes) -> None:
        values = (b"/".join(path), op.kind.value, kept_as, self._parts.runtime.clock.wall())
        with self._lock, self._state.step():
            self.total += 1
            self.told = [*self.told[1 - CONFLICTS_TOLD_MAX :], _report(*values)]
            self._state.change(
                "INSERT INTO conflict (path, kind, kept_as, at) VALUES (?, ?, ?, ?)", values
            )
        why = (
            "changed natively while the mount was away"
            if self.covers(op)
            else "changed by others since it was deleted here"
        )
        what = "the mount's is kept beside" if kept_as else "left as it is"
        told = {"path": shown(b"/".join(path)), "kind": op.kind.value} | (
            {"kept_as": shown(kept_as)} if kept_as else {}
        )
        _log.warning(f"conflict: {why}; {what}", **told)


def _report(path: bytes, kind: str, kept_as: bytes, at: float) -> ConflictReport:
    return ConflictReport(os.fsdecode(path), kind, os.fsdecode(kept_as) or None, at)
