"""Histories of processes that have the same files open come to what they are about."""

from __future__ import annotations

import ast

import pytest

from tests.sim.test_histories import simulate

PLACES = (
    "halves",
    "closes beside a copy",
    "closes beside a writer",
    "lives with closes that count",
    "lives with closes that do not count",
    "lives with copies aside",
    "lives with retries",
)


@pytest.mark.slow
@pytest.mark.clause("S390", "S391", "S468", "S474", "S489")
def test_no_history_publishes_a_half_and_all_places_are_reached() -> None:
    done = simulate("--profile", "shared", "--seeds", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = ast.literal_eval(done.stdout.rpartition("; ")[2])
    assert not [place for place in PLACES if not counts.get(place)], counts
