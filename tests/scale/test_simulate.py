"""The model of many nodes against what can be worked out by hand."""

from __future__ import annotations

import dataclasses
from statistics import mean

import pytest

from bench.scale.drain import drain
from bench.scale.gate import Gate, load
from bench.scale.outcome import HOUR_S, failures, simulate
from bench.scale.scenario import (
    DESIGNS,
    EVERY,
    GB,
    GROUPS,
    LANDED,
    NAMES,
    THINNED,
    Design,
    Scenario,
)

PLAIN = Scenario(
    nodes=1,
    bytes_per_node=10 * GB,
    bandwidth=2 * GB,
    client_bandwidth=1 * GB,
    close_spread_s=0,
    stream_cost_s=0,
    saves=1,
    interval_s=1000,
)
"""One node, nothing but a link of 1 GB/s."""


def plain(**changes: object) -> Scenario:
    return dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]


def persisted_s(scenario: Scenario) -> float:
    return max(one.persisted_at - one.closed_at for one in drain(scenario).saved)


def test_a_node_alone_needs_its_bytes_over_its_link() -> None:
    assert persisted_s(PLAIN) == pytest.approx(10)


def test_without_contention_many_are_as_fast_as_one() -> None:
    assert persisted_s(plain(nodes=50, bandwidth=50 * GB)) == pytest.approx(10)


@pytest.mark.parametrize("nodes", [2, 5, 64])
def test_equal_nodes_share_the_bandwidth(nodes: int) -> None:
    ended = {one.persisted_at for one in drain(plain(nodes=nodes)).saved}
    assert min(ended) == pytest.approx(nodes * 10 / 2)
    assert max(ended) == pytest.approx(nodes * 10 / 2)


def test_many_small_files_wait_for_the_end_of_each() -> None:
    scenario = plain(bytes_per_node=1 * GB, files_per_node=8000, streams=8, stream_cost_s=0.05)
    assert persisted_s(scenario) == pytest.approx(8000 * 0.05 / 8)


def test_the_metadata_server_can_be_the_limit() -> None:
    scenario = plain(
        nodes=10,
        bytes_per_node=1 * GB,
        bandwidth=1000 * GB,
        files_per_node=1000,
        operations_per_file=8,
        metadata_rate=1000,
    )
    assert persisted_s(scenario) == pytest.approx(10 * 1000 * 8 / 1000)


def test_clients_beyond_the_best_number_slow_the_storage() -> None:
    assert persisted_s(plain(nodes=16, clients_at_best=4, contention=0.5)) == pytest.approx(
        16 * 10 / 2 * 2
    )


def test_what_is_dirty_is_the_area_under_a_triangle() -> None:
    drained = drain(plain(nodes=4))
    assert drained.dirty_peak == pytest.approx(40 * GB)
    assert drained.dirty_mean == pytest.approx(40 * GB * 20 / 2 / 1000)


def test_saves_that_come_faster_than_they_drain_pile_up() -> None:
    scenario = plain(interval_s=5, saves=4)
    assert not simulate(scenario, LANDED).keeps_up
    assert drain(scenario).node_dirty_peak == pytest.approx((4 * 10 - 3 * 5) * GB)
    assert [one.save for one in drain(scenario).saved] == [0, 1, 2, 3]


def test_more_of_what_costs_is_never_faster_and_more_of_what_helps_never_slower() -> None:
    base = plain(
        nodes=12, files_per_node=100, stream_cost_s=0.1, clients_at_best=4, close_spread_s=1
    )
    found = persisted_s(base)
    for worse in (
        {"nodes": 24},
        {"bytes_per_node": 20 * GB},
        {"contention": 1.0},
        {"stream_cost_s": 2.0},
        {"files_per_node": 40_000},
    ):
        assert persisted_s(dataclasses.replace(base, **worse)) > found - 1e-6, worse
    for better in (
        {"bandwidth": 4 * GB},
        {"client_bandwidth": 2 * GB},
        {"clients_at_best": 8},
        {"streams": 16},
    ):
        assert persisted_s(dataclasses.replace(base, **better)) < found + 1e-6, better


