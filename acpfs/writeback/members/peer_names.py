"""What other members have made and not persisted, by their records, and who waits here for one of
these names.

Learns from each record that `acpfs.writeback.members.cluster` reads; decides nothing about names. A
live node's record says which names are pending there (`backing.name_filter`); one without that, of
an older acpfs, says nothing. Used under the file system's lock, but for `tell`, and futures that
are told at the end of a wait, on the thread that ends patience: so a wait ends also while the
backing directory hangs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

from acpfs.backing.member_records import NodeState
from acpfs.backing.name_filter import NameFilter
from acpfs.config import Settings
from acpfs.runtime.clock import Clock
from acpfs.writeback.members.peers import Peer, Terms

Place = tuple[bytes, bytes]
"""Directory, by its path below the backing directory, and name in it."""


class Pending(NamedTuple):
    """What this node has made and not persisted."""

    paths: list[bytes]
    of_directories: bool
    """Whether these are directories in which there is such a thing, because there is too much of
    it.
    """

    def to_text(self, seed: int) -> str:
        """For a node record."""
        names = NameFilter.of(self.paths, seed, of_directories=self.of_directories)
        return "" if names is None else names.to_text()


NOTHING = Pending([], of_directories=False)

WAITING_MAX = 128
"""Lookups that may wait at the same time: with libfuse each keeps one of its 256 tasks.

Others get their answer at once.
"""


class PeerNames:
    """Names that are to appear, and who waits for them."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._monotonic = clock.now
        self._filters: dict[str, NameFilter] = {}
        """Of the live nodes that have something pending."""
        self.known = True
        """Whether all records were read once.

        Until then any name may be pending: a lookup that waited in the last worker comes again.
        """
        self.others = False
        """Whether other members live, as far as is known: then a name that is not there may come at
        any time.
        """
        self.anybody = False
        """Whether other members have a record, as far as is known: pointers may wait for them."""
        self._until: dict[Place, float] = {}
        """Names that were waited for → monotonic, seconds: when that ends, or has ended."""
        self._awaited: list[Place] = []
        self._bells: dict[Future[None], Callable[[], None]] = {}
        self.waits = 0
        """Lookups that had to wait."""
        self.waits_in_vain = 0

    # -- what is known

    def learn(self, node: str, peer: Peer | None, terms: Terms) -> None:
        """A node's record was looked for; None: there is none any more."""
        self._filters.pop(node, None)
        record = peer.record if peer is not None else None
        if (
            peer is None
            or record is None
            or record.state is not NodeState.LIVE
            or peer.is_missing(terms)
        ):
            return
        names = NameFilter.from_text(record.pending)
        if names is not None:
            self._filters[node] = names

    def may_come(self, directory: bytes, name: bytes) -> bool:
        """Whether some live node may have the name, and not have persisted it."""
        return not self.known or any(
            names.may_have(directory, name) for names in self._filters.values()
        )

    def sources(self) -> list[str]:
        """Nodes that may have what somebody waits for."""
        return [
            node
            for node, names in self._filters.items()
            if any(names.may_have(*place) for place in self._awaited)
        ]

    # -- waiting

    @property
    def waiting(self) -> int:
        """How many lookups wait."""
        return len(self._awaited)

    @property
    def awaited(self) -> list[bytes]:
        """Paths that are waited for."""
        return sorted({b"/".join(filter(None, place)) for place in self._awaited})

    def begin(self, place: Place) -> float | None:
        """Somebody waits for a name; monotonic, seconds: until when at most.

        None: there are too many. `end` has to follow.

        Who looks a name up while another one does has to wait for that one in the kernel, and asks
        after it. So the time begins with the first; and a name that was waited for in vain is not
        waited for again for as long.
        """
        if len(self._awaited) >= WAITING_MAX:
            return None
        now = self._monotonic()
        patience_s = self._settings.wait_for_peers_s
        self._until = {
            place: until for place, until in self._until.items() if now < until + patience_s
        }
        self._awaited.append(place)
        return self._until.setdefault(place, now + patience_s)

    def is_over(self, until: float) -> bool:
        """Whether the time has come."""
        return self._monotonic() >= until

    def end(self, place: Place, *, waited: bool, found: bool) -> None:
        """It waits no more."""
        self._awaited.remove(place)
        self.waits += waited
        self.waits_in_vain += waited and not found
        if self._monotonic() < self._until.get(place, 0.0):
            # it is there, nobody has it any more, or who asked was killed: that says nothing of the
            # next one
            del self._until[place]

    def news(self, until: float) -> Future[None]:
        """Done when records have been read, or at a time (monotonic, seconds).

        Of its own for each who waits, so that one may cancel it.
        """
        bell: Future[None] = Future()
        self._bells[bell] = self._clock.call_later(
            max(0.0, until - self._monotonic()), lambda: self._ring(bell)
        )
        return bell

    def tell(self) -> None:
        """Wake all who wait. Without the lock: they may go on in this thread."""
        for bell in list(self._bells):
            self._ring(bell)

    def _ring(self, bell: Future[None]) -> None:
        stop = self._bells.pop(bell, None)
        if stop is not None:
            stop()
        with contextlib.suppress(InvalidStateError):  # it was rung before, or who waited was killed
            bell.set_result(None)
