"""A small drill, by `tools/test drill`: a few dozen kills of all kinds, and a soak of seconds.

Large ones: `tools/drill`, and ACPFS_SOAK_MINUTES=5 here.
"""

from __future__ import annotations

import os

import pytest

from tests.drill.result import Result
from tests.drill.run import Drill, Plan
from tests.drill.soak import Sample, growth, soak
from tests.drill.workloads import GUARDED, LARGE

pytestmark = [pytest.mark.timeout(900)]
MINUTES_MAX = 12.0
"""Twenty kills take a minute where nothing else runs."""
KILLS = 20
SOAK_MINUTES = float(os.environ.get("ACPFS_SOAK_MINUTES", "0.15"))
clause = pytest.mark.clause


@clause("S6", "S7", "S16", "S19", "S22", "S25", "S26")
@pytest.mark.mount
@pytest.mark.long
def test_nothing_is_lost_whatever_dies(seed: int) -> None:
    result = Drill(Plan(seed, kills=KILLS, minutes=MINUTES_MAX, parallel=2, cycles=3), print).run()
    assert result.losses == []
    assert result.kills >= KILLS


@clause("S140", "S141", "S144")
@pytest.mark.mount
@pytest.mark.long
def test_a_whole_checkpoint_is_always_there_whatever_dies(seed: int) -> None:
    plan = Plan(
        seed,
        kills=KILLS // 2,
        minutes=MINUTES_MAX,
        parallel=2,
        cycles=3,
        kinds=["guard"],
        workloads=list(GUARDED),
    )
    result = Drill(plan, print).run()
    assert result.losses == []
    assert result.kills >= KILLS // 2


@clause("S6", "S7", "S180", "S181")
@pytest.mark.mount
@pytest.mark.long
def test_no_half_of_a_large_file_is_ever_seen(seed: int) -> None:
    plan = Plan(
        seed,
        kills=KILLS,
        minutes=MINUTES_MAX,
        parallel=2,
        cycles=3,
        kinds=["large", "large guard"],
        workloads=list(LARGE),
    )
    result = Drill(plan, print).run()
    assert result.losses == []
    assert len(result.writing) >= KILLS // 2


@pytest.mark.mount
@pytest.mark.long
@pytest.mark.timeout(SOAK_MINUTES * 60 + 300)
def test_what_acpfs_holds_stays_flat(seed: int) -> None:
    result, samples = soak(seed, SOAK_MINUTES, "native", print)
    assert result.losses == []
    assert samples


def test_growth_is_found() -> None:
    flat = [Sample(float(n), 100 << 20, 50, 20) for n in range(16)]
    assert growth(flat) == []
    assert growth(
        [Sample(s.at_s, s.rss_bytes, s.descriptors + 5 * n, s.threads) for n, s in enumerate(flat)]
    )


def test_runs_add_up() -> None:
    one = Result(1)
    other = Result(2)
    one.note("kill worker", "rsync", [], point="here", transport="native")
    other.note("kill worker", "rsync", ["gone"], point="there", transport="native")
    other.note_writing("large", [7, None])
    one.add(other.to_json())
    assert one.was_written().startswith(
        "Something was being written at 1 of 2 kills during work (large 2)"
    )
    assert (one.kills, len(one.losses), one.transports["native"], sorted(one.points)) == (
        2,
        1,
        2,
        ["here", "there"],
    )