def test_the_same_seed_is_the_same_history() -> None:
    scenario = dataclasses.replace(Scenario(nodes=40, saves=3), bytes_skew=0.3)
    assert simulate(scenario, LANDED) == simulate(scenario, LANDED)
    assert simulate(scenario, LANDED) != simulate(dataclasses.replace(scenario, seed=2), LANDED)


def test_drawn_failures_lose_on_average_what_is_worked_out() -> None:
    scenario = plain(nodes=20, mtbf_s=1 * HOUR_S)
    drained = drain(scenario)
    expected = simulate(scenario, LANDED).lost_per_day / 86_400 * drained.span_s
    assert mean(failures(scenario, drained, seed) for seed in range(2000)) == pytest.approx(
        expected, rel=0.1
    )


# -- pointers


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)
def test_a_node_alone_waits_for_nobody(design: Design) -> None:
    assert simulate(plain(), design).pointer_delay_s == 0


@pytest.mark.parametrize("design", [LANDED, THINNED, NAMES], ids=lambda design: design.name)
def test_few_nodes_wait_a_heartbeat_and_the_bound_at_most(design: Design) -> None:
    for seed in range(20):
        scenario = plain(nodes=8, seed=seed)
        assert (
            0
            < simulate(scenario, design).pointer_delay_s
            <= scenario.heartbeat_s + scenario.clock_bound_s
        )


def test_the_clock_bound_is_waited_for_only_where_the_drain_is_shorter() -> None:
    bound = plain(nodes=2, clock_bound_s=30.0, heartbeat_s=1.0, latency_s=0)
    assert 30 - 10 - 0.1 < simulate(bound, LANDED).pointer_delay_s < 30 - 10 + 1.1
    assert (
        simulate(dataclasses.replace(bound, bytes_per_node=100 * GB), LANDED).pointer_delay_s < 1.1
    )


def test_reading_every_record_takes_as_long_as_there_are_nodes() -> None:
    scenario = Scenario(nodes=4096, saves=1, metadata_rate=1e9, pointers_per_save=1)
    saved = drain(scenario).saved
    each = Gate(scenario, LANDED, 1).passes(saved)
    grouped = Gate(scenario, GROUPS, 1).passes(saved)
    assert each.reads >= 4095
    assert grouped.reads < each.reads / 32


def test_the_load_of_records_by_hand() -> None:
    scenario = Scenario(nodes=100, heartbeat_s=2.0)
    found = load(scenario, EVERY)
    beats = 100 / (0.625 * 2)
    assert found.publishing == pytest.approx(beats * EVERY.publish_operations)
    assert found.reading == pytest.approx(beats * 16 * EVERY.read_operations)
    assert load(dataclasses.replace(scenario, nodes=1), LANDED).reading == 0
    assert (
        load(dataclasses.replace(scenario, nodes=10_000), THINNED).reading
        < 2 * load(scenario, EVERY).reading
    )


# -- one after the other


def test_staggered_saves_are_never_later_and_earlier_where_clients_are_in_each_others_way() -> None:
    crowded = plain(
        nodes=64, clients_at_best=4, contention=0.7, saves=10, interval_s=10_000, bandwidth=4 * GB
    )
    paced = dataclasses.replace(crowded, stagger_s=10_000)
    assert simulate(paced, LANDED).persisted_s < 0.3 * simulate(crowded, LANDED).persisted_s


def test_staggering_ends_by_itself_where_links_are_the_limit() -> None:
    free = plain(nodes=16, bandwidth=1000 * GB, saves=8)
    assert simulate(dataclasses.replace(free, stagger_s=100), LANDED).persisted_s == pytest.approx(
        simulate(free, LANDED).persisted_s
    )
