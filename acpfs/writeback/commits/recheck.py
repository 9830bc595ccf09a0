"""After a flush that failed: whether what was committed is still there, and what to do where it is
not.

A server that dies between a commit and its flush forgets renames, names and attributes, and a later
flush that succeeds would not know. So before a flush is tried again, everything that the group made
is looked at: names go back to where they were put, directories and special files are made anew,
contents are to be streamed again. What is known by its inode number counts as there only with that
number: under a name that was replaced the old file shows again. What a change that failed may have
moved is looked for at both ends (`whereabouts`). A later content that such a change has put there
stays, and a directory that one may have removed is not made again. What was removed, and is there
again, is left; so is what was replaced by something that was moved away since. Called in a thread
for flushes, with no commit under way; may be done again at any point.
"""

from __future__ import annotations

import errno
import itertools
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.errors import PERMANENT_ERRNOS, errno_name
from acpfs.logger import get_logger, shown
from acpfs.types import Ino, Seq
from acpfs.writeback.commits.commit import Committer
from acpfs.writeback.commits.group import GroupOutcome
from acpfs.writeback.commits.placing import Placing, StagingLostError
from acpfs.writeback.evidence.whereabouts import Whereabouts
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import ATTRIBUTES, Metadata, Op, OpKind
from acpfs.writeback.parts import DrainParts

