"""Commit: making logged operations visible on the backing directory, one after the other, in one
thread.

Every operation may have been carried out before (the worker died between the backing directory's
answer and the state database): each method finds that out and treats it as done. The committed
tree, the manifest and the mark "committed" change in one transaction right after the call, so that
at most one operation is ever in doubt, or a run of new files or of removals that have nothing to do
with each other (`store_runs`, `removal_runs`). What others did to the backing directory meanwhile
is put right where it can be, and counted.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from acpfs.backing import posix_acl
from acpfs.backing.attributes import DIGEST_XATTR
from acpfs.backing.lower import LowerPath, LowerStat, Note
from acpfs.types import NO_INO, Ino, Seq
from acpfs.writeback.commits.conflicts import Conflicts
from acpfs.writeback.commits.given_back import GivenBack
from acpfs.writeback.commits.group import GroupOutcome
from acpfs.writeback.commits.moved_contents import Moved, MovedContents
from acpfs.writeback.commits.placing import Placing, StagingLostError
from acpfs.writeback.commits.removal_runs import begin_removals
from acpfs.writeback.commits.shut_directories import CHANGE, ENTER, ShutDirectories, Wanted
from acpfs.writeback.commits.store_runs import CERTAIN, RUN_OPS_MAX, StoreRuns, ours, take_back
from acpfs.writeback.evidence import absence
from acpfs.writeback.evidence.whereabouts import Whereabouts
from acpfs.writeback.log.log import REMOVING
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import ATTRIBUTES, Metadata, Op, OpKind, VersionState
from acpfs.writeback.log.pairs import Pairs
from acpfs.writeback.log.stages import Stage, Step
from acpfs.writeback.manifest.manifest import Manifest
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.streams.equal import is_linked
from acpfs.writeback.streams.noted import with_note
from acpfs.writeback.streams.spares import Spares

T = TypeVar("T")

NO_NUMBER = 0
"""In place of an inode number: there is nothing."""


class Committer:
    """Carries operations out; called in the commit thread."""

    def __init__(
        self,
        parts: DrainParts,
        placing: Placing,
        manifest: Manifest,
        applied: dict[int, str],
        conflicts: Conflicts,
        spares: Spares,
        there: Whereabouts,
        before: Callable[[Sequence[Op]], None],
    ) -> None:
        """`applied`: see `Streamer.applied`; `spares`: keeps what is replaced, where that is of
        use; `before`: called ahead of the operations that are carried out next, one or a run
        (`Mirror.before`).
        """
        self._parts = parts
        self._placing = placing
        self._before = before
        self._manifest = manifest
        self._lower = parts.lower
        self._tree = parts.tree
        self._log = parts.log
        self._state = parts.state
        self._lock = parts.lock
        self._applied = applied
        self._conflicts = conflicts
        self._spares = spares
        self._there = there
        self._listings = absence.Listings(parts.lower)
        self._given_back = GivenBack(parts, conflicts)
        self._shut = ShutDirectories(parts)
        self._changed = False
        """Whether something was changed for the operation that is being carried out now."""
        self._doubtful = False
        """Whether it may have been carried out before, in part."""
        self._is_of_run = False
        """Whether it was begun together with others, and is recorded with them."""
        self._owed: dict[Ino, None] = {}
        """Directories in which names may have been made for operations that were given up."""
        self._numbers: dict[Ino, int] = {}
        """Inode numbers of what the group has made: the file system is told when all of it is
        persisted.
        """
        self.stopped = False
        """Set to end a group early; what was not begun stays queued."""
        self._stores = StoreRuns(parts, manifest, applied, conflicts, spares, lambda: self.stopped)
        self._pairs = Pairs(parts.log, parts.tree)
        self._moved = MovedContents(
            parts, placing, conflicts, self._stores, self._complete_attributes
        )
        self._kinds: dict[OpKind, Callable[[Op], LowerStat | None]] = {
            OpKind.STORE: self._store,
            OpKind.MKDIR: self._make_entry,
            OpKind.RMDIR: self._rmdir,
            OpKind.UNLINK: self._unlink,
            OpKind.RENAME: self._rename,
            OpKind.EXCHANGE: self._exchange,
            OpKind.LINK: self._link,
            OpKind.SYMLINK: self._make_entry,
            OpKind.MKNOD: self._make_entry,
            OpKind.SETATTR: self._set_attributes,
            OpKind.SETXATTR: self._set_attributes,
        }

    def run(self, group: list[Op]) -> GroupOutcome:
        """Carry out a group up to the first failure."""
        outcome = GroupOutcome()
        self.shut_directories()
        try:
            self._placing.end_parents()
        except OSError as error:
            outcome.failed = group[0]
            outcome.error = error
            return outcome
        self._conflicts.begin_group()
        self._numbers.clear()
        self._listings.forget()
        again = {op.seq for op in group if op.begun}
        at = 0
        while at < len(group) and not self._is_looked_at_first(group[at], outcome):
            count = self._next(group, at, outcome)
            if not count:
                break
            at += count
        self._flush_above(outcome, again)
        return outcome

    @staticmethod
    def _is_looked_at_first(op: Op, outcome: GroupOutcome) -> bool:
        """Whether it waits for the look at what came before it: what a server has forgotten of that
        may lie where this would come, a file that is moved under its former name.
        """
        return outcome.is_doubtful and not op.committed

    def _flush_above(self, outcome: GroupOutcome, again: set[Seq]) -> None:
        """What was made again above an operation has a name in a directory that no operation
        mentions; so may what one made that was begun before, and failed then, or by a worker that
        died.
        """
        made = self._placing.has_made_parents
        for op, _st in outcome.done:
            if made or op.seq in again:
                outcome.synced.update(dict.fromkeys(self.above(op)))
        if outcome.done:
            self._placing.has_made_parents = False
            with self._lock:
                outcome.synced.update(self._owed)
                self._owed.clear()

    def owes(self, op: Op) -> None:
        """It was begun, and is given up: what was made again above it stays, and what comes into
        that later relies on its names. Under the lock.
        """
        self._owed.update(dict.fromkeys(self.above(op)))

    def above(self, op: Op) -> Iterator[Ino]:
        """The directories above those that the operation changes, up to the top."""
        with self._lock:
            for directory, _name in op.touches():
                place = self._tree.place(directory)
                while place is not None:
                    yield place[0]
                    place = self._tree.place(place[0])

    def shut_directories(self) -> None:
        """Those that an earlier worker, or an earlier group, has left open."""
        self._shut.shut()

    def _directories(self, op: Op) -> Iterator[Wanted]:
        """In which it changes names, or reaches what it needs."""
        if op.kind in ATTRIBUTES or op.kind is OpKind.LINK:
            for directory, _name in self._parts.places(op.ino)[:1]:
                yield Wanted(directory, ENTER)
        if op.kind in ATTRIBUTES:
            return
        places = self._parts.places(op.ino) if op.kind is OpKind.STORE else []
        places = places or [self.place_of(op)]
        if op.new_parent:
            places.append(self.target_of(op))
            yield from self._moved_away(op)
        for directory, _name in places:
            if directory > NO_INO:
                yield Wanted(directory, CHANGE)

    def _moved_away(self, op: Op) -> Iterator[Wanted]:
        """A directory that gets another one above it says so in itself, so its own mode has to let
        it.
        """
        if op.parent == op.new_parent:
            return
        at = self.place_of(op)
        to = self.target_of(op)
        ends = ((op.ino, to), (op.victim, at)) if op.kind is OpKind.EXCHANGE else ((op.ino, to),)
        for ino, place in ends:
            if self._parts.listener.is_directory(ino):
                yield Wanted(ino, CHANGE, self._parts.path_at(place))

    def _next(self, group: list[Op], at: int, outcome: GroupOutcome) -> int:
        """Carry out what comes next; returns how many operations that were, 0: the group has
        ended.
        """
        if group[at].kind not in REMOVING:
            self._listings.forget()
        if (pair := self._pair(group[at : at + 2])) is not None:
            return self._next_pair(pair, outcome)
        if group[at].kind is OpKind.STORE:
            run = self._stores.carry_out(self._up_to_a_pair(group, at), self._before)
            outcome.failed = run.failed
            outcome.error = run.error
            outcome.lost = run.lost
            for op, st in run.done:
                self._done(op, st, outcome)
            if outcome.has_ended or run.done:
                return 0 if outcome.has_ended else len(run.done)
        if group[at].kind is OpKind.UNLINK and not self.stopped:
            ops = group[at : at + RUN_OPS_MAX]
            removals = begin_removals(self._parts, ops, self._before, outcome)
            if outcome.has_ended or removals:
                return self._next_removals(removals, outcome)
        return self._next_alone(group[at], outcome)

    def _next_removals(self, run: list[Op], outcome: GroupOutcome) -> int:
        """Carry out a run that was begun; nothing is done for those behind one that does not
        succeed.
        """
        done = 0
        self._is_of_run = True
        try:
            while done < len(run) and self._next_alone(run[done], outcome):
                done += 1
        finally:
            self._is_of_run = False
        with self._lock, self._state.step():  # records those that were done
            take_back(op for op in run[done:] if op.stage is Stage.UNDER_WAY)
        return done if done == len(run) else 0

    def _next_alone(self, op: Op, outcome: GroupOutcome) -> int:
        self._doubtful = op.begun and not self._is_of_run
        self._changed = False
        try:
            if not self._is_of_run:
                self._catch_up(op)
            if self.stopped or not (self._is_of_run or self._begin(op)):
                return 0
            st = self._again(op, outcome) if op.committed else self._carry_out(op)
        except StagingLostError:
            op.take(Step.FAILED)
            outcome.lost = op
            return 0
        except OSError as error:
            if op.started:
                in_doubt = self._doubtful or self._changed or error.errno not in CERTAIN
                op.take(Step.FAILED if in_doubt else Step.TAKEN_BACK)
            outcome.failed = op
            outcome.error = error
            return 0
        self._done(op, st, outcome)
        if op.kind is OpKind.STORE:
            outcome.synced.update(
                dict.fromkeys(directory for directory, _name in self._parts.places(op.ino))
            )
        return 1

    def _up_to_a_pair(self, group: list[Op], at: int) -> list[Op]:
        """The next operations that a run may be made of."""
        end = min(at + RUN_OPS_MAX, len(group))
        with self._lock:
            for number in range(at + 1, end):
                if self._pairs.content_of(group[number]) is group[number - 1]:
                    return group[at : number - 1]
        return group[at:end]

    def _pair(self, ops: list[Op]) -> Moved | None:
        with self._lock:
            if len(ops) < 2 or self._pairs.move_of(ops[0]) is not ops[1]:
                return None
            if any(self._log.get(op.seq) is not op for op in ops):
                return None
            content, move = ops
            at = (content.parent, content.name)
            to = (move.new_parent, move.new_name)
            source = self._tree.path_at(*at)
            target = self._tree.path_at(*to)
            if source is None or target is None:
                return None
            return Moved(content, move, at, source, target, to)

    def _next_pair(self, pair: Moved, outcome: GroupOutcome) -> int:
        """Carry both out; where that is not possible the content alone, and the group has ended."""
        content = pair.content
        move = pair.move
        self._doubtful = content.begun
        self._changed = False
        try:
            self._catch_up(content)
            self._catch_up(move)
            if not self._moved.is_straight(pair):
                self._next_without_its_move(pair, outcome)
                return 0
            if self.stopped or not self._begin_both(pair):
                return 0
            st = self.reaching(move, lambda: self._attempt_both(pair))
        except StagingLostError:
            content.take(Step.FAILED)
            move.take(Step.FAILED)
            outcome.lost = content
            return 0
        except OSError as error:
            return self._pair_failed(pair, error, outcome)
        self._done(content, st, outcome)
        self._done(move, st, outcome)
        return 2

    def _pair_failed(self, pair: Moved, error: OSError, outcome: GroupOutcome) -> int:
        """What was refused for certain is tried one by one: people are told which was."""
        in_doubt = self._doubtful or self._changed or error.errno not in CERTAIN
        for op in (pair.content, pair.move):
            if op.started:
                op.take(Step.FAILED if in_doubt else Step.TAKEN_BACK)
        if in_doubt:
            outcome.failed = pair.content
            outcome.error = error
        else:
            self._next_without_its_move(pair, outcome)
        return 0

    def _next_without_its_move(self, pair: Moved, outcome: GroupOutcome) -> None:
        """They are two from here on, for a next worker, too: it looks for each in its place."""
        with self._lock, self._state.step():
            self._log.mark_apart(pair.content, pair.move)
        self._next_alone(pair.content, outcome)

    def _begin_both(self, pair: Moved) -> bool:
        """See `_begin`; in one transaction."""
        with self._lock:
            if self._pairs.move_of(pair.content) is not pair.move:
                return False
            if any(self._log.get(op.seq) is not op for op in (pair.content, pair.move)):
                return False
            self._log.mark_begun_together(pair.content, pair.move)
            self._state.must_commit()
            return True

    def _attempt_both(self, pair: Moved) -> LowerStat | None:
        self._before([pair.content, pair.move])
        with self._moving():
            st = self._moved.put(pair, self._has_changed, doubtful=self._doubtful)
        with self._settling(pair.move, moves=True):
            self._moved.record(pair, st)
            self._manifest.remove(pair.source)
            if pair.content.version is None or st is None:
                self._manifest.remove(pair.target)
        self._conflicts.noted(pair.content, st)
        self._conflicts.noted(pair.move, st)
        return st

    def _has_changed(self) -> None:
        self._changed = True

    def _done(self, op: Op, st: LowerStat | None, outcome: GroupOutcome) -> None:
        outcome.done.append((op, st))
        if st is not None:
            self._numbers[op.ino] = st.ino
        for directory, _name in op.touches():
            outcome.directories[directory] += 1
        if op.kind in (OpKind.SETATTR, OpKind.SETXATTR, OpKind.MKDIR):
            outcome.entries[op.ino] = None

    def _carry_out(self, op: Op) -> LowerStat | None:
        return self.reaching(op, lambda: self._attempt(op))

    def reaching(self, op: Op, action: Callable[[], T]) -> T:
        """Do something where the operation does, also where its directories shut the daemon out by
        now.
        """
        return self._shut.carry_out(action, lambda: self._directories(op))

    def _attempt(self, op: Op) -> LowerStat | None:
        if not self._is_of_run:
            self._before([op])
        conflicts = self._conflicts.total
        is_concerned = self._conflicts.concerns(op, is_doubtful=self._doubtful)
        if is_concerned and not self._conflicts.admit(op):
            self._leave(op)
            return None
        if self._conflicts.total > conflicts:
            # its place is beside now: a journal without that would have it stored beside that once
            # more
            self._before([op])
        st = self._kinds[op.kind](op)
        self._conflicts.noted(op, st)
        return st

    def _leave(self, op: Op) -> None:
        """What it would change is somebody else's by now: nothing is known about it any more."""
        with self._settling(op):
            if op.kind in (OpKind.UNLINK, OpKind.RMDIR, OpKind.RENAME, OpKind.EXCHANGE):
                self._tree.remove(*self.place_of(op))
            if op.kind is OpKind.EXCHANGE:
                self._tree.remove(*self.target_of(op))

    def _catch_up(self, op: Op) -> None:
        """Record moves that were carried out although they failed, before an operation that they
        concern is.

        Where a flush failed, too, what was committed ahead of such a move may have to be stored
        again. It belongs where the move has put it: at its old place another file may lie by now,
        and the move, when it is tried again, would find itself done.

        Raises:
            OSError: the backing directory does not say where things are.
        """
        for move in self._there.moved(op):
            with self._lock, self._state.step():
                self._tree.begin_move()
                try:
                    self._record_moved(move)
                finally:
                    self._tree.end_move()

    def _record_moved(self, op: Op) -> None:
        at = self.place_of(op)
        to = self.target_of(op)
        source = self._tree.path_at(*at)
        target = self._tree.path_at(*to)
        if source is None or target is None:
            return
        if op.kind is OpKind.EXCHANGE:
            self._tree.exchange(at, to)
            self._manifest.exchange(source, target)
        else:
            self._tree.move(at, to)
            self._manifest.move(source, target)
        self._log.mark_committed(op)

    def _begin(self, op: Op) -> bool:
        """Take the operation, unless it was left out or has to be streamed again; from here on it
        is not changed any more.
        """
        with self._lock:
            if self._log.get(op.seq) is not op:
                return False
            if op.version is not None and op.version.state not in (
                VersionState.STAGED,
                VersionState.COMMITTED,
            ):
                return False
            self._log.mark_begun(op)
            # else a next worker would take it for one that nothing was done for
            self._state.must_commit()
            return True

    def _again(self, op: Op, outcome: GroupOutcome) -> LowerStat | None:
        """Carried out before: by the last worker, which did not live to flush it, or but for the
        end of it.
        """
        self._conflicts.done_before(op)
        outcome.is_doubtful |= op.is_flush_failed
        self.give_back(op)
        path = self._parts.path(op.ino)
        if op.kind in (OpKind.UNLINK, OpKind.RMDIR) or path is None:
            return None
        st = self._parts.look(path)
        if op.is_flush_failed and not self._is_still_there(op, path, st):
            number = None if op.kind in (OpKind.SYMLINK, OpKind.MKNOD) else self._known_number(op)
            outcome.missing[op.seq] = number or NO_NUMBER
        return None if st is None else self._as_left(op, st)

    def _as_left(self, op: Op, st: LowerStat) -> LowerStat:
        """What lies where the last worker has put something, as `ours`: another member may have put
        its own over it since.
        """
        with self._lock:
            content = op if op.kind is OpKind.STORE else self._log.before_of(op)
        if content is not None and content.version is not None:
            return ours(self._lower, content, st)
        number = self._known_number(op) if stat.S_ISREG(st.mode) else None
        return st if number is None else st._replace(ino=number)

    def _known_number(self, op: Op) -> int | None:
        return None if op.kind is OpKind.STORE else self._conflicts.number(op.ino)

    def _is_still_there(self, op: Op, path: LowerPath, st: LowerStat | None) -> bool:
        """Whether the node lies there, as far as it is known by what; a content is known by its
        checksum (`Recheck`).
        """
        if st is None:
            return False
        if op.kind in (OpKind.SYMLINK, OpKind.MKNOD):
            return self._placing.is_made(op, path)
        return self._known_number(op) in (None, st.ino)

    # -- helpers

    @contextmanager
    def _settling(self, op: Op, *, moves: bool = False) -> Iterator[None]:
        """Around the changes that record a commit.

        `moves`: paths change with it, `_moving` has said so.
        """
        step = self._state.joining_step() if self._is_of_run else self._state.step()
        with self._lock, step:
            try:
                yield
                self._log.mark_committed(op)
            finally:
                if moves:
                    self._tree.end_move()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Paths are about to change; a failure ends that, a success is ended by `_settling`."""
        with self._lock:
            self._tree.begin_move()
        try:
            yield
        except BaseException:
            with self._lock:
                self._tree.end_move()
            raise

    def place_of(self, op: Op) -> Place:
        """`parent`/`name` of the operation, or where that lies since a conflict."""
        return self._conflicts.place(op, op.parent, op.name)

    def target_of(self, op: Op) -> Place:
        """The same for `new_parent`/`new_name`."""
        return self._conflicts.place(op, op.new_parent, op.new_name)

    def _places(self, ino: Ino) -> list[Place]:
        """Where the node lies, which is where new content has to come: costs a question for each of
        its names.
        """
        return self._look_at_places(ino, every=True)

    def _find_place(self, ino: Ino) -> None:
        """See to it that the node lies at the first of its places: one question, however many names
        it has.
        """
        self._look_at_places(ino, every=False)

    def _look_at_places(self, ino: Ino, *, every: bool) -> list[Place]:
        """A further name that others have removed since, or given to another file, is not this
        node's any more.

        But for `every`, up to the first one under which it lies.
        """
        with self._lock:
            places = self._tree.places(ino)
            number = self._numbers.get(ino) or self._conflicts.number(ino)
        if len(places) < 2 or number is None or self._doubtful:
            return places
        seen: dict[Place, int] = {}
        for place in places:
            seen[place] = self._number_at(place)
            if seen[place] == number and not every:
                break
        if number in seen.values():
            others = [place for place, found in seen.items() if found != number]
        else:  # gone everywhere: last come, last served, as for a file with one name
            others = [place for place in places[1:] if seen[place] != NO_NUMBER]
        if not others:
            return places
        with self._lock:
            for place in others:
                self._tree.remove(*place)
            self._parts.counters.repairs += 1
            return self._tree.places(ino)

    def _number_at(self, place: Place) -> int:
        path = self._parts.path_at(place)
        if path is None:
            return NO_NUMBER
        st = self._parts.look(path)
        if st is None:
            absence.make_sure(self._lower, path)
        return NO_NUMBER if st is None else st.ino

    def _path_at(self, parent: Ino, name: bytes) -> LowerPath:
        path = self._parts.path_at((parent, name))
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "its directory is not on the backing directory")
        return path

    # -- files

    def _store(self, op: Op) -> LowerStat:
        version = op.version
        assert version is not None
        assert version.staging_name
        places = self._places(op.ino)
        with self._lock:
            targets = [self._path_at(*place) for place in places] or [
                self._path_at(*self.place_of(op))
            ]
        staging = self._lower.staging_path(version.staging_name)
        first = targets[0]
        if is_linked(version):
            self._placing.check_linked(version, staging)
        replaced = first if places and not self._was_never_there(op) else None
        self._complete_attributes(op, staging, replaced)
        self._spares.keep(version, first)
        try:
            staging = self._placing.put_version(version, first)
        except StagingLostError:
            # An earlier worker has put it under another one of the names: which of them is the
            # first, each worker says anew.
            first = self._placing.name_of(version, targets[1:])
            targets.sort(key=lambda target: target != first)
        self._changed = True
        st = self._lower.lstat(first)
        if st.size != version.size:
            raise StagingLostError
        if self._placing.has_left(staging, st, version.staging_ino) or is_linked(version):
            self._lower.remove_staging(
                version.staging_name
            )  # both were names of one file: that rename does nothing
            st = self._lower.lstat(first)
        for target in targets[1:]:
            if self._placing.add_name(op, first, target, st.ino):
                st = self._lower.lstat(first)
        with self._settling(op):
            if not places:
                self._tree.add(op.ino, *self.place_of(op))
            self._stores.record(version, targets, st)
        return ours(self._lower, op, st)

    def _was_never_there(self, op: Op) -> bool:
        """Whether what may lie under the node's names is another file: a server forgot all that was
        put there for the node, and has what lay there before again.
        """
        with self._lock:
            return op.ino not in self._numbers and self._log.is_unmade(op.ino)

    def _complete_attributes(self, op: Op, staging: LowerPath, replaced: LowerPath | None) -> None:
        """Give the staging file what it lacks: attributes changed since it was staged, xattrs of
        the file that it replaces.

        That one's ACL may have been narrowed for its content alone (S595): the mode is the new one.
        """
        assert op.version is not None
        is_cut = self._placing.shorten_staged(op.version, staging)
        meta = Metadata()
        if replaced is not None and self._lower.features.xattrs:
            with suppress(FileNotFoundError):
                meta.xattrs.update(
                    {
                        name: value
                        for name, value in self._lower.xattrs(replaced).items()
                        if name not in op.meta.xattrs
                    }
                )
        access = meta.xattrs.get(posix_acl.ACCESS)
        if access is not None and op.meta.permissions is not None:
            meta.xattrs[posix_acl.ACCESS] = posix_acl.after_chmod(access, op.meta.permissions)
        if is_cut or self._applied.get(op.version.vid) != op.meta.to_json():
            later = Metadata.from_json(op.meta.to_json())
            later.xattrs.update(meta.xattrs)
            if later.mtime_ns is not None and self._lower.features.xattrs and op.version.digest:
                later.xattrs[DIGEST_XATTR] = Note(op.version.digest, later.mtime_ns).encode()
            meta = later
        elif not meta.xattrs:
            return
        with suppress(FileNotFoundError):
            self._lower.apply(staging, meta)
            self._lower.sync_entry(staging)

    def _link(self, op: Op) -> LowerStat | None:
        self._find_place(op.ino)
        source = self._parts.path(op.ino)
        target = self._path_at(*self.place_of(op))
        st = self._parts.look(source) if source is not None else None
        if source is None or st is None:
            if source is not None:
                absence.make_sure(self._lower, source)
            # the file was removed from outside: there is nothing to give a name to
            self._placing.repaired()
            with self._settling(op):
                pass
            return None
        try:
            self._placing.with_parents(target, lambda: self._lower.link(source, target))
        except FileExistsError:
            if self._placing.add_name(op, source, target, st.ino):
                self._placing.repaired()
        with self._settling(op):
            self._tree.add(op.ino, *self.place_of(op))
            self._manifest.copy(source, target)
        return self._parts.look(target)

    def _unlink(self, op: Op) -> None:
        path = self._path_at(*self.place_of(op))
        self._remove(path, self._lower.unlink)
        with self._settling(op):
            self._tree.remove(*self.place_of(op))
            self._manifest.remove(path)

    def _remove(self, path: LowerPath, remove: Callable[[LowerPath], None]) -> None:
        try:
            remove(path)
        except FileNotFoundError:
            self._listings.make_sure(path)

    # -- directories and special files

    def without_inherited(self, op: Op, path: LowerPath, meta: Metadata) -> Metadata:
        """`meta` of what was made, which has an ACL only if the application saw it so.

        The backing directory hands on what the directory above has there now, to which others may
        have given another default ACL.
        """
        if not self._lower.features.acls or op.kind is OpKind.SYMLINK:
            return meta
        inherited = posix_acl.NAMES & self._lower.xattrs(path).keys() - meta.xattrs.keys()
        if not inherited:
            return meta
        meta = Metadata.from_json(meta.to_json())
        meta.xattrs.update(dict.fromkeys(inherited))
        return meta

    def _make_entry(self, op: Op) -> LowerStat:
        """MKDIR, SYMLINK, MKNOD: what is made without a staging file."""
        path = self._path_at(*self.place_of(op))
        try:
            self._placing.with_parents(path, lambda: self._placing.make(op, path))
        except FileExistsError:
            if not self._placing.is_made(op, path):
                if op.kind is OpKind.MKDIR:
                    raise
                self._placing.put_in_place(op, path)
        self._changed = True
        self._lower.apply(path, self.without_inherited(op, path, op.meta))
        st = self._lower.lstat(path)
        with self._settling(op):
            self._tree.add(op.ino, *self.place_of(op))
            if not stat.S_ISDIR(st.mode):
                self._manifest.remove(path)
        return st

    def _rmdir(self, op: Op) -> None:
        path = self._path_at(*self.place_of(op))
        with self._moving():
            self._remove(path, self._lower.rmdir)
        with self._settling(op, moves=True):
            self._tree.remove(*self.place_of(op))
            self._manifest.remove(path)

    # -- names

    def _rename(self, op: Op) -> LowerStat | None:
        source = self._path_at(*self.place_of(op))
        target = self._path_at(*self.target_of(op))
        with self._moving():
            # What is moved aside has a number: whatever lies there was moved there by this, and
            # under the old name lies something else.
            st = self._parts.look(target) if op.new_parent < 0 else None
            if st is None and self._placing.move(source, target):
                self._changed = True
                st = self._placing.arrived(source, target)
                if self._is_anothers(op.ino, st):
                    # done by an earlier worker, and replaced by somebody else since
                    st = None
        with self._settling(op, moves=True):
            self._tree.move(self.place_of(op), self.target_of(op))
            if st is None:
                self._is_gone(self.target_of(op))
            self._manifest.move(source, target)
        self.give_back(op)
        return st

    def _is_anothers(self, ino: Ino, st: LowerStat) -> bool:
        """Whether what lies where a node was moved to is another file than the node was: neither
        its number nor its time. Not asked of what this group has changed, which has others by now.
        """
        with self._lock:
            left = self._parts.listener.left_as(ino)
        return (
            left is not None
            and ino not in self._numbers
            and not stat.S_ISDIR(st.mode)
            and st.ino != left[0]
            and st.mtime_ns != left[2]
        )

    def _is_gone(self, place: Place) -> None:
        """Others have removed what was to be moved there.

        A directory keeps its place: it is made again with what comes into it (S208).
        """
        node = self._tree.node_at(*place)
        if node is None or not self._parts.listener.is_directory(node):
            self._tree.remove(*place)

    def give_back(self, op: Op) -> None:
        """Of what was moved aside; when paths are at rest again, for it may take a while."""
        kept = self._parts.path(op.ino) if op.moved_for else None
        if kept is not None and stat.S_ISDIR(self._lower.lstat(kept).mode):
            self._given_back.give(
                op.ino, kept, self._parts.path(op.moved_for) or self._path_at(*self.place_of(op))
            )

    def _exchange(self, op: Op) -> LowerStat | None:
        """Not idempotent by nature: the inode numbers before it are noted in the operation first, 0
        for what is not there.

        One of the two may never have come here (what was to be stored there was let go of), or
        others have removed it: the other one just moves.
        """
        at = self.place_of(op)
        to = self.target_of(op)
        a = self._path_at(*at)
        b = self._path_at(*to)
        if not op.payload:
            noted = f"{self._ino_at(at, a)} {self._ino_at(to, b)}".encode()
            with self._lock:
                op.payload = noted
                self._log.save(op)
                self._state.must_commit()
            # it is another operation now: without the numbers it would be carried out twice, which
            # undoes it
            self._before([op])
        ino_a, ino_b = (int(part) for part in op.payload.split())
        with self._moving():
            now_a = self._parts.look(a)
            now_b = self._parts.look(b)
            is_done = (now_a is not None and now_a.ino == ino_b) or (
                now_b is not None and now_b.ino == ino_a
            )
            # what lies where nothing of ours was is replaced by what moves there
            is_here = now_a is not None and ino_a != 0
            is_there = now_b is not None and ino_b != 0
            if not is_done and is_here and is_there:
                # where names cannot be exchanged it is three renames, and a refusal may come after
                # the first
                self._changed = True
                self._lower.exchange(a, b)
            elif not is_done and (is_here or is_there):
                self._move_one_of_two(*((a, b) if is_here else (b, a)))
            now_a = self._parts.look(a)
            now_b = self._parts.look(b)
        with self._settling(op, moves=True):
            self._tree.exchange(self.place_of(op), self.target_of(op))
            for place, st in ((at, now_a), (to, now_b)):
                if st is None:
                    self._is_gone(place)
            self._manifest.exchange(a, b)
        return now_b if ino_a else None  # of the operation's own node

    def _ino_at(self, place: Place, path: LowerPath) -> int:
        """The storage's number of the node at a place; 0: there is no node, or others have removed
        it.
        """
        with self._lock:
            is_ours = self._tree.node_at(*place) is not None
        st = self._parts.look(path) if is_ours else None
        if is_ours and st is None:
            absence.make_sure(self._lower, path)
            self._placing.repaired()
        return 0 if st is None else st.ino

    def _move_one_of_two(self, source: LowerPath, target: LowerPath) -> None:
        self._changed = True
        if self._placing.move(source, target):
            self._placing.arrived(source, target)

    # -- attributes

    def _set_attributes(self, op: Op) -> LowerStat | None:
        self._find_place(op.ino)
        path = self._parts.path(op.ino)
        st: LowerStat | None = None
        if path is not None:
            if op.sets_rights:
                self._shut.forget(path)  # before: a next worker would take the newer mode away
            try:
                self._lower.apply(
                    path, with_note(self._lower, path, op.meta, doubtful=self._doubtful)
                )
                st = self._lower.lstat(path)
            except FileNotFoundError:
                absence.make_sure(self._lower, path)
                self._placing.repaired()  # removed from outside
        with self._settling(op):
            pass
        return st
