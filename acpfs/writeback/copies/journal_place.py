"""Where a journal is kept: what the mirror asks of a disk, or of whoever else keeps it.

All calls may hang with that, and are made in the journal's own thread, but for `site`, `described`,
`marked` and `withdrawn`, which do not wait; `learn` and `goes_elsewhere` are the commit thread's,
too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Protocol

from acpfs.ram.state import Statement


class Journal(Protocol):
    """One that was begun."""

    is_lazy: bool
    """It is appended to when somebody waits for it, not at once."""

    @property
    def is_long(self) -> bool:
        """It takes much more room than one that is begun anew would."""
        ...

    def append(self, batch: Sequence[Sequence[Statement]]) -> None:
        """Transactions, in order; they are safe there when it returns.

        Raises:
            OSError: they may be there, or not; nothing more is to be appended.
        """
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class JournalSite(Protocol):
    """Where one is begun; another site is another object."""

    has_copies: bool
    """Whether the copies that are made now are those that a journal there goes with."""

    def begin(self, token: str, snapshot: sqlite3.Connection) -> Journal:
        """A journal that has this state, safely, when it returns. Closes `snapshot`.

        Raises:
            OSError, sqlite3.Error: it could not be made.
        """
        ...


class JournalPlace(Protocol):
    """Journals by their tokens, of which the mark on the backing directory names one."""

    @property
    def counts_at(self) -> str:
        """The member whose copies count, by the mark; "": none, or no member."""
        ...

    @property
    def site(self) -> JournalSite | None:
        """Where a journal is to be now; None: nowhere. Under the file system's lock."""
        ...

    def learn(self) -> bool:
        """What the mark says that there is, at the first call; whether a journal counts by it.

        Raises:
            OSError: the backing directory's.
        """
        ...

    def goes_elsewhere(self, failed: JournalSite | None) -> bool:
        """The journal failed, and what counts is needed: whether one is to be begun at another site
        from now on, with the same copies.
        """
        ...

    def marked(self, token: str) -> None:
        """The mark names that journal."""
        ...

    def withdrawn(self) -> None:
        """The mark names none."""
        ...

    def tokens(self) -> list[str]:
        """Of all journals that are there, whole or not."""
        ...

    def remove(self, token: str) -> None:
        """A journal that counts no more, and that nobody appends to."""
        ...

    def described(self, token: str) -> dict[str, str]:
        """For the mark: where the next mount finds it."""
        ...
