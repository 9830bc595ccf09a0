"""A few histories of members, always the same ones: none breaks a rule, and they come to all places
below.
"""

from __future__ import annotations

import re

import pytest

from tests.sim.test_histories import simulate

SEEDS = 16
REACHED = (
    "members forgotten",
    "pointers that waited and passed",
    "pointers withheld",
    "times that all its processes are killed",
    "times that its daemon is killed",
    "times that its machine is lost",
    "waits for other members",
)


@pytest.mark.slow
@pytest.mark.clause("S160", "S161", "S163", "S164", "S166", "S400", "S401", "S484")
def test_no_history_of_members_breaks_a_rule() -> None:
    done = simulate("--profile", "members", "--seeds", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    for place in REACHED:
        assert re.search(rf"'{place}': [1-9]", done.stdout), f"none has {place}: {done.stdout}"
