"""State database: what must survive the worker process, in SQLite on the RAM tier's tmpfs.

The tmpfs outlives processes and not nodes, exactly like the bytes that the database describes, so there is nothing to
flush (synchronous=off). A transaction is opened by the first change of a step and committed by `commit`, before the step's
result leaves the file system's lock; one step costs about 13 µs for three changes (measured, Linux 6.18, 2 cores).

Each layer creates and reads its own tables. Not thread-safe: used under the file system's lock.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from acpfs.errors import RefusedError

STATE_VERSION = 1
"""Format of all tables together. A worker refuses a state that is newer than itself."""

Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Any], bool]
"""A change: SQL, values, and whether these are those of many rows."""

INTEGER_MAX = (1 << 63) - 1
"""Largest number that SQLite takes."""


def storable(values: Sequence[Any]) -> Sequence[Any]:
    """The same values, numbers beyond 64 bits as their decimal digits in bytes; `int` reads both.

    A time after 2262 in nanoseconds is such a number, and so are inode numbers of some network file systems: nothing that the backing
    directory can say may be refused here. Bytes, because a column of integers turns digits in text into a rounded number.
    """
    return [b"%d" % value if isinstance(value, int) and not -INTEGER_MAX <= value <= INTEGER_MAX else value for value in values]


class StateDatabase:
    """Owner of the connection and of the transaction."""

    def __init__(self, path: Path) -> None:
        """Open or create the database at `path` (mode 0600).

        Raises:
            RefusedError: the state was written by a newer acpfs.
        """
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.close(fd)
        # Without SQLite's locks: a killed worker whose thread never comes back from the backing directory keeps them for as long. Whoever
        # opens the database holds the tier's lock, and the supervisor has one worker at a time.
        self._db = sqlite3.connect(
            f"{path.as_uri()}?vfs=unix-none", uri=True, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # first of all: the index of the WAL is then in memory, not in a shared file
        self._db.execute("PRAGMA page_size=1024")  # a step writes few rows, and whole pages: 20 % less than with 4096
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._open = False
        self._writers: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        self._follower: Callable[[list[Statement]], None] | None = None
        self._statements: list[Statement] = []
        self._check_version()

    def follow(self, follower: Callable[[list[Statement]], None]) -> sqlite3.Connection:
        """Have `follower` called with the changes of each transaction from now on, after its end; returns a copy of the state as it is now.

        All tables must have been created. The copy may be used in another thread.
        """
        self.commit()
        self._follower, self._statements = follower, []
        copy = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.backup(copy)
        return copy

    def _check_version(self) -> None:
        found: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found > STATE_VERSION:
            raise RefusedError(
                f"the state in {self.path} has version {found}, this acpfs knows {STATE_VERSION}: drain it with the newer acpfs"
            )
        self._db.execute(f"PRAGMA user_version={STATE_VERSION}")

    def create(self, ddl: str) -> None:
        """Run `CREATE TABLE IF NOT EXISTS …` statements of a layer.

        Ends the transaction, as `executescript` does by itself: an earlier layer may have changed rows as it read them.
        """
        self._db.executescript(ddl)
        self._open = False

    def change(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Run one INSERT, UPDATE or DELETE inside the step's transaction."""
        if not self._open:
            self._db.execute("BEGIN")
            self._open = True
        try:
            self._db.execute(sql, values)
        except OverflowError:  # asked for only here: the look at each value costs as much as the statement
            values = storable(values)
            self._db.execute(sql, values)
        if self._follower is not None:
            self._statements.append((sql, values, False))

    def change_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """`change` for many rows."""
        if not self._open:
            self._db.execute("BEGIN")
            self._open = True
        rows = [storable(row) for row in rows]
        if self._follower is not None:
            self._statements.append((sql, rows, True))
        self._db.executemany(sql, rows)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """All rows of a query; sees the step's own changes."""
        return self._db.execute(sql, values).fetchall()

    def before_commit(self, write: Callable[[], None]) -> None:
        """Have `write` called at each commit: it brings the rows of what a layer has changed in memory since the last one."""
        self._writers.append(write)

    def after_commit(self, action: Callable[[], None]) -> None:
        """Have `action` called once, after the next commit: what takes away something that the state of before it still needs."""
        self._after.append(action)

    def commit(self) -> None:
        """End the step's transaction, if it changed anything."""
        for write in self._writers:
            write()
        if self._open:
            self._db.execute("COMMIT")
            self._open = False
            if self._follower is not None:
                statements, self._statements = self._statements, []
                self._follower(statements)
        if self._after:
            actions, self._after = self._after, []
            for action in actions:
                action()

    def close(self) -> None:
        """Commit and close."""
        self.commit()
        self._db.close()
