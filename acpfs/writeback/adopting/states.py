"""States of a log that another member may take over, and what follows from them.

Pure: tables and decisions, no call, no clock, nothing that is kept. `tests/adopting` walks through
every interleaving of origin, holders and a late storage with these very functions, so a change here
is proved or refused there. docs/internals/terms.md has the words and the argument.

`may_claim` and `may_claim_closed` are what `worker.adoption_watch` goes by, and `may_take_over`
what the mount that adopts does: `tests/adopting/alone.py` walks through what those do (S613). The
rest is of `tests/adopting/model.py` alone: the protocol that it walks through fences names, too,
and has notes where the product has the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class OriginState(Enum):
    """Of the member whose log it is."""

    LIVE = "live"
    ISOLATED = "isolated"
    """It could not renew its record in time: it begins no commit; closes and reads go on."""
    SUPERSEDED = "superseded"
    """Somebody else has claimed its log: it begins nothing, and calls no fsync copied."""


class OriginEvent(Enum):
    """What happens to it."""

    LEASE_RAN_OUT = "its record could not be renewed for the length of the lease"
    RENEWED = "its record is written, and no newer claim was listed after that"
    CLAIM_SEEN = "a newer claim is listed"
    STAGING_GONE = "a call says that its staging directory is gone"
    CLAIMED = "it has claimed the next term and fenced those before, as `may_return` allows"


ORIGIN: dict[tuple[OriginState, OriginEvent], OriginState] = {
    (OriginState.LIVE, OriginEvent.LEASE_RAN_OUT): OriginState.ISOLATED,
    (OriginState.LIVE, OriginEvent.RENEWED): OriginState.LIVE,
    (OriginState.LIVE, OriginEvent.CLAIM_SEEN): OriginState.SUPERSEDED,
    (OriginState.LIVE, OriginEvent.STAGING_GONE): OriginState.SUPERSEDED,
    (OriginState.ISOLATED, OriginEvent.LEASE_RAN_OUT): OriginState.ISOLATED,
    (OriginState.ISOLATED, OriginEvent.RENEWED): OriginState.LIVE,
    (OriginState.ISOLATED, OriginEvent.CLAIM_SEEN): OriginState.SUPERSEDED,
    (OriginState.ISOLATED, OriginEvent.STAGING_GONE): OriginState.SUPERSEDED,
    (OriginState.SUPERSEDED, OriginEvent.LEASE_RAN_OUT): OriginState.SUPERSEDED,
    (OriginState.SUPERSEDED, OriginEvent.CLAIM_SEEN): OriginState.SUPERSEDED,
    (OriginState.SUPERSEDED, OriginEvent.STAGING_GONE): OriginState.SUPERSEDED,
    (OriginState.SUPERSEDED, OriginEvent.CLAIMED): OriginState.LIVE,
}
"""What is not in it cannot happen: one that is superseded renews nothing."""


class HolderState(Enum):
    """Of a member that keeps a copy of the origin's log and bytes."""

    NONE = "none"
    SEEDING = "seeding"
    HOLDING = "holding"
    STALE = "stale"
    """The origin has another holder, or somebody a newer claim: what it has counts no more."""
    CLAIMED = "claimed"
    DRAINING = "draining"
    DONE = "done"


class HolderEvent(Enum):
    """What happens to it."""

    ASKED = "an origin asks it to hold a copy"
    SEEDED = "the whole seed is there"
    REPLACED = "the origin has taken another holder"
    CLAIMED = "its claim is the newest one"
    READY = "all earlier terms are fenced, and then the notes were read"
    SUPERSEDED = "a newer claim is listed, or its own staging directory is gone"
    EMPTY = "every operation up to the cut is done, and the record says so"
    DROPPED = "what it has is removed"


HOLDER: dict[tuple[HolderState, HolderEvent], HolderState] = {
    (HolderState.NONE, HolderEvent.ASKED): HolderState.SEEDING,
    (HolderState.SEEDING, HolderEvent.SEEDED): HolderState.HOLDING,
    (HolderState.SEEDING, HolderEvent.REPLACED): HolderState.STALE,
    (HolderState.HOLDING, HolderEvent.REPLACED): HolderState.STALE,
    (HolderState.HOLDING, HolderEvent.CLAIMED): HolderState.CLAIMED,
    (HolderState.CLAIMED, HolderEvent.READY): HolderState.DRAINING,
    (HolderState.CLAIMED, HolderEvent.SUPERSEDED): HolderState.STALE,
    (HolderState.DRAINING, HolderEvent.SUPERSEDED): HolderState.STALE,
    (HolderState.DRAINING, HolderEvent.EMPTY): HolderState.DONE,
    (HolderState.STALE, HolderEvent.DROPPED): HolderState.NONE,
    (HolderState.DONE, HolderEvent.DROPPED): HolderState.NONE,
}
"""What is not in it cannot happen. Only who has a whole copy claims: half a seed has no cut."""

TAKES_BYTES = {HolderState.SEEDING, HolderState.HOLDING}
"""From its claim on a holder takes nothing of the origin: that would be called copied, and the
adopter's cut is fixed.
"""


def origin_after(state: OriginState, event: OriginEvent) -> OriginState:
    """KeyError: that cannot happen."""
    return ORIGIN[state, event]


def holder_after(state: HolderState, event: HolderEvent) -> HolderState:
    """KeyError: that cannot happen."""
    return HOLDER[state, event]


