"""Where a journal is kept: what the mirror asks of a disk, or of whoever else keeps it.

All calls may hang with that, and are made in the journal's own thread, but for `described` and
`is_ready`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Protocol

from acpfs.ram.state import Statement


class Journal(Protocol):
    """One that was begun."""

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


class JournalPlace(Protocol):
    """Journals by their tokens, of which the mark on the backing directory names one."""

    @property
    def is_ready(self) -> bool:
        """Whether one can be begun there now; does not wait."""
        ...

    def begin(self, token: str, snapshot: sqlite3.Connection) -> Journal:
        """A journal that has this state, safely, when it returns. Closes `snapshot`.

        Raises:
            OSError, sqlite3.Error: it could not be made.
        """
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
