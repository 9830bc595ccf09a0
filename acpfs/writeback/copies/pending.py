"""Transactions that a journal has not got yet, and how long they are gathered: each time that it is
appended to costs its place the same, however little it is.

Used under the mirror's lock. Times are monotonic, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from acpfs.ram.state import Statement

LAZY_STATEMENTS = 20_000
"""A journal that is appended to when somebody waits for it is not behind by more than about so
many.
"""
PENDING_STATEMENTS_MAX = 500_000
"""About 200 MB: a disk that is so far behind is not going to catch up."""


class PendingTransactions:
    """Of the journal that is written now."""

    def __init__(self, now: Callable[[], float], gather_s: float) -> None:
        """`gather_s`: so long after the last time nothing is appended that nobody waits for."""
        self._now = now
        self._gather_s = gather_s
        self._until = 0.0
        self._batch: list[list[Statement]] = []
        self._statements = 0
        self.changes = 0
        """Of the state, up to the last transaction."""
        self._taken_changes = 0
        self.known_changes = 0
        """The same, as far as the journal has them."""

    def __len__(self) -> int:
        return len(self._batch)

    def begin(self, changes: int) -> None:
        """A journal begins, with so many changes of the state."""
        self.forget()
        self.changes = changes
        self._taken_changes = changes
        self.known_changes = changes

    def add(self, statements: list[Statement], changes: int) -> None:
        """Behind those that are pending. `changes`: of the state, with these."""
        self.changes = changes
        self._batch.append(statements)
        self._statements += len(statements)

    def take(self) -> list[list[Statement]]:
        """All of them, which are to be appended now."""
        batch = self._batch
        self.forget()
        self._taken_changes = self.changes
        return batch

    def forget(self) -> None:
        """The journal does not get them; what was taken may be on its way."""
        self._batch = []
        self._statements = 0

    def appended(self) -> None:
        """The journal has what was taken."""
        self._until = self._now() + self._gather_s
        self.known_changes = self._taken_changes

    def gathers_s(self, *, is_lazy: bool) -> float | None:
        """So long they may yet wait when nobody asks for them; None: until somebody does."""
        if not self._batch or (is_lazy and not self.are_many):
            return None
        return 0.0 if self.are_many else max(0.0, self._until - self._now())

    @property
    def are_many(self) -> bool:
        """More than a lazy journal lets wait."""
        return self._statements > LAZY_STATEMENTS

    @property
    def are_too_many(self) -> bool:
        """The place of the journal is too slow."""
        return self._statements > PENDING_STATEMENTS_MAX