SAYING = ATTRIBUTES | {OpKind.STORE}
"""What gives a node attributes that it did not have."""
_NOTHING = LowerStat(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""In place of what is not there."""
_REFUSALS = PERMANENT_ERRNOS | {errno.ENOENT}

_log = get_logger(__name__)


class Recheck:
    """Looks at commit groups again."""

    def __init__(
        self, parts: DrainParts, committer: Committer, placing: Placing, there: Whereabouts
    ) -> None:
        self._parts = parts
        self._lower = parts.lower
        self._committer = committer
        self._placing = placing
        self._there = there

    def look(self, group: GroupOutcome) -> None:
        """Put right what is missing, and say so in `group`; contents that are not there any more go
        to `group.undone`.

        Raises:
            OSError: the backing directory does not say, or refuses: of the rest it is not known
                what it has.
        """
        known = [(op, st) for op, st in self._made(group) if op.seq not in group.safe]
        moved = set[Seq]()
        for op, st in known:  # a directory that is moved comes first in its group
            if self._made_again(group, self._name, op, st):
                moved.add(op.seq)
        entry = partial(self._entry, group)
        for op, st in known:
            if self._made_again(group, entry, op, st) or op.seq in moved:
                continue
            if not self._touches_unflushed(group, op):
                group.safe.add(op.seq)
        if self._placing.has_made_parents:
            for op, _st in known:
                group.synced.update(dict.fromkeys(self._committer.above(op)))
            self._placing.has_made_parents = False

    def _made_again(
        self, group: GroupOutcome, attempt: Callable[[Op, LowerStat], bool], op: Op, st: LowerStat
    ) -> bool:
        """Whether something was, which `group` is told at once: the look may not come to its end.

        Also where that failed: it may be there all the same, and the next look finds it.
        """
        try:
            is_made = self._tried(attempt, op, st)
        except OSError:
            group.made_again = True
            raise
        group.made_again |= is_made
        return is_made

    @staticmethod
    def _touches_unflushed(group: GroupOutcome, op: Op) -> bool:
        touched = {op.ino, *group.synced, *(directory for directory, _name in op.touches())}
        return group.made_again or not touched.isdisjoint(group.unflushed)

    @staticmethod
    def _made(group: GroupOutcome) -> Iterator[tuple[Op, LowerStat]]:
        """What the group made, and as what it is known."""
        for op, st in group.done:
            number = group.missing.get(op.seq)
            if number is not None:
                yield op, _NOTHING._replace(ino=number)
            elif st is not None:  # else it removed something, or left something foreign alone
                yield op, st

    def _tried(self, attempt: Callable[[Op, LowerStat], bool], op: Op, st: LowerStat) -> bool:
        """What is refused for good must not hold up all that comes after it: others have changed
        what there was.
        """
        try:
            return self._committer.reaching(op, lambda: attempt(op, st))
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            name = shown(op.new_name or op.name)
            why = errno_name(error.errno)
            _log.error(
                "the backing directory lost this, and refuses to have it again",
                kind=op.kind.value,
                name=name,
                error=why,
            )
            return False

    def _find(self, path: LowerPath) -> LowerPath | None:
        """Where it is by now; None: another lies there."""
        with suppress(FileNotFoundError):
            return self._there.find(path)
        return None

    # -- names

    def _name(self, op: Op, st: LowerStat) -> bool:
        if op.kind not in (OpKind.RENAME, OpKind.EXCHANGE):
            return False
        at = self._committer.place_of(op)
        to = self._committer.target_of(op)
        source = self._parts.path_at(at)
        target = self._parts.path_at(to)
        if source is None or target is None:
            return False
        if op.kind is OpKind.EXCHANGE and op.payload:  # else one of the two was alone, and moved
            return self._exchange(op, (at, source), (to, target))
        if self._parts.node_at(at) == op.ino:
            return False  # another operation of the group has brought it back
        there = self._parts.look(target)
        here = self._parts.look(source)
        if here is None or (there is not None and there.ino == st.ino):
            return False
        is_lost = (
            there is None and self._parts.node_at(to) == op.ino and self._parts.node_at(at) is None
        )
        if not (is_lost or here.ino == st.ino):
            return False  # another file has that name by now
        if self._there.moved(op):
            # it was not forgotten: a later one has moved it back, and its answer was lost
            return False
        if self._is_of_later(op, there):
            return self._left_behind(at, source)
        if self._placing.move(source, target):
            self._placing.arrived(source, target)
        self._committer.give_back(op)
        self._placing.repaired()
        return True

    def _left_behind(self, at: Place, source: LowerPath) -> bool:
        """The rename is lost, and what came to the new name after it is not: the old name goes."""
        if self._parts.node_at(at) is not None:
            return False
        with suppress(FileNotFoundError):
            self._lower.unlink(source)
        self._placing.repaired()
        return True

    def _exchange(self, op: Op, a: tuple[Place, LowerPath], b: tuple[Place, LowerPath]) -> bool:
        if (self._parts.node_at(a[0]), self._parts.node_at(b[0])) != (op.victim, op.ino):
            return False  # another operation of the group has moved them on
        found = [
            found.ino for path in (a[1], b[1]) if (found := self._parts.look(path)) is not None
        ]
        if found != [int(part) for part in op.payload.split()]:
            return False
        if self._there.moved(op):
            # it was not forgotten: a later one has exchanged them back, and its answer was lost
            return False
        self._lower.exchange(a[1], b[1])
        self._placing.repaired()
        return True

    # -- what lies there

    def _entry(self, group: GroupOutcome, op: Op, st: LowerStat) -> bool:
        paths = self._paths(op.ino)
        first = next(paths, None)
        if first is None:
            return False  # removed by a later operation of the group
        if op.kind is OpKind.STORE:
            return self._content(group, op, list(dict.fromkeys((first, *paths))))
        if op.kind is OpKind.LINK:
            return self._link(op, st, itertools.chain([first], paths))
        if op.kind in (OpKind.SYMLINK, OpKind.MKNOD):
            return self._special(group, op, st, first)
        is_lost = (
            op.kind is OpKind.MKDIR
            and self._parts.look(first) is None
            and not self._is_removed_since(op)
        )
        if is_lost:
            group.remade.add(op.ino)  # before: the look may end behind it
            self._placing.with_parents(first, lambda: self._placing.make(op, first))
            self._placing.repaired()
        if op.kind is OpKind.MKDIR or op.kind in ATTRIBUTES:
            self._attributes(group, op, first)
        return is_lost

    def _is_removed_since(self, op: Op) -> bool:
        """Whether a removal of the directory was begun, and is called failed: that may be why it is
        not there, and to make it again would show an earlier moment.
        """
        with self._parts.lock:
            return any(
                later.kind is OpKind.RMDIR and later.ino == op.ino
                for later in self._parts.log.in_doubt()
            )

    def _paths(self, ino: Ino) -> Iterator[LowerPath]:
        """Where a node lies; a file may have thousands of names, and most questions are about
        one.
        """
        for place in self._parts.places(ino):
            path = self._parts.path_at(place)
            if path is not None and (there := self._find(path)) is not None:
                yield there

    def _content(self, group: GroupOutcome, op: Op, paths: list[LowerPath]) -> bool:
        after = [later for later, _st in group.done if later.ino == op.ino and later.seq > op.seq]
        if op.version is None or any(later.kind is OpKind.STORE for later in after):
            return False  # the last one decides
        present = self._parts.look(paths[0])
        if self._is_of_later(op, present):
            return False
        with suppress(StagingLostError):
            placed = self._placing.name_of(op.version, paths)
            ino = op.version.staging_ino
            others = [path for path in paths if path != placed]
            added = [self._placing.add_name(op, placed, path, ino) for path in others]
            return any(added)
        with self._parts.lock:
            # what came with an earlier content is lost, too, and this one has it from nobody else
            op.meta.xattrs = {**self._xattrs_before(group, op), **op.meta.xattrs}
            for later in after:
                if later.kind in ATTRIBUTES:
                    op.meta.merge(later.meta)  # given to what is lost
        group.done[:] = [one for one in group.done if one[0] is not op]
        group.undone.append(op)
        self._placing.repaired()
        return True

    @staticmethod
    def _xattrs_before(group: GroupOutcome, op: Op) -> dict[bytes, bytes | None]:
        """What earlier operations of the group said of the node; None: it has none."""
        found: dict[bytes, bytes | None] = {}
        for earlier, _st in group.done:
            if earlier.ino == op.ino and earlier.seq < op.seq and earlier.kind in SAYING:
                found.update(earlier.meta.xattrs)
        return found

    def _is_of_later(self, op: Op, present: LowerStat | None) -> bool:
        """Whether a later content lies there, put by a rename that failed all the same.

        To put the older one over it would show an earlier moment again, and take the later one's
        staging file.
        """
        with self._parts.lock:
            return present is not None and any(
                later.seq > op.seq
                and later.version is not None
                and later.version.staging_ino == present.ino
                for later in self._parts.log.in_doubt()
            )

    def _link(self, op: Op, st: LowerStat, paths: Iterable[LowerPath]) -> bool:
        place = self._committer.place_of(op)
        path_at = self._parts.path_at(place)
        target = None if path_at is None else self._find(path_at)
        if target is None or self._parts.node_at(place) != op.ino:
            return False
        if self._is_of_later(op, self._parts.look(target)):
            return False
        for path in paths:
            present = self._parts.look(path)
            if path != target and present is not None and present.ino == st.ino:
                return self._placing.add_name(op, path, target, st.ino)
        return False

    def _special(self, group: GroupOutcome, op: Op, st: LowerStat, path: LowerPath) -> bool:
        present = self._parts.look(path)
        if present is not None and present.ino == st.ino:
            return False
        if self._is_of_later(op, present):
            return False
        if present is None:
            self._placing.make_parents(path)
        self._placing.put_in_place(op, path)
        self._attributes(group, op, path)
        return True

    def _attributes(self, group: GroupOutcome, op: Op, path: LowerPath) -> None:
        """Of directories all but their times, which the flush gives them.

        With what later operations of the group say: a worker that is killed before their turn would
        leave the older ones there for good.
        """
        meta = Metadata.from_json(op.meta.to_json())
        for later, _st in group.done:
            if later.ino == op.ino and later.seq > op.seq and later.kind in SAYING:
                meta.merge(later.meta)
        with suppress(FileNotFoundError):  # taken away by others
            present = self._lower.lstat(path)
            if self._is_of_later(op, present):
                return  # which has come with its own ones
            if stat.S_ISDIR(present.mode):
                meta.atime_ns = None
                meta.mtime_ns = None
            if op.kind is OpKind.MKDIR and (op.ino in group.remade or group.is_doubtful):
                meta = self._committer.without_inherited(op, path, meta)
            # Given by an earlier look and flushed since, it is as good as found: else a group with
            # many of them would not end before a look and the flush of all come through at once.
            is_flushed = op.ino in group.given_again and op.ino not in group.unflushed
            if not (is_flushed and _shows(present, meta)):
                self._lower.apply(path, meta)
                group.given_again.add(op.ino)
                group.unflushed.add(op.ino)


def _shows(present: LowerStat, meta: Metadata) -> bool:
    """Whether all of that is there, and could be seen."""
    seen = (
        (meta.permissions, stat.S_IMODE(present.mode)),
        (meta.uid, present.uid),
        (meta.gid, present.gid),
        (meta.mtime_ns, present.mtime_ns),
    )
    return not meta.xattrs and all(wanted in (None, has) for wanted, has in seen)
