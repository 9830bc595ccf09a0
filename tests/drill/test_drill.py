"""A small drill: every fault on some workloads, in about a minute. The large one is `tools/drill`, by hand."""

from __future__ import annotations

import pytest

from tests.drill.run import Drill, Plan

pytestmark = [pytest.mark.mount, pytest.mark.slow, pytest.mark.timeout(400)]
MINUTES = 1.1
clause = pytest.mark.clause


@clause("S6", "S7", "S16", "S19", "S22", "S25", "S26")
def test_nothing_is_lost_whatever_dies(seed):
    plan = Plan(seed, kills=60, minutes=MINUTES, parallel=2, cycles=2)
    result = Drill(plan, print).run()
    assert result.losses == []
    assert result.kills > 0
