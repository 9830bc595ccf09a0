"""What is known about the names in one directory: what an earlier look at the backing directory, or
the log, says of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from acpfs.backing.lower import LowerEntry
from acpfs.types import Ino


class Inquiry(NamedTuple):
    """When the lower layer was asked something."""

    at: float
    """Monotonic time, seconds: how old the answer is."""
    serial: int
    """What has a smaller one came before (`Clock.serial`): a clock may stand still meanwhile."""


@dataclass(slots=True)
class KnownName:
    """What is known about one name in a directory."""

    ino: Ino
    """0: known to be absent."""
    pins: int = 0
    """Operations in the log that mention the name, plus one while its node was never logged.

    Pinned: the lower layer is not asked.
    """
    checked_at: float = 0.0
    """Monotonic time, seconds, when the lower layer last said so."""
    checked: int = 0
    """Serial of that: who asked before knows less."""
    settled: int = 0
    """Serial of when an operation on the name last left the log:

    what the lower layer was asked before says nothing.
    """
    recorded: bool = False
    """Whether it has a row."""


class Unread(Protocol):
    """A listing that an earlier worker left, and that nobody has asked for yet."""

    def read(self) -> dict[bytes, LowerEntry]:
        """Take it apart."""


@dataclass(slots=True)
class Directory:
    """What a directory node knows about its names."""

    children: dict[bytes, KnownName] = field(default_factory=dict)
    _listing: dict[bytes, LowerEntry] = field(default_factory=dict)
    _unread: Unread | None = None
    """In place of `_listing`."""
    listed_at: float = -1.0
    """Monotonic time, seconds; negative: never; 0: by an earlier worker."""
    listed: int = 0
    """Serial of that question; 0 where there was none."""
    listed_ahead: bool = False
    """The listing was made before anybody asked for it: to go on with when there is no answer, not
    in place of one.
    """
    listing_s: float = 0.0
    """How long the backing directory took for the last listing."""
    misses: int = 0
    """How often it was asked about a name that was not known, since `misses_since` (monotonic,
    seconds).
    """
    misses_since: float = 0.0
    absent: dict[bytes, None] = field(default_factory=dict)
    """Names that came to be known as absent, the oldest first, and perhaps are not any more; see
    `NodeTable.known_absent`.
    """
    notes: int = 0
    """How often `note` changed the listing: a listing that was asked for before is overtaken."""

    @property
    def listing(self) -> dict[bytes, LowerEntry]:
        """All names on the backing directory as of `listed_at`."""
        if self._unread is not None:
            self._listing = self._unread.read()
            self._unread = None
        return self._listing

    @listing.setter
    def listing(self, listing: dict[bytes, LowerEntry]) -> None:
        self._listing = listing
        self._unread = None

    def was_listed(self, listing: Unread) -> None:
        """By an earlier worker; a takeover does not wait for what nobody asks."""
        self._unread = listing
        self.listed_at = 0.0
        self.listed_ahead = True
        self.listed = 0

    def knows(self, name: bytes) -> bool:
        """Whether there is something to go on with when the backing directory does not answer: the
        node, or that there is none.

        A listing says of a name that it is there, not what it is: the answer to that can only be
        waited for.
        """
        child = self.children.get(name)
        if child is not None and (child.ino or child.pins):
            return True
        if name in self.listing:
            return child is not None and child.checked >= self.listed
        return child is not None or self.listed_at >= 0

    def note(self, name: bytes, entry: LowerEntry | None) -> None:
        """A name is about to be forgotten: the listing, which may be older, takes over what was
        known of it; None: that it is not there.
        """
        self.notes += 1
        if entry is None:
            self.listing.pop(name, None)
        else:
            self.listing[name] = entry
