"""Which journal of this node counts, as this worker knows: what its mark on the backing directory
says, and whether that is known yet.

Every call may hang with the backing directory, and is made by one thread at a time.
"""

from __future__ import annotations

import contextlib
import enum
import json

from acpfs.backing.lower import Lower
from acpfs.writeback.copies.journal_marks import mark_path, put, withdraw
from acpfs.writeback.copies.journal_place import JournalPlace


class Named(enum.Enum):
    """By the mark."""

    UNKNOWN = "nobody has looked yet: an earlier worker's journal may count"
    EARLIER = "a journal of an earlier worker counts"
    OURS = "one that this worker began counts"
    NONE = "none counts"


class CountingMark:
    """Looks at the mark when it has to, and changes it."""

    def __init__(self, lower: Lower, node_id: str, place: JournalPlace) -> None:
        self._lower = lower
        self._path = mark_path(node_id)
        self._place = place
        self._named = Named.UNKNOWN
        self._token = ""

    @property
    def may_name_one(self) -> bool:
        """Whether some journal may count: what it names must not be spoilt."""
        return self._named is not Named.NONE

    @property
    def token(self) -> str:
        """Of the journal that this worker began, and that counts; "": none of its own does."""
        return self._token

    def learn(self) -> None:
        """What an earlier worker left, at the first call.

        Raises:
            OSError: the backing directory's.
        """
        if self._named is Named.UNKNOWN:
            self._named = Named.EARLIER if self._place.learn() else Named.NONE

    def put(self, token: str) -> None:
        """That journal counts from now on.

        Raises:
            OSError: the backing directory's; then what counted before may count still.
        """
        content = {"token": token, **self._place.described(token)}
        put(self._lower, self._path, json.dumps(content).encode() + b"\n")
        self._token = token
        self._named = Named.OURS
        self._place.marked(token)

    def withdraw(self) -> bool:
        """None counts any more; whether that is new.

        Raises:
            OSError: the backing directory's.
        """
        if not self.may_name_one:
            return False
        withdraw(self._lower, self._path)
        self._token = ""
        self._named = Named.NONE
        self._place.withdrawn()
        return True

    def remove(self) -> None:
        """The mount has ended, with nothing left: not even a mark is.

        Raises:
            OSError: the backing directory's.
        """
        withdraw(self._lower, self._path)
        with contextlib.suppress(FileNotFoundError):
            self._lower.remove_own(self._path)
