"""How long a coordinator stays without members, with times that are given."""

from __future__ import annotations

import pytest

from acpfs.training.coordinator.lingering import ORPHANED_S, UNUSED_S, Lingering

ALONE_S = 10.0


def stays_s(
    lingering: Lingering,
    *,
    has_members: bool = False,
    has_others: bool = False,
    alone_s: float | None = None,
) -> float:
    """How long from time 0, in seconds."""
    return (
        next(
            now
            for now in range(2 * int(UNUSED_S))
            if lingering.is_over(
                now, has_members=has_members, has_others=has_others, alone_s=alone_s
            )
        )
        - 1
    )


@pytest.mark.parametrize(
    ("knows_its_job", "has_others", "expected"),
    [(True, False, UNUSED_S), (False, True, UNUSED_S), (False, False, ORPHANED_S)],
)
def test_whoever_may_expect_members_waits_long_for_the_first(
    knows_its_job: bool, has_others: bool, expected: float
) -> None:
    assert stays_s(Lingering(0, knows_its_job=knows_its_job), has_others=has_others) == expected


@pytest.mark.parametrize("knows_its_job", [True, False])
def test_behind_the_last_member_the_job_says_how_long(knows_its_job: bool) -> None:
    lingering = Lingering(-100, knows_its_job=knows_its_job)
    lingering.needed(0)
    assert stays_s(lingering, alone_s=ALONE_S) == ALONE_S


def test_connections_alone_keep_it_for_a_minute() -> None:
    assert (
        stays_s(Lingering(0, knows_its_job=False), has_members=True, alone_s=ALONE_S) == ORPHANED_S
    )


@pytest.mark.parametrize(("has_members", "expected"), [(False, 0), (True, ORPHANED_S)])
def test_who_is_dismissed_waits_for_its_members_only(has_members: bool, expected: float) -> None:
    lingering = Lingering(0, knows_its_job=True)
    lingering.dismiss()
    assert lingering.is_dismissed
    assert stays_s(lingering, has_members=has_members, alone_s=ALONE_S) == expected
