"""The mirror's journal: the state database once more, in the spill directory, so that a reboot
finds log and names beside the copies.

Every transaction of the state database is appended there, in order, in a thread of its own, and
flushed (`copies.journal_place`). Together with the copies that `spill` makes, that is a prefix of
the log whose bytes are all there: it ends at the first version that has no copy. A journal that
lags behind the backing directory would carry out again what came after it; so `before` is asked
ahead of each operation, and waits until the journal knows all that the operation's outcome can hang
on: the operation as it is by then, with its staging file, by which the next mount knows its own
work again, and what was left out before it. Which journal counts says a mark on the backing
directory: where the disk fails or hangs, the mark is removed before anything more is committed, and
the drain goes on without a mirror. Threads: `record` under the file system's lock, `before` in the
commit thread, all else in the journal's own.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from acpfs.backing.lower import Lower
from acpfs.logger import get_logger
from acpfs.ram.state import StateDatabase, Statement
from acpfs.runtime.given import Runtime
from acpfs.types import Seq
from acpfs.writeback.copies.counting_mark import CountingMark
from acpfs.writeback.copies.journal_marks import mark_path, withdraw
from acpfs.writeback.copies.journal_place import Journal, JournalPlace, JournalSite
from acpfs.writeback.copies.outage import Outage
from acpfs.writeback.copies.pending import PendingTransactions
from acpfs.writeback.copies.unknown_ops import UnknownOps
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, OpKind

REPEATABLE = frozenset({OpKind.STORE, OpKind.MKDIR, OpKind.SYMLINK, OpKind.MKNOD})
"""Operations that can be carried out again in a row, as long as no two of them have to do with the
same name or node.
"""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """With the place of a journal."""

    what: str
    """It is, for people."""
    wait_s: float
    """The drain waits no longer for it than this; then there is no mirror, or it is elsewhere."""
    rest_s: float
    """After that, until the journal is begun anew."""
    complaint: str
    repeatable: frozenset[OpKind] = REPEATABLE
    waits_for_next: bool = False
    """Whether the drain waits, within `wait_s` of a failure, for the next journal: it comes sooner
    than a disk is mended, and what counts as copied does so until the mark is withdrawn.
    """
    elsewhere_wait_s: float = 60.0
    """The same as `wait_s` for a journal on the storage, on which the drain waits anyway: one that
    is slow alone is no reason to give up what was told to be copied.
    """
    gather_s: float = 0.0
    """See `copies.pending`."""


DISK_PATIENCE = Patience(
    "disk",
    10.0,
    30.0,
    "the mirror in the spill directory failed: what is not drained would not survive a reboot",
)
HOLDER_PATIENCE = Patience(
    "holder",
    10.0,
    0.5,
    "the copy at another member is behind: what is not drained would not survive the loss of this "
    "node",
    # whoever adopts knows of each other one that it was begun, before it is: what a fence does not
    # stop may be under way yet then
    repeatable=frozenset({OpKind.STORE}),
    waits_for_next=True,
    gather_s=0.02,  # a word to the holder takes four processes about a millisecond of processor
)


@dataclass(frozen=True, slots=True)
class MirrorStatistics:
    """What `status`, the metrics and the tests see."""

    state: str
    """on (a reboot would find the mirrored prefix), away (it would find what was mirrored when the
    place of the copies was last reached), seeding, or off (`why`).
    """
    why: str
    pending_transactions: int
    """Steps that the journal does not have yet."""
    counts_at: str = ""
    """The member whose copies count, whether it can be reached or not; "": none."""


class JournalStage(enum.Enum):
    """Of the journal that is written now."""

    OFF = "none is, and why is said"
    SEEDING = "the state is being written to it"
    FOLLOWING = "transactions are appended to it"


class NoMirror:
    """For mounts without a mirror: an earlier mount's journal does not count any more as soon as
    something is committed.
    """

    def __init__(self, lower: Lower, node_id: str) -> None:
        self._lower = lower
        self._path = mark_path(node_id)
        self._done = False

    def before(self, _ops: Sequence[Op]) -> None:
        if not self._done:
            withdraw(self._lower, self._path)
            self._done = True


class Mirror:
    """The journal and its mark."""

    def __init__(
        self,
        place: JournalPlace,
        state: StateDatabase,
        operations: OperationLog,
        lower: Lower,
        node_id: str,
        runtime: Runtime,
        patience: Patience = DISK_PATIENCE,
    ) -> None:
        """Begins nothing; `begin` does."""
        self._place = place
        self._state = state
        self._operations = operations
        self._patience = patience
        self._runtime = runtime
        self._mark = CountingMark(lower, node_id, place)
        self._marking = runtime.threads.lock()
        """Held while the mark is looked at and changed, and by the commit thread until it knows
        what it may do.
        """
        self._changed = runtime.threads.condition()
        self._stage = JournalStage.OFF
        self._why = "not begun"
        """It is off."""
        self._outage = Outage(runtime.clock.now, patience.wait_s, patience.rest_s)
        self._token = ""
        self._site: JournalSite | None = None
        """Where the journal of that token is."""
        self._counts_with_copies = False
        """Whether copies are made beside the journal that this worker began and the mark names,
        which may be one before the one that is written now.
        """
        self._needed_until = operations.last_seq
        """Of operations up to this one others may have been told that they are copied."""
        self._is_needed = True
        """Whether one of them is not persisted, when it was last looked."""
        self._wanted = 0
        """So many transactions somebody waits for."""
        self._pending = PendingTransactions(runtime.clock.now, patience.gather_s)
        self._logged = 0
        """Transactions that were made."""
        self._synced = 0
        """Of these the journal has so many."""
        self._known_changes = 0
        """Of the state, as far as the journal that counted had them when an operation was last to
        be carried out.
        """
        self._is_long = False
        self._is_closing = False
        self._after: deque[tuple[int, Callable[[], None]]] = deque()
        """By number: there may be thousands."""
        self._current: list[tuple[int, str, Callable[[], None]]] = []
        self._unknown = UnknownOps(patience.repeatable)

    # -- the journal

    def begin(self) -> None:
        """Write the journal anew, from the state as it is now; under the lock, and again after a
        failure, or when it has become long.
        """
        snapshot = self._state.follow(self._record)
        token = self._runtime.chance.token(8)
        with self._changed:
            self._token = token
            self._site = self._place.site
            self._stage = JournalStage.SEEDING
            self._why = ""
            self._changed.notify_all()
            self._is_long = False
            # once it has its beginning; it is not marked sooner
            self._pending.begin(self._state.recorded_changes)
            self._synced = self._logged
            self._wanted = self._logged
        self._runtime.threads.start("mirror", self._run, token, snapshot)

    def look(self) -> None:
        """Begin anew after a failure, when its rest is over, or a journal that has become long;
        under the lock, about once a second.
        """
        is_off = self._stage is JournalStage.OFF
        has_rested = is_off and self._outage.has_rested
        site = self._place.site
        first = self._operations.first()
        with self._changed:
            # in one: a failure meanwhile says anew what is needed
            self._is_needed = first is not None and first.seq <= self._needed_until
        if site is not None and not site.has_copies and not self._is_needed:
            # what was told to be copied is persisted: it goes on without a journal, and at once
            self.broken(self._outage.wait_s)
        elif site is None:
            self.broken()
        elif not self._is_closing and (
            has_rested or self._is_long or (site is not self._site and not is_off)
        ):
            self.begin()
        elif (
            self._stage is JournalStage.FOLLOWING
            and self._mark.token != self._token
            and not self._marking.locked()
        ):
            self._mark_soon(self._token)

    def broken(self, waited_s: float = 0.0) -> None:
        """What was written there does not go on: a journal is begun anew when its place is ready
        again. `waited_s`: see `_fail_locked`.
        """
        with self._changed:
            self._fail_locked(self._token, "its place is gone", waited_s)

    def _mark_soon(self, token: str) -> None:
        """In a thread of its own: the backing directory may hang, and the journal must go on."""
        self._runtime.threads.start("mirror mark", self._try_mark, token)

    def _try_mark(self, token: str) -> None:
        with self._marking, contextlib.suppress(OSError):  # then `look` or `before` tries again
            if (
                token == self._token
                and self._mark.token != token
                and self._wait(token, self._knows_all())
            ):
                self._set_mark(token)

    def _record(self, statements: list[Statement]) -> None:
        with self._changed:
            if self._stage is JournalStage.OFF:
                return
            self._logged += 1
            self._pending.add(statements, self._state.changes)
            if self._pending.are_too_many:
                self._fail_locked(self._token, f"the {self._patience.what} is too slow")
            # a journal that gathers knows of the first one, and need not wake for each
            if len(self._pending) <= 1 or self._is_wanted():
                self._changed.notify_all()

    def _run(self, token: str, snapshot: sqlite3.Connection) -> None:
        try:
            with contextlib.closing(self._seed(token, snapshot)) as journal:
                with self._changed:
                    is_over = token != self._token
                    if not is_over and self._stage is JournalStage.SEEDING:
                        self._stage = JournalStage.FOLLOWING
                    self._changed.notify_all()
                if is_over:
                    # another one was begun meanwhile, and has to be seeded itself; it may have
                    # removed the others by now, and no mark has named this one
                    self._place.remove(token)
                    return
                self._mark_soon(token)
                while (batch := self._next(token, is_lazy=journal.is_lazy)) is not None:
                    self._apply(journal, batch)
                    self._has(token, len(batch), is_long=journal.is_long)
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            # the last two: a value that a journal cannot have; nobody else would hear of it
            with self._changed:
                self._fail_locked(token, str(error))

    def _seed(self, token: str, snapshot: sqlite3.Connection) -> Journal:
        with self._changed:
            site = self._site if token == self._token else None
        if site is None:
            snapshot.close()
            raise OSError(errno.EHOSTDOWN, "there is no place for it now")
        return site.begin(token, snapshot)

    def _next(self, token: str, *, is_lazy: bool) -> list[list[Statement]] | None:
        with self._changed:
            while not self._is_closing and self._is_written(token):
                rest_s = self._pending.gathers_s(is_lazy=is_lazy)
                if self._pending and (rest_s == 0.0 or self._is_wanted()):
                    break
                self._changed.wait(rest_s)
            if not self._is_written(token) or (self._is_closing and not self._pending):
                return None
            return self._pending.take()

    def _is_written(self, token: str) -> bool:
        """Whether the journal of that token is the one that is written now."""
        return token == self._token and self._stage is not JournalStage.OFF

    def _is_wanted(self) -> bool:
        return self._wanted > self._synced or self._pending.are_many

    @staticmethod
    def _apply(journal: Journal, batch: list[list[Statement]]) -> None:
        journal.append(batch)

    def _has(self, token: str, count: int, *, is_long: bool) -> None:
        with self._changed:
            if token != self._token:
                return
            self._synced += count
            self._pending.appended()
            self._is_long = is_long
            self._changed.notify_all()
        self._run_after()

    def _fail_locked(self, token: str, why: str, waited_s: float = 0.0) -> None:
        """`waited_s`: so long the drain was held up for it already."""
        if not self._is_written(token):
            return
        self._stage = JournalStage.OFF
        self._why = why or "?"
        if self._mark.token and self._counts_with_copies:
            # also where the one that failed was to be marked yet: what was told to be copied is
            # beside an earlier one
            self._needed_until = self._operations.last_seq
            self._is_needed = True
        self._outage.failed(waited_s)
        self._pending.forget()
        log.warning(self._patience.complaint, error=why)
        self._changed.notify_all()

    def when_safe(self, action: Callable[[], None]) -> None:
        """Have `action` called when neither the state nor a journal that counts names any more what
        it takes away; under the lock.
        """
        self._state.after_commit(lambda: self._later(action))

    def _later(self, action: Callable[[], None]) -> None:
        with self._changed:
            self._after.append((self._logged, action))
            if self._logged > self._synced and self._mark.may_name_one:
                return  # whoever changes that looks
        self._run_after()

    @property
    def token(self) -> str:
        """Of the journal that is written now."""
        return self._token

    def when_current(self, action: Callable[[], None]) -> None:
        """Have `action` called when the journal that is written now counts, and has what was logged
        until now; never, where it fails before.
        """
        with self._changed:
            self._current.append((self._logged, self._token, action))
            self._wanted = self._logged
            self._changed.notify_all()
        self._run_current()

    def _run_current(self) -> None:
        with self._changed:
            if not self._current:
                return
            waiting = [one for one in self._current if self._is_written(one[1])]
            # beside a journal elsewhere are copies of before
            counts = self._mark.token == self._token and self._has_copies()
            ready = [one for one in waiting if counts and one[0] <= self._synced]
            self._current = [one for one in waiting if one not in ready]
        for _number, _token, action in ready:
            action()

    def _run_after(self) -> None:
        self._run_current()
        with self._changed:
            may_count = self._mark.may_name_one
            if may_count and (self._stage is JournalStage.OFF or self._mark.token != self._token):
                return  # an older journal, or the one that failed, may count still
            done: list[Callable[[], None]] = []
            while self._after and (not may_count or self._after[0][0] <= self._synced):
                done.append(self._after.popleft()[1])
        for action in done:
            action()

    # -- ahead of operations

    def before(self, ops: Sequence[Op]) -> None:
        """Wait until the journal knows what it has to before the operations are carried out, in a
        row; no two of them have to do with the same name or node. In the commit thread.

        Raises:
            OSError: the backing directory's, when the mark has to be changed: the operations must
                not be carried out.
        """
        with self._marking:
            self._ahead_of(ops)

    def _ahead_of(self, ops: Sequence[Op]) -> None:
        self._mark.learn()
        if self._after and not self._mark.may_name_one:
            self._run_after()  # what waits until none counts: it is known only now
        with self._changed:
            if self._patience.waits_for_next and self._mark.may_name_one:
                self._changed.wait_for(
                    lambda: self._stage is not JournalStage.OFF or self._is_closing,
                    max(0.0, self._outage.left_s),
                )
            token = self._token
            is_off = self._stage is JournalStage.OFF
        if is_off or self._mark.token != token:
            if not is_off and self._wait(token, self._knows_all()):
                self._set_mark(token)
            else:
                self._does_without(ops)
                return
        elif self._is_behind(token, ops) and not self._sync(token):
            self._does_without(ops)
            return
        # all of them behind that: to sync for a later one would forget those before it, which are
        # not carried out yet
        for op in ops:
            self._unknown.add(op)

    def _does_without(self, ops: Sequence[Op]) -> None:
        """The journal failed while it was waited for: the next one has the rest of the time. Then
        one elsewhere has its time, where what counts is needed.
        """
        with self._changed:
            is_next_in_time = self._patience.waits_for_next and self._outage.left_s > 0
        if self._mark.may_name_one and (is_next_in_time or self._goes_elsewhere()):
            self._ahead_of(ops)
        else:
            self._remove_mark()

    def _goes_elsewhere(self) -> bool:
        """Whether `look` begins one there within a second."""
        with self._changed:
            if not self._is_needed or not self._place.goes_elsewhere(self._site):
                return False
            self._outage.goes_elsewhere()
            return True

    def _is_behind(self, token: str, ops: Sequence[Op]) -> bool:
        """Whether the journal of that token has to be waited for.

        What it was given meanwhile by itself it has, too.
        """
        with self._changed:
            if token == self._token:
                self._known_changes = max(self._known_changes, self._pending.known_changes)
        return any(map(self._must_know, ops))

    def _must_know(self, op: Op) -> bool:
        """Whether carrying out again what the journal does not know to be done would spoil
        something, once this one is carried out.

        It would if the journal knew the operation otherwise than it is carried out: what a staging
        file made that the journal does not know would be taken for somebody else's, and what was
        left out would be carried out after all.
        """
        return self._operations.changed(op) > self._known_changes or self._unknown.would_spoil(op)

    def _sync(self, token: str) -> bool:
        with self._changed:
            wanted = self._logged
            changes = self._pending.changes
        if not self._wait(token, lambda: self._synced >= wanted):
            return False
        self._known_changes = changes
        self._unknown.begin_anew()
        return True

    def _knows_all(self) -> Callable[[], bool]:
        """Whether the journal has all that was logged until now."""
        with self._changed:
            wanted = self._logged
        return lambda: self._stage is JournalStage.FOLLOWING and self._synced >= wanted

    def _wait(self, token: str, condition: Callable[[], bool]) -> bool:
        """Whether the journal of that token came so far; one that was begun meanwhile says nothing
        of it, and is not to blame for it.
        """
        with self._changed:
            self._wanted = self._logged
            self._changed.notify_all()
            is_elsewhere = self._site is not None and not self._has_copies()
            wait_s = self._patience.elsewhere_wait_s if is_elsewhere else self._outage.wait_s
            what = "storage" if is_elsewhere else self._patience.what
            met = self._changed.wait_for(lambda: not self._is_written(token) or condition(), wait_s)
            if not met:
                self._fail_locked(token, f"the {what} does not answer", wait_s)
            return self._is_written(token)

    def _set_mark(self, token: str) -> None:
        with self._changed:
            # another one may have been begun since, perhaps elsewhere: then it is taken for one
            # with copies, and nothing is given up too early
            has_copies = self._has_copies() or token != self._token
        self._mark.put(token)
        with self._changed:
            self._counts_with_copies = has_copies
            self._outage.is_over()
        self._unknown.stands_alone()
        self._run_after()
        with contextlib.suppress(OSError):  # they only take room: the next mark's removal
            self._remove_others(token)

    def _remove_others(self, token: str) -> None:
        """Journals that count no more.

        Listed first: one that is begun after the listing is not in it, and its token is known here.
        """
        tokens = self._place.tokens()
        with self._changed:
            in_use = (token, self._token)
        for other in tokens:
            if other not in in_use:
                self._place.remove(other)

    def _remove_mark(self) -> None:
        if self._mark.withdraw():
            self._run_after()

    # -- the whole

    @property
    def is_current(self) -> bool:
        """Whether the journal that counts has every transaction that was made. Thread-safe."""
        with self._changed:
            is_on = self._stage is JournalStage.FOLLOWING and self._mark.token == self._token
            return is_on and self._has_copies() and self._synced >= self._logged

    def _has_copies(self) -> bool:
        return self._site is not None and self._site.has_copies

    @property
    def counts_until(self) -> Seq | None:
        """No copy of an operation after this one counts: its holder is out of reach since then.

        None: all count that are made. Thread-safe.
        """
        with self._changed:
            is_away = self._stage is JournalStage.OFF or not self._has_copies()
            has_holder = self._patience.waits_for_next and self._mark.may_name_one
            return self._needed_until if has_holder and is_away else None

    def statistics(self) -> MirrorStatistics:
        """Thread-safe."""
        with self._changed:
            state = "seeding"
            if self._stage is JournalStage.OFF:
                state = "off"
            elif self._mark.token == self._token:
                state = "on" if self._has_copies() else "away"
            # what has joined a step that is still to come
            pending = self._logged - self._synced + bool(self._state.unrecorded)
            return MirrorStatistics(state, self._why, pending, self._place.counts_at)

    def close(self, *, nothing_left: bool) -> None:
        """At the end of the mount: the journal has everything, or, when nothing is left, counts no
        more. Waits a while for the disk.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            if self._stage is JournalStage.FOLLOWING:
                self._changed.wait_for(
                    lambda: self._stage is JournalStage.OFF or self._synced >= self._logged,
                    self._outage.wait_s,
                )
        if nothing_left:
            self._mark.remove()
