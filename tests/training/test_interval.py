"""The interval that wastes least, beside a simulation of the same job."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acpfs.training.interval import (
    PRODUCT_CURVE,
    Job,
    best_s,
    daly_s,
    implied_fault_s,
    lost_s_a_day,
    mean_fault_s,
    product_s,
    waste,
    young_s,
)
from tests.training.simulation import simulate

HOUR = 3600.0
JOBS = {
    "slow saves, frequent faults": Job(save_s=120, restart_s=600, fault_s=4 * HOUR),
    "fast saves": Job(save_s=2, restart_s=300, fault_s=8 * HOUR),
    "most faults are covered": Job(save_s=5, restart_s=120, fault_s=3 * HOUR, covered=0.8),
    "nodes take their RAM along": Job(
        save_s=5, restart_s=300, fault_s=6 * HOUR, node_share=0.5, drain_s=200
    ),
    "a drain longer than the interval": Job(
        save_s=1, restart_s=300, fault_s=2 * HOUR, node_share=0.5, drain_s=300
    ),
}
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.7, 2.0)
SEED = 20261123


def beside_the_simulation(job: Job, faults: int) -> None:
    advised = best_s(job)
    wasted = {factor: simulate(job, advised * factor, faults, SEED) for factor in FACTORS}
    assert wasted[1.0] <= 1.02 * min(wasted.values())
    assert waste(job, advised) == pytest.approx(wasted[1.0], rel=0.05)


@pytest.mark.parametrize("name", JOBS)
def test_the_best_interval_is_that_of_the_simulation(name: str) -> None:
    beside_the_simulation(JOBS[name], faults=5_000)


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_the_same_over_a_hundred_thousand_faults(name: str) -> None:
    beside_the_simulation(JOBS[name], faults=100_000)


@settings(max_examples=50, deadline=None)
@given(
    save_s=st.floats(0.01, 600),
    restart_s=st.floats(0, 3600),
    fault_s=st.floats(600, 1e7),
    covered=st.floats(0, 0.99),
    node_share=st.floats(0, 1),
    drain_s=st.floats(0, 600),
)
def test_no_other_interval_wastes_less(
    save_s: float,
    restart_s: float,
    fault_s: float,
    covered: float,
    node_share: float,
    drain_s: float,
) -> None:
    job = Job(save_s, restart_s, fault_s, covered, node_share, drain_s)
    best = best_s(job)
    for factor in (0.3, 0.9, 1.1, 3.0):
        assert waste(job, best) <= waste(job, best * factor) * (1 + 1e-9)


def test_where_a_save_costs_little_all_three_agree() -> None:
    job = Job(save_s=0.5, restart_s=0, fault_s=10 * 24 * HOUR)
    assert young_s(job) == pytest.approx(best_s(job), rel=0.01)
    assert daly_s(job) == pytest.approx(best_s(job), rel=0.001)


def test_where_a_save_costs_much_daly_is_nearer_than_young() -> None:
    job = Job(save_s=600, restart_s=0, fault_s=2 * HOUR)
    assert abs(daly_s(job) - best_s(job)) < abs(young_s(job) - best_s(job))


def test_where_no_fault_costs_steps_there_is_no_need_to_save() -> None:
    job = Job(save_s=1, restart_s=10, fault_s=HOUR, covered=1.0)
    assert best_s(job) == young_s(job) == daly_s(job) == math.inf
    assert lost_s_a_day(job, 600) == 0


def test_a_job_that_never_ends_a_segment_wastes_everything() -> None:
    assert waste(Job(save_s=1, restart_s=1, fault_s=1), 1e6) == 1.0


def test_a_job_without_faults_is_not_told_never() -> None:
    assert mean_fault_s(observed_s=24 * HOUR, faults=0) == 24 * HOUR
    assert mean_fault_s(observed_s=24 * HOUR, faults=0, prior_s=6 * HOUR) == 30 * HOUR
    assert mean_fault_s(observed_s=24 * HOUR, faults=2, prior_s=6 * HOUR) == 10 * HOUR
    assert mean_fault_s(observed_s=0, faults=0, prior_s=6 * HOUR) == 6 * HOUR


@pytest.mark.parametrize(
    ("observed_s", "faults", "prior_s"), [(0, 0, 0), (-1, 0, 10), (1, -1, 0), (1, 0, -1)]
)
def test_nothing_follows_from_nothing(observed_s: float, faults: int, prior_s: float) -> None:
    with pytest.raises(ValueError, match="mean time"):
        mean_fault_s(observed_s, faults, prior_s)


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_s": 0.0},
        {"fault_s": 0.0},
        {"fault_s": math.inf},
        {"save_s": math.nan},
        {"restart_s": -1.0},
        {"drain_s": math.nan},
        {"covered": 1.1},
        {"node_share": -0.1},
    ],
)
def test_a_job_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Job(**{"save_s": 1.0, "restart_s": 1.0, "fault_s": 1.0, **wrong})


def test_the_products_curve_assumes_an_hour_at_its_first_point_and_days_at_its_last() -> None:
    assert all(product_s(save) == interval for save, interval in PRODUCT_CURVE)
    assert product_s(1) == 600
    assert product_s(75) == 1300
    assert product_s(500) == 37000
    first = PRODUCT_CURVE[0]
    last = PRODUCT_CURVE[-1]
    assert implied_fault_s(*first) == HOUR
    assert implied_fault_s(*last) / (24 * HOUR) == pytest.approx(13.2, abs=0.05)
