"""When a job is given up: every course of faults and updates ends, and none ends too early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acpfs.training.coordinator.giving_up import CAUSES, Cause, GivingUp
from acpfs.training.coordinator.limits import Limits
from acpfs.training.messages import TroubleKind

LIMITS = Limits(fruitless_max=3, faults_max=12)
AGAINST = {Cause.OWN, Cause.LATE}
clause = pytest.mark.clause


@clause("T154")
@given(st.lists(st.tuples(st.sampled_from(Cause), st.integers(0, 6)), max_size=80))
def test_a_job_is_given_up_with_the_third_error_at_one_update_or_without_progress(
    course: list[tuple[Cause, int]],
) -> None:
    giving_up = GivingUp(LIMITS)
    furthest = -1
    since = list[tuple[Cause, int]]()
    for cause, done in course:
        giving_up.note(cause)
        verdict = giving_up.verdict(done)
        if done > furthest:
            furthest = done
            since = []
        since.append((cause, done))
        errors = sum(other == done and one in AGAINST for one, other in since)
        expected = (cause in AGAINST and errors >= LIMITS.fruitless_max) or len(
            since
        ) >= LIMITS.faults_max
        assert bool(verdict) == expected, verdict
        if verdict:
            return


@clause("T154")
@given(st.lists(st.sampled_from(Cause), min_size=1, max_size=6))
def test_the_first_sign_that_is_no_consequence_is_the_cause(signs: list[Cause]) -> None:
    cause = next((sign for sign in signs if sign is not Cause.CONSEQUENCE), Cause.CONSEQUENCE)
    giving_up = GivingUp(LIMITS)
    for _ in range(LIMITS.fruitless_max - 1):
        for sign in signs:
            giving_up.note(sign)
        assert not giving_up.verdict(5)
    for sign in signs:
        giving_up.note(sign)
    assert bool(giving_up.verdict(5)) == (cause in AGAINST)


@clause("T154")
def test_a_fault_that_nobody_survives_is_counted_and_leaves_no_cause_behind() -> None:
    giving_up = GivingUp(LIMITS)
    giving_up.note(Cause.LOSS)
    assert not giving_up.verdict(None)
    for _ in range(LIMITS.fruitless_max - 1):
        giving_up.note(Cause.OWN)
        assert not giving_up.verdict(0)
    giving_up.note(Cause.OWN)
    assert giving_up.verdict(0) == "update 1 failed 3 times"
    assert not giving_up.verdict(0)  # nothing has happened since


def test_each_kind_of_trouble_has_a_cause() -> None:
    assert CAUSES.keys() == set(TroubleKind)
