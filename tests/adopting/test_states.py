"""What is decided about a log that may be taken over, and the proof of it (`model`, `lease`)."""

from __future__ import annotations

from typing import Any

import pytest

from acpfs.writeback.adopting import states
from acpfs.writeback.adopting.states import (
    HOLDER,
    ORIGIN,
    HolderEvent,
    HolderState,
    OriginEvent,
    OriginState,
)
from tests.adopting.lease import Times
from tests.adopting.model import RENAME, STORE, UNLINK, WRONG, World, walk

PAIRS = ((STORE, RENAME), (RENAME, UNLINK), (STORE, UNLINK))
"""Some seconds each; all four operations take minutes."""


@pytest.mark.slow
@pytest.mark.parametrize("ops", PAIRS)
def test_nothing_older_nothing_twice_and_what_was_copied_can_always_come(
    ops: tuple[int, ...],
) -> None:
    found = walk(World(ops=ops))
    assert (found.wrong, found.path) == ("", ())
    assert found.states > 30_000


@pytest.mark.long
def test_the_same_of_all_operations() -> None:
    found = walk(World())
    assert (found.wrong, found.path) == ("", ())
    assert found.states > 1_200_000


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_variant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = WRONG[name]
    for decision, wrong in variant.decisions.items():
        monkeypatch.setattr(states, decision, wrong)
    found = walk(World(ops=variant.ops, wrong=frozenset({variant.world})))
    assert found.wrong
    assert not found.wrong.startswith("what cannot happen")


WALKED_ORIGIN = {
    (OriginState.LIVE, OriginEvent.CLAIM_SEEN),
    (OriginState.LIVE, OriginEvent.STAGING_GONE),
    (OriginState.SUPERSEDED, OriginEvent.CLAIMED),
}
WALKED_HOLDER = {
    (HolderState.HOLDING, HolderEvent.CLAIMED),
    (HolderState.CLAIMED, HolderEvent.READY),
    (HolderState.DRAINING, HolderEvent.SUPERSEDED),
    (HolderState.DRAINING, HolderEvent.EMPTY),
}
"""Rows that the model goes by; the others are of the lease, and of how a copy begins and ends."""
WALKED_LEASE = {
    (OriginState.LIVE, OriginEvent.LEASE_RAN_OUT),
    (OriginState.LIVE, OriginEvent.RENEWED),
    (OriginState.ISOLATED, OriginEvent.RENEWED),
}


@pytest.mark.parametrize("row", sorted(WALKED_ORIGIN | WALKED_HOLDER, key=str))
def test_a_row_that_is_missing_is_found(
    row: tuple[OriginState, OriginEvent] | tuple[HolderState, HolderEvent],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table: dict[Any, Any] = ORIGIN | HOLDER
    name = "ORIGIN" if row in ORIGIN else "HOLDER"
    monkeypatch.setattr(states, name, {key: table[key] for key in table if key != row})
    found = walk(World(ops=(STORE,)))
    assert found.wrong.startswith("what cannot happen")
    assert str(row[1]) in found.wrong


def test_a_row_that_leads_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """To where what was promised can come no more."""
    for state, event, wrong in (
        (HolderState.HOLDING, HolderEvent.CLAIMED, HolderState.HOLDING),
        (HolderState.CLAIMED, HolderEvent.READY, HolderState.DONE),
    ):
        with monkeypatch.context() as changed:
            changed.setitem(HOLDER, (state, event), wrong)
            assert walk(World(ops=(STORE,))).wrong == "what was promised can come no more"
    row = (OriginState.SUPERSEDED, OriginEvent.CLAIMED)
    monkeypatch.setitem(ORIGIN, row, OriginState.SUPERSEDED)
    assert walk(World(ops=(STORE,))).wrong == "what was promised can come no more"


def test_who_is_superseded_or_isolated_begins_nothing_and_knows_no_way_back_by_itself() -> None:
    for state in (OriginState.ISOLATED, OriginState.SUPERSEDED):
        assert states.turn(state, 0, (), 0) is states.Turn.WAIT
    ways_back = {row for row, state in ORIGIN.items() if state is OriginState.LIVE}
    assert ways_back == {
        (OriginState.LIVE, OriginEvent.RENEWED),
        (OriginState.ISOLATED, OriginEvent.RENEWED),
        (OriginState.SUPERSEDED, OriginEvent.CLAIMED),
    }
    assert {state for state, _event in HOLDER} == set(HolderState)


@pytest.mark.parametrize(
    ("times", "moments"),
    [(Times(6, 8, 2), 24_650), (Times(6, 12, 4), 55_064), (Times(10, 15, 5), 153_366)],
)
def test_nobody_claims_the_log_of_who_begins_commits(times: Times, moments: int) -> None:
    """The figures are those of the design: the same was walked through there."""
    assert states.fits(times.lease, times.timeout, times.drift)
    assert times.walk() == (moments, None)


@pytest.mark.parametrize(
    ("times", "decisions"),
    [
        (Times(6, 7, 2), {}),
        (Times(6, 8, 2), {"is_isolated": lambda _now, _renewed, _lease: False}),
        (Times(6, 8, 2), {"renewed_at": max}),
    ],
    ids=["too short a time-out", "no lease", "counted from the answer"],
)
def test_a_wrong_lease_is_found(
    times: Times, decisions: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for decision, wrong in decisions.items():
        monkeypatch.setattr(states, decision, wrong)
    _moments, found = times.walk()
    assert found is not None
    assert found.mode is OriginState.LIVE


def test_a_row_of_the_lease_that_is_missing_or_leads_elsewhere_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for row in WALKED_LEASE:
        with monkeypatch.context() as changed:
            changed.delitem(ORIGIN, row)
            with pytest.raises(KeyError):
                Times(6, 8, 2).walk()
    monkeypatch.setitem(ORIGIN, (OriginState.LIVE, OriginEvent.LEASE_RAN_OUT), OriginState.LIVE)
    assert Times(6, 8, 2).walk()[1] is not None


def test_a_member_that_answers_is_not_claimed_even_if_its_record_is_old() -> None:
    """Without that the lease alone would hold; the question saves what it can from bad clocks."""
    assert not states.may_claim(HolderState.HOLDING, silent=True, answers=True, has_left=False)
    assert not states.may_claim(HolderState.SEEDING, silent=True, answers=False, has_left=False)
    assert not states.may_claim(HolderState.HOLDING, silent=True, answers=False, has_left=True)
    assert states.may_claim(HolderState.HOLDING, silent=True, answers=False, has_left=False)
