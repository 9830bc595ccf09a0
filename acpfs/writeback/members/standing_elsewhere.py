"""What other members' pointers on the backing directory name as long as these members withhold the
change of them.

Each member tells in its record which pointer files it is to change. What these say lies on the
backing directory, where every member reads it: once per look, while something waits that takes a
name away. Used under the file system's lock, but for `read`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from acpfs.backing.lower import LowerPath
from acpfs.backing.member_records import ANYTHING
from acpfs.writeback.log.log import REMOVING
from acpfs.writeback.members import naming
from acpfs.writeback.members.gate import Gate, Gated
from acpfs.writeback.members.peers import Peer, Terms

Texts = Callable[[Iterable[LowerPath]], Mapping[LowerPath, bytes | None]]
"""See `order.standing_pointers.StandingPointers.texts`. Blocks."""


class StandingElsewhere:
    """Knows what they said at the last look."""

    def __init__(self, gate: Gate, texts: Texts) -> None:
        self._gate = gate
        self._texts = texts
        self._said: Mapping[LowerPath, bytes | None] = {}

    def wanted(self, gated: Iterable[Gated], peers: Iterable[Peer], terms: Terms) -> set[LowerPath]:
        """Pointers of which it matters what they say."""
        taking = [one for one in gated if self._gate.taken(one)]
        return {
            _path_of(told)
            for peer in peers
            for one in taking
            for told in self._told(peer, one, terms)
            if told != ANYTHING
        }

    def read(self, wanted: set[LowerPath]) -> Mapping[LowerPath, bytes | None]:
        """On a thread."""
        return self._texts(wanted)

    def said(self, found: Mapping[LowerPath, bytes | None]) -> None:
        """What was read; what was not is not known any more."""
        self._said = found

    def name(self, peer: Peer, one: Gated, terms: Terms) -> bool:
        """Whether one that this member is to change names what the operation takes the name of."""
        taken = self._gate.taken(one)
        if not taken:
            return False
        paths = [tuple(path.split(b"/")) for path in taken]
        removes = one.op.kind in REMOVING
        return any(
            told == ANYTHING or self._names(_path_of(told), path, removes=removes)
            for told in self._told(peer, one, terms)
            for path in paths
        )

    def _told(self, peer: Peer, one: Gated, terms: Terms) -> Iterator[str]:
        return peer.to_change(one.op.logged_at, terms, makes_room=one.makes_room)

    def _names(self, pointer: LowerPath, taken: LowerPath, *, removes: bool) -> bool:
        if pointer not in self._said:
            return True  # until it is read
        text = self._said[pointer]
        if text is None:
            return (naming.lies_beside if removes else naming.are_near)(pointer, taken)
        return naming.leads_to(text, pointer, taken, naming.mentions, parts=removes)


def _path_of(told: str) -> LowerPath:
    return tuple(os.fsencode(told).split(b"/"))
