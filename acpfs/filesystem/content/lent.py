"""Tier files of which bytes are given to other members just now.

Owns the one question that counts when they have arrived there: whether those bytes could have
changed since they were lent. Whoever may change a tier file's bytes, or lets them go, says so here
before. Used under the file system's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.types import TierId

Identity = tuple[int, int, int, int]


@dataclass(slots=True, eq=False)
class LentBytes:
    """Bytes of one tier file."""

    tier_id: TierId
    is_same: bool = True
    """Nobody could change them since."""


class Lent:
    """All of them."""

    def __init__(self) -> None:
        self._out: dict[TierId, set[LentBytes]] = {}
        self._quiet: set[TierId] = set()
        """Nobody has these open to write, or mapped so: it was looked at once, and nobody could
        begin to since.
        """

        self._stored: dict[TierId, Identity] = {}
        """What the backing directory's entry looked like when these bytes were stored as it, or
        read from it.
        """

    def vouch(self, tier_id: TierId, identity: Identity) -> None:
        """These bytes are what lies on the backing directory and looks like that."""
        self._stored[tier_id] = identity

    def is_vouched(self, tier_id: TierId, identity: Identity) -> bool:
        """Whether that is so for an entry that looks like this.

        A new name or mode changes the ctime alone. Where anything else is another, somebody may
        have put his own there before we looked at what we had changed.
        """
        stored = self._stored.get(tier_id)
        return stored is not None and stored[:3] == identity[:3]

    def found_quiet(self, tier_id: TierId) -> None:
        """Nobody can write to it now, but who opens the file anew."""
        self._quiet.add(tier_id)

    def is_quiet(self, tier_id: TierId) -> bool:
        """Whether that was found, and is so still."""
        return tier_id in self._quiet

    def begin(self, tier_id: TierId) -> LentBytes:
        """Bytes that do not change now."""
        lent = LentBytes(tier_id)
        self._out.setdefault(tier_id, set()).add(lent)
        return lent

    def spoil(self, tier_id: TierId) -> None:
        """They may change from now on, or be gone."""
        self._quiet.discard(tier_id)
        self._stored.pop(tier_id, None)
        if self._out:  # nearly never
            for lent in self._out.pop(tier_id, ()):
                lent.is_same = False

    def end(self, lent: LentBytes) -> bool:
        """Whether they are what they were all the time."""
        out = self._out.get(lent.tier_id)
        if out is not None:
            out.discard(lent)
            if not out:
                del self._out[lent.tier_id]
        return lent.is_same
