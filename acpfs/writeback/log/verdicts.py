"""Why an operation is not carried out yet: what the order decides by is what `status` tells
people.
"""

from __future__ import annotations

import enum

from acpfs.writeback.log.stages import Aside


class Why(enum.Enum):
    """Verdicts, in words."""

    READY = "it is ready, and comes in its turn"
    UNDER_WAY = "it is being carried out"
    TENTATIVE = "its file was closed, but a copy of the descriptor may be open"
    UNSEALED = "some of its bytes are in RAM alone, until its file is closed"
    HALF = "it outgrew RAM, and its writer was killed: retry or discard"
    AGAIN = "it failed, and is tried again"
    OTHERS = "other nodes have not persisted what they closed before"
    BYTES = "its bytes are not all on the backing directory yet"
    WRITTEN = "a write to its file is under way, which a program holds up"
    REFUSED = "the backing directory refused it: retry or discard"
    MISSING = "a node that it waits for is missing"
    GUARDED = "a newer checkpoint is not persisted yet"
    TOUCHES_REFUSED = "it needs one that was refused or withheld"
    TOUCHES_HELD = "it needs one that is held"
    TOUCHES_PUT_OFF = "it needs a removal that waits for other nodes"
    DELETES_BEFORE_POINTER = "it deletes, and a pointer before it is withheld"
    DELETES_BEFORE_REFUSED = "it deletes, and what was refused may be what replaces that"
    NAMES_REFUSED = "it may name what was refused"
    NAMES_WITHHELD = "it may name what is withheld, or what a withheld pointer still names"
    NAMED = "a pointer names it on the backing directory, and the change of that is withheld"


OF_ASIDE = {
    Aside.PARKED: Why.REFUSED,
    Aside.WITHHELD: Why.MISSING,
    Aside.PUT_OFF: Why.OTHERS,
    Aside.GUARDED: Why.GUARDED,
}
"""One that is held has its own."""
