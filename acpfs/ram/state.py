"""State database: what must survive the worker process, in SQLite on the RAM tier's tmpfs.

The tmpfs outlives processes and not nodes, exactly like the bytes that the database describes, so
there is nothing to flush (synchronous=off). A transaction is opened by the first change of a step
and committed by `commit`, before the step's result leaves the file system's lock; one step costs
about 13 µs for three changes (measured, Linux 6.18, 2 cores).

SQLite may fail: the tmpfs is full, or its pages cannot be read. That never ends a worker, and never
leaves half a step. The transaction is rolled back as a whole, its changes are kept in memory in
their order, and every later `commit` tries them all again, until one transaction has them.
Meanwhile the database is `LATE`: it shows an earlier moment, as a whole, which is what a next
worker would find. So nothing may leave the worker, and nothing may be done that cannot be undone,
on the strength of a change that is late: `Steps` withholds the answers to applications, and
`must_commit` stops whoever is about to act.

A step that ends by a bug is no step. What it has changed in memory cannot be undone, so the state
is abandoned (`step`, `abandon`): the transaction is rolled back, nothing is committed any more, and
whoever owns the process ends it, so that a next worker goes on from the last whole step.

Each layer creates and reads its own tables. Not thread-safe: used under the file system's lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from concurrent.futures import CancelledError, Future
from enum import Enum
from pathlib import Path
from typing import Any

from acpfs.errors import AcpfsError, RefusedError
from acpfs.logger import get_logger
from acpfs.ram import wal
from acpfs.ram.migration import migrate, version_of
from acpfs.ram.state_space import StateSpace
from acpfs.runtime.given import Runtime

STATE_VERSION = 3
"""Format of all tables together.

A worker refuses a state that is newer than itself, and brings up one that is older (`migration`).
"""
HELD_VERSION = 4
"""The same tables, of a tier that may hold something for other members: an acpfs that knows nothing
but files among its bytes has to be refused.
"""

Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Any], bool]
"""A change: SQL, values, and whether these are those of many rows."""

RETRY_S = 0.1
"""How long after a failure the late changes are tried again, at the earliest: each try makes all of
them.
"""
INTEGER_MAX = (1 << 63) - 1
"""Largest number that SQLite takes."""
_CREATED = re.compile(r"\s*CREATE TABLE IF NOT EXISTS (\w+)")
_SQLITE_OK = 0
_SQLITE_DONE = 101

log = get_logger(__name__)


class Recording(Enum):
    """Whether the database has all that was changed."""

    CURRENT = "current"
    """Everything up to the open transaction, which has the rest."""
    LATE = "late"
    """A transaction failed; its changes, and those since, are only in memory."""
    REPLAYED = "replayed"
    """They are in the open transaction, which is still to be committed."""


def is_answer(error: BaseException) -> bool:
    """Whether it is what somebody was to be told, or nobody waits any more; all else is a bug."""
    return isinstance(error, (OSError, AcpfsError, CancelledError))


class LateError(OSError):
    """What was changed is not recorded yet, so it must not be acted upon; passes by itself."""

    def __init__(self, problem: str) -> None:
        super().__init__(errno.EAGAIN, f"the state in the RAM tier cannot be written: {problem}")


def storable(values: Sequence[Any]) -> Sequence[Any]:
    """The same values, numbers beyond 64 bits as their decimal digits in bytes; `int` reads both.

    A time after 2262 in nanoseconds is such a number, and so are inode numbers of some network file
    systems: nothing that the backing directory can say may be refused here. Bytes, because a column
    of integers turns digits in text into a rounded number.
    """
    return [
        b"%d" % value
        if isinstance(value, int) and not -INTEGER_MAX <= value <= INTEGER_MAX
        else value
        for value in values
    ]


class DamagedError(RefusedError):
    """The state is not what its last user left."""


def lost(path: Path, *, has_bytes: bool) -> str:
    """Why what is at `path` cannot be what its last user left there; "" where nothing says so.

    Before the database is opened.

    `has_bytes`: there are tier files beside it.
    """
    in_use = _in_use(path).exists()
    if not path.exists() or not path.stat().st_size:
        return "its database is gone" if in_use or has_bytes else ""
    if in_use and not _has_write_ahead_log(path):
        return "its write-ahead log is gone"
    return wal.damage(_write_ahead_log(path))


def _in_use(path: Path) -> Path:
    """A mark: from the first change on, until a user is about to close the database, which takes
    the write-ahead log away.
    """
    return path.with_name(f"{path.name}-in-use")


def _write_ahead_log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _has_write_ahead_log(path: Path) -> bool:
    ahead = _write_ahead_log(path)
    return (
        ahead.exists() and ahead.stat().st_size > 0
    )  # who only looks at a database without one leaves an empty one


def forget(path: Path) -> None:
    """What belonged to a database that is gone would be taken for the next one's, or for a loss."""
    _write_ahead_log(path).unlink(missing_ok=True)
    _in_use(path).unlink(missing_ok=True)