# -- the origin


class HolderKnows(NamedTuple):
    """What a holder knows. Operations are numbered from 0 in the order of the log."""

    told: int
    """It knows all operations before this one as they were carried out."""
    has: int
    """It has all operations before this one, and their bytes."""


class Turn(Enum):
    """Of an operation whose turn it is."""

    BEGIN = "begin"
    TELL = "tell the holders first, or write the note where one does not answer"
    WAIT = "begin nothing"


def turn(state: OriginState, op: int, copies: Iterable[HolderKnows], noted: int) -> Turn:
    """May the origin begin operation `op`, all before it being done?

    Each holder knows by then what was done and has what comes, or the note on the storage (`noted`:
    operations before it are done) says so for those that do not.
    """
    if state is not OriginState.LIVE:
        return Turn.WAIT
    if noted >= op or all(copy.told >= op and copy.has > op for copy in copies):
        return Turn.BEGIN
    return Turn.TELL


def may_return(*, has_left: bool, claimers_silent: bool) -> bool:
    """May an origin that is superseded claim its own log?

    When who adopted it is done (`has_left`: the record says so), or all who claimed it are silent,
    too. Where nobody has a newer claim (a person removed the directory), nobody is left to wait
    for.
    """
    return has_left or claimers_silent


def done_by(own: int, notes: Iterable[int]) -> int:
    """Operations before this one are done; whatever knows of most is right, as all only grow.

    `own`: by the journal, or by the origin's own log. To be read when earlier terms are fenced:
    nothing is done in them any more.
    """
    return max([own, *notes])


def looks_first(*, of_earlier_term: bool) -> bool:
    """What was logged in an earlier term may have been begun there: it is looked at before it is
    carried out.
    """
    return of_earlier_term


# -- holders


def may_claim(state: HolderState, *, silent: bool, answers: bool, has_left: bool) -> bool:
    """May a holder claim the log?

    `silent`: the origin's record did not change for the member time-out, and its own is fresh;
    `answers`: the origin does when it is asked directly; `has_left`: it was unmounted, or has
    ended, whether something is left or not: its RAM tier is there, and it may come back.
    """
    return state is HolderState.HOLDING and silent and not answers and not has_left


def may_claim_closed(*, is_mark_same: bool, why: str) -> bool:
    """May a holder that takes nothing more claim the log, or has it to open the session again?

    `is_mark_same`: as before it was closed; `why`: not, by its journal.
    """
    return is_mark_same and not why


def may_take_over(me: str, claimed_by: str, marked: str, *, alone: bool) -> bool:
    """May an adopter claim the next term, or go on with its claim? `claimed_by`: who has the newest
    one; `marked`: whose copies count; "": nobody, or nobody that is named; `alone`: nobody says
    that the node is off.

    A claim of somebody else does not keep out whom the mark names: who has made it reads the mark
    after its fence, and drains nothing then. A node that may live is shut out by nobody else.
    """
    return me in (claimed_by, marked) or (not claimed_by and not alone)


class Adoption(NamedTuple):
    """How far an adopter is."""

    state: HolderState
    fenced: bool
    done: int | None
    """Operations before this one are done; None: the notes were not read."""
    cut: int
    """It has all operations before this one, and their bytes."""
    noted: int
    """So many are done, by the adopter's note."""
    looked: bool
    """At what is there of operation `done`, which has to be carried out."""


class AdopterStep(Enum):
    """What an adopter does next."""

    FENCE = "fence"
    READ_NOTES = "read the notes of all terms"
    NOTE = "write its own note"
    LOOK = "look whether the operation was carried out"
    ACT = "carry it out"
    FINISH = "have the record say that the log is done"
    STOP = "nothing"


def adopter_step(adoption: Adoption) -> AdopterStep:
    """Claim, fence, read, and then for each operation: note, look, act."""
    if adoption.state not in (HolderState.CLAIMED, HolderState.DRAINING):
        return AdopterStep.STOP
    if not adoption.fenced:
        return AdopterStep.FENCE
    if adoption.done is None:
        return AdopterStep.READ_NOTES
    if adoption.done >= adoption.cut:
        return AdopterStep.FINISH
    if adoption.noted < adoption.done:
        return AdopterStep.NOTE
    if not adoption.looked and looks_first(of_earlier_term=True):
        return AdopterStep.LOOK
    return AdopterStep.ACT


def passes(closed_after: int, cut: int) -> bool:
    """May a pointer pass that was closed on another member when this one had closed so many
    operations? Only where what it may name was in the copy.
    """
    return cut >= closed_after


# -- the lease


def is_isolated(now: float, renewed: float, lease: float) -> bool:
    """`renewed`: as `renewed_at` says, by the same clock as `now`, CLOCK_BOOTTIME."""
    return now - renewed >= lease


def renewed_at(began: float, answered: float) -> float:
    """From when on a record that was written counts: others may have seen it as soon as the call
    began, and the answer may have been late.
    """
    return min(began, answered)


def is_silent(unchanged: float, timeout: float) -> bool:
    """`unchanged`: so long the record was seen to be the same, by the holder's clock."""
    return unchanged > timeout


def fits(lease: float, timeout: float, drift: float) -> bool:
    """Whether an origin has stopped before anybody may call it silent; `drift`: what two clocks may
    run apart in `timeout`.
    """
    return timeout >= lease + drift
