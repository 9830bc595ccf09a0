"""Copies of a training state: what they cost and which losses they cover, beside what a slow and
simple look at all losses says.
"""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acpfs.training.planner import Plan, Sharding, coverage, most_on_a_node, ram_wanted_bytes

GIB = float(1 << 30)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    replicas = draw(st.integers(1, 4))
    shards = draw(st.integers(1, 4))
    return Plan(
        params=1e9,
        data_parallel=replicas * shards,
        tensor_parallel=draw(st.integers(1, 4)),
        pipeline_parallel=draw(st.integers(1, 3)),
        replicas=replicas,
        sharding=draw(st.sampled_from(Sharding)),
        ranks_per_node=draw(st.integers(1, 8)),
    )


def survives(plan: Plan, lost: set[int]) -> bool:
    """Every shard has a holder on a node that is not lost."""
    return all(
        any(plan.node_of(rank) not in lost for rank in ranks) for ranks in plan.replica_sets()
    )


@settings(max_examples=150, deadline=None)
@given(plans())
def test_coverage_is_what_a_look_at_every_loss_says(plan: Plan) -> None:
    found = coverage(plan)
    nodes = range(plan.nodes)
    assert found.fatal_nodes == sum(not survives(plan, {node}) for node in nodes)
    assert found.fatal_pairs == sum(
        not survives(plan, set(pair)) for pair in combinations(nodes, 2)
    )
    assert found.any_node == (found.fatal_nodes == 0)
    assert found.any_two_nodes == (found.fatal_pairs == 0)
    assert found.any_rank == all(len(set(ranks)) > 1 for ranks in plan.replica_sets())


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_rank_holds_a_shard_and_no_rank_two(plan: Plan) -> None:
    held = sorted(rank for ranks in plan.replica_sets() for rank in ranks)
    assert held == list(range(plan.world))


@settings(max_examples=100, deadline=None)
@given(plans())
def test_a_checkpoint_is_written_whole_and_no_node_writes_more_than_it_holds(plan: Plan) -> None:
    most = most_on_a_node(plan)
    assert plan.checkpoint_bytes / plan.nodes <= most * (1 + 1e-9)
    assert most <= plan.checkpoint_bytes
    assert ram_wanted_bytes(plan) == 3 * most


def test_seventy_billion_parameters_as_the_products_guide_counts_them() -> None:
    plan = Plan(70e9, data_parallel=16, tensor_parallel=8, pipeline_parallel=4, replicas=2)
    assert plan.world == 512
    assert plan.product_added_bytes == 840e9
    assert plan.added_bytes == plan.product_added_bytes
    one = Plan(70e9, data_parallel=16, tensor_parallel=8, pipeline_parallel=4)
    assert (plan.rank_bytes - one.rank_bytes) * plan.world == pytest.approx(plan.added_bytes)
    assert coverage(plan).any_node
    assert coverage(plan).fatal_pairs == 32
    assert not coverage(one).any_rank


@pytest.mark.clause("T213")
def test_a_buddy_keeps_what_a_rank_updates_and_a_checkpoint_has() -> None:
    plan = Plan(70e9, data_parallel=64, sharding=Sharding.FSDP)
    assert plan.buddy_bytes * plan.world == 2 * plan.checkpoint_bytes


def test_copies_side_by_side_do_not_survive_their_node() -> None:
    found = coverage(Plan(1e9, data_parallel=2, tensor_parallel=4, replicas=2))
    assert found.any_rank
    assert not found.any_node
    assert found.fatal_nodes == 1


def test_with_plain_data_parallelism_any_rank_has_everything() -> None:
    plan = Plan(1e9, data_parallel=24, sharding=Sharding.DDP)
    assert plan.rank_bytes == 18e9
    assert plan.added_bytes == 0
    assert coverage(plan).any_two_nodes


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"replicas": 3}, "3 replicas do not divide a data parallel size of 8"),
        ({"params": 0}, "params"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Plan(**{"params": 1e9, "data_parallel": 8, **wrong})  # type: ignore[arg-type]