def _check_copying(status: int, _remaining: int, _total: int) -> None:
    """Of a copy that cannot be made SQLite would else wait for the end of the transaction, for ever
    and with the interpreter's signals.
    """
    if status not in (_SQLITE_OK, _SQLITE_DONE):
        raise sqlite3.OperationalError(
            "the state was changed while it was copied, without the lock"
        )


class StateStep:
    """See `StateDatabase.step`. There are thousands a second, and a generator would be half of what
    the shortest ones cost.
    """

    __slots__ = ("_state",)

    def __init__(self, state: StateDatabase) -> None:
        self._state = state

    def __enter__(self) -> None:
        """Its transaction begins with its first change."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._state.end_step(error)


class JoiningStep(StateStep):
    """See `StateDatabase.joining_step`."""

    __slots__ = ()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self._state.join()
        else:
            self._state.end_step(error)


class StateDatabase:
    """Owner of the connection and of the transaction."""

    def __init__(
        self,
        path: Path,
        runtime: Runtime,
        space: StateSpace | None = None,
        *,
        check: bool = False,
        abandoned: Callable[[BaseException], None] = lambda _error: None,
    ) -> None:
        """Open or create the database at `path` (mode 0600). `space`: the room that it has.

        `check`: look at all of it (30 ms for 34 MB).

        `abandoned`: told, under the lock, of the bug for which it was abandoned; ends the process.

        Raises:
            RefusedError: the state was written by a newer acpfs.
            DamagedError: it is damaged.
        """
        self._clock = runtime.clock
        self._tell_abandoned = abandoned
        self._is_closed = False
        self.is_abandoned = False
        """Memory is not what a next worker will find: nothing of it may leave this one."""
        try:
            self._open_database(path, StateSpace() if space is None else space)
            if check and (found := self.rows("PRAGMA quick_check(1)")) != [("ok",)]:
                raise DamagedError(f"{path} is damaged: {found[0][0]}")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise DamagedError(f"{path} is damaged: {error}") from error

    def _open_database(self, path: Path, space: StateSpace) -> None:
        self.path = path
        self.space = space
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.close(fd)
        # Without SQLite's locks: a killed worker whose thread never comes back from the backing
        # directory keeps them for as long. Whoever opens the database holds the tier's lock, and
        # the supervisor has one worker at a time.
        self._db = sqlite3.connect(
            f"{path.as_uri()}?vfs=unix-none",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        self._db.execute(
            "PRAGMA locking_mode=EXCLUSIVE"
        )  # first of all: the index of the WAL is then in memory, not in a shared file
        self._db.execute(
            "PRAGMA page_size=1024"
        )  # a step writes few rows, and whole pages: 20 % less than with 4096
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._open = False
        self._tables: set[str] | None = None
        """Those that there are; None: not asked for."""
        self._version = STATE_VERSION
        """Of the format, as it is written."""
        self._is_trial = False
        """The open transaction has brought up an older format, and is not committed before
        `accept`.
        """
        self._writers: list[tuple[Sized, Callable[[], None]]] = []
        self._beside: list[tuple[Sized, Callable[[], None]]] = []
        self._at_commit: list[tuple[Sized, Callable[[], None]]] = []
        """Both of them, in this order."""
        self._after: list[Callable[[], None]] = []
        self._follower: Callable[[list[Statement]], None] | None = None
        self._statements: list[Statement] = []
        """Of the open transaction, and all that are late."""
        self._joined = 0
        """How many of these are of steps that have ended (`joining_step`)."""
        self.changes = 0
        """How many were ever made."""
        self.recording = Recording.CURRENT
        self.problem = ""
        """Why the database is late."""
        self.late_since = 0.0
        """Wall clock, seconds."""
        self._try_at = 0.0
        self._recorded: list[Future[None]] = []
        self._check_version()
        self._mark_in_use()

    def _mark_in_use(self) -> None:
        """Say that there is a write-ahead log from here on.

        A database that was closed in order, or made from a mirror, has none until something is
        written: who was killed before its first change would have left what looks like a loss.
        Where a tmpfs has no room for it, damage is found by what is read.
        """
        if not _has_write_ahead_log(self.path):
            with contextlib.suppress(sqlite3.OperationalError):
                self._db.execute(f"PRAGMA user_version={self._version}")
        if _has_write_ahead_log(self.path):
            with contextlib.suppress(OSError):
                _in_use(self.path).touch(mode=0o600)

    def follow(self, follower: Callable[[list[Statement]], None]) -> sqlite3.Connection:
        """Have `follower` called with the changes of each transaction from now on, after its end;
        returns a copy of the state as it is now.

        All tables must have been created. The copy may be used in another thread. Changes that are
        late follow it. Under the lock of all who change the state: a transaction that another
        thread begins meanwhile raises sqlite3.OperationalError.
        """
        self.commit()
        self._follower = follower
        copy = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.backup(copy, progress=_check_copying)
        return copy

    def _check_version(self) -> None:
        found = version_of(self._db, HELD_VERSION, self.path)
        if found >= STATE_VERSION:
            # a worker that takes over must come to serve where nothing can be written
            self._version = found
            return
        if found:
            self._begin()
            self._is_trial = True
            migrate(self._db, HELD_VERSION, self.path)
        self._db.execute(f"PRAGMA user_version={STATE_VERSION}")

    def accept(self, *, holds: bool = False) -> None:
        """All layers have read what the last worker left, and this one goes on with it.

        `holds`: its tier may hold something for other members from now on. Until then nothing is
        written to a state of an older format: if this worker does not come to serve, the older one
        takes over again.
        """
        self._is_trial = False
        self.commit()
        self._mark_in_use()
        version = HELD_VERSION if holds else STATE_VERSION
        if version != self._version:
            # where nothing can be written it stays as it was: then an older acpfs does not
            # understand what is held, and ends without this sentence
            with contextlib.suppress(sqlite3.OperationalError):
                self._db.execute(f"PRAGMA user_version={version}")
                self._version = version

    def create(self, ddl: str) -> None:
        """Run `CREATE TABLE IF NOT EXISTS …` statements of a layer, in one transaction; none where
        its tables are there, as SQLite would have to read each statement to find that out.

        Ends the transaction: an earlier layer may have changed rows as it read them.
        """
        self._end()
        if self._tables is None:
            found = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self._tables = {name for (name,) in found}
        there = self._tables
        missing = [
            one
            for one in ddl.split(";")
            if not ((table := _CREATED.match(one)) and table[1] in there) and one.strip()
        ]
        if not missing:
            return
        is_trial = self._open
        if not is_trial:
            self._db.execute("BEGIN")
        try:
            for statement in missing:  # `executescript` would commit a trial
                self._db.execute(statement)
            if not is_trial:
                self._db.execute("COMMIT")
        except sqlite3.Error:
            if not is_trial:
                self._roll_back()
            raise
        there.update(table[1] for one in missing if (table := _CREATED.match(one)))

    def change(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Run one INSERT, UPDATE or DELETE inside the step's transaction."""
        if self.is_abandoned:
            return
        if self.recording is not Recording.LATE:
            try:
                if not self._open:
                    self._begin()
                try:
                    self._db.execute(sql, values)
                except (
                    OverflowError
                ):  # asked for only here: the look at each value costs as much as the statement
                    values = storable(values)
                    self._db.execute(sql, values)
            except sqlite3.Error as error:
                self._fall_behind(error)
        self._statements.append((sql, values, False))
        self.changes += 1

    def change_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """`change` for many rows."""
        if self.is_abandoned:
            return
        rows = [storable(row) for row in rows]
        if self.recording is not Recording.LATE:
            try:
                if not self._open:
                    self._begin()
                self._db.executemany(sql, rows)
            except sqlite3.Error as error:
                self._fall_behind(error)
        self._statements.append((sql, rows, True))
        self.changes += 1

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """All rows of a query; sees the step's own changes.

        Raises:
            LateError: it cannot, because they are late.
        """
        if self.is_abandoned or (self.recording is Recording.LATE and not self._replay()):
            raise LateError(self.problem)
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            if _is_bug(error):
                raise
            raise LateError(str(error)) from error

    def before_commit(self, changed: Sized, write: Callable[[], None]) -> None:
        """Have `write` called at each commit that finds something in `changed`: it brings the rows
        of that, and empties it.
        """
        self._writers.append((changed, write))
        self._at_commit = [*self._writers, *self._beside]

    def beside_commit(self, changed: Sized, write: Callable[[], None]) -> None:
        """The same for what is no part of the state, and goes with it: it makes no step one that
        has changed something.
        """
        self._beside.append((changed, write))
        self._at_commit = [*self._writers, *self._beside]

    def after_commit(self, action: Callable[[], None]) -> None:
        """Have `action` called once, after the next commit: what takes away something that the
        state of before it still needs.
        """
        self._after.append(action)

    def step(self) -> StateStep:
        """One step under the lock: see `end_step`."""
        return StateStep(self)

    def joining_step(self) -> JoiningStep:
        """One whose changes are recorded with those of whoever commits next, which somebody has to
        do soon: for what may as well not have happened, where this process is killed before.
        """
        return JoiningStep(self)

    def join(self) -> None:
        """End such a step.

        Where no other step comes, what has joined is recorded by the worker's look each second: the
        engine may be busy with a storage that does not answer. Nobody may be told of it before.
        """
        self._joined = len(self._statements)

    def end_step(self, error: BaseException | None) -> None:
        """It is committed, also where it ends by an answer; abandoned where that is a bug."""
        if error is None or is_answer(error):
            self.commit()
        else:
            self.abandon(error)

    @property
    def is_changed_by_step(self) -> bool:
        """`has_changes`, by the step that is under way now."""
        return len(self._statements) > self._joined or self._has_changes_to_bring()

    @property
    def has_changes(self) -> bool:
        """Whether anything was changed since the last commit, be it still to be brought
        (`before_commit`) or late.
        """
        return bool(self._statements) or self._has_changes_to_bring()

    def _has_changes_to_bring(self) -> bool:
        for changed, _write in self._writers:  # noqa: SIM110 - asked for each step, and cheaper so
            if changed:
                return True
        return False

    def abandon(self, error: BaseException) -> None:
        """A bug left a step half done: the database stays as it was before it, for the next
        worker.
        """
        if self.is_abandoned or self._is_closed:
            return
        self._roll_back()
        self._statements.clear()
        self._joined = 0
        self._after.clear()
        self.is_abandoned = True
        self.problem = f"abandoned for a bug: {type(error).__name__}: {error}"
        self._tell_abandoned(error)

    def commit(self) -> bool:
        """End the step's transaction, if it changed anything; whether all that was changed is
        recorded.
        """
        if self.is_abandoned:
            return False
        try:
            for changed, write in self._at_commit:
                if changed:
                    write()
            has_changes = self._open or self.recording is not Recording.CURRENT
            if has_changes and not self._settle() and not (self._try_at <= 0 and self._settle()):
                return False
            if self._after and not self._is_trial:
                actions = self._after
                self._after = []
                for action in actions:
                    action()
        except BaseException as error:
            if not is_answer(error):
                self.abandon(error)
            raise
        return True

    def must_commit(self) -> None:
        """`commit` ahead of something that cannot be undone.

        Raises:
            LateError: it failed; the changes stay, and are recorded later.
        """
        if not self.commit():
            raise LateError(self.problem)

    @property
    def unrecorded(self) -> int:
        """How many changes are not recorded: between steps those of steps that join the next one,
        and those that are late.
        """
        return len(self._statements)

    @property
    def recorded_changes(self) -> int:
        """So many of `changes`, the first ones, are recorded."""
        return self.changes - len(self._statements)

    def when_recorded(self) -> Future[None]:
        """For whoever could not `commit`: done, under the lock, when all that is late is recorded;
        whoever asked may cancel it.

        What has joined and is not late is not waited for (`unrecorded`).
        """
        future: Future[None] = Future()
        if self.recording is Recording.CURRENT and not self.is_abandoned:
            future.set_result(None)
        else:
            self._recorded.append(future)
        return future

    def warnings(self) -> list[str]:
        """For `status`."""
        if self.recording is Recording.CURRENT:
            return self.space.warnings()
        since = time.strftime("%H:%M:%S", time.localtime(self.late_since))
        return [
            (
                f"since {since} the state in the RAM tier cannot be written ({self.problem}): what "
                "applications change waits until it can"
            )
        ]

    def close(self) -> None:
        """Commit and close; under the lock. The step of a thread that comes later fails, and that
        is no bug.
        """
        if self.is_abandoned:
            log.error("the state stays as it was before the last step", problem=self.problem)
            self._close_database()  # its mark stays: it is that of one who was killed
            return
        if not self.commit():
            log.error(
                "the last changes of the state could not be recorded",
                changes=self.unrecorded,
                error=self.problem,
            )
        _in_use(self.path).unlink(missing_ok=True)
        self._close_database()

    def _close_database(self) -> None:
        self._is_closed = True
        self._db.close()

    # -- transactions

    def _begin(self) -> None:
        self._db.execute("BEGIN")
        self._open = True

    def _settle(self) -> bool:
        """End the transaction, with all that is late; False: it is (still) late."""
        if self.recording is Recording.LATE and (
            self._clock.now() < self._try_at or not self._replay()
        ):
            return False
        return self._end()

    def _end(self) -> bool:
        """End the transaction, if there is one; False: its changes are late."""
        if self._open and not self._is_trial:
            try:
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                self._fall_behind(error)
                return False
            self._open = False
            statements = self._statements
            self._statements = []
            self._joined = 0
            if self._follower is not None:
                self._follower(statements)
            if self.recording is not Recording.CURRENT:
                self._caught_up(len(statements))
        return True

    def _caught_up(self, changes: int) -> None:
        """A transaction has all that was late."""
        late_s = round(self._clock.wall() - self.late_since, 1)
        log.warning("the state in the RAM tier is written again", late_s=late_s, changes=changes)
        self.recording = Recording.CURRENT
        self.problem = ""
        waiting = self._recorded
        self._recorded = []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _roll_back(self) -> None:
        self._open = False
        with contextlib.suppress(
            sqlite3.Error
        ):  # SQLite ends the transaction by itself after some errors
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _fall_behind(self, error: sqlite3.Error) -> None:
        if self._is_trial or _is_bug(error):
            raise error
        self._roll_back()
        self.problem = str(error)
        self._try_at = 0.0 if self.space.give_way() else self._clock.now() + RETRY_S
        if self.recording is Recording.CURRENT:
            self.late_since = self._clock.wall()
            log.error(
                "the state in the RAM tier cannot be written; what applications change waits "
                "until it can",
                error=self.problem,
            )
        self.recording = Recording.LATE

    def _replay(self) -> bool:
        """Make all late changes again, in a transaction that the next `commit` ends."""
        try:
            if not self._open:
                self._begin()
            for sql, values, is_many in self._statements:
                if is_many:
                    self._db.executemany(sql, values)
                else:
                    self._db.execute(sql, storable(values))
        except sqlite3.Error as error:
            self._fall_behind(error)
            return False
        self.recording = Recording.REPLAYED
        return True


def _is_bug(error: sqlite3.Error) -> bool:
    """Whether the statement is wrong, and not the world: it would fail for ever."""
    return isinstance(
        error,
        (
            sqlite3.ProgrammingError,
            sqlite3.IntegrityError,
            sqlite3.InterfaceError,
            sqlite3.NotSupportedError,
        ),
    )
