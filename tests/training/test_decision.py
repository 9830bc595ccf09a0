"""The decision holds in every state that three ranks, two steps and two faults can reach, and for
random reports of larger jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acpfs.training.decision import (
    Layout,
    LayoutError,
    Meeting,
    NoCover,
    cover,
    differing,
    layout_of,
    meeting,
    newest_copy,
    outvoted,
)
from acpfs.training.messages import Gate, GateResult, Hello, Phase, Stopped

clause = pytest.mark.clause
STEPS = 2
FAULTS = 2
EVERYWHERE = {"all": (0, 1, 2)}
CHAIN = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}


def layout(gate: Gate, holders: Mapping[str, tuple[int, ...]], world: int = 3) -> Layout:
    return Layout(
        world, gate, "step-{step}", 0, holders, {rank: f"node{rank // 2}" for rank in range(world)}
    )


class Is(Enum):
    RUNNING = 0
    PARKED = 1
    DEAD = 2


@dataclass(frozen=True, slots=True)
class Rank:
    done: int = 0
    phase: Phase = Phase.COMPUTING
    state: Is = Is.RUNNING

    def report(self) -> Stopped:
        gate = GateResult(self.done, (1.0,)) if self.done else None
        return Stopped(
            self.done, self.done + (self.phase is not Phase.COMPUTING), self.phase, (), gate
        )


State = tuple[Rank, ...]


def moved(ranks: State, gate: Gate, i: int) -> Rank | None:
    """The next thing that a rank's program does, or None: it waits for others, or is at the end."""
    rank = ranks[i]
    if rank.state is not Is.RUNNING or rank.done == STEPS:
        return None
    if rank.phase is Phase.COMPUTING:
        # the reduction: everybody has given gradients of this step, also who died since
        return (
            replace(rank, phase=Phase.READY)
            if all(other.done >= rank.done for other in ranks)
            else None
        )
    if rank.phase is Phase.READY:
        entered = all(
            other.done > rank.done
            or (other.done == rank.done and other.phase is not Phase.COMPUTING)
            for other in ranks
        )
        return replace(rank, phase=Phase.UPDATING) if gate is Gate.NONE or entered else None
    return Rank(rank.done + 1)


def successors(ranks: State, plan: Layout) -> Iterator[State]:
    """Every next state: a step of a program, a death, a STOP that arrives (not in an update), a
    SETTLE that is carried out.
    """
    dead = [i for i, rank in enumerate(ranks) if rank.state is Is.DEAD]
    alive = [i for i, rank in enumerate(ranks) if rank.state is not Is.DEAD]
    changes: list[tuple[int, Rank | None]] = [(i, moved(ranks, plan.gate, i)) for i in alive]
    if len(dead) < FAULTS:
        changes += [(i, replace(ranks[i], state=Is.DEAD)) for i in alive]
    if dead:
        changes += [
            (i, replace(ranks[i], state=Is.PARKED))
            for i in alive
            if ranks[i].state is Is.RUNNING and ranks[i].phase is not Phase.UPDATING
        ]
        if all(ranks[i].state is Is.PARKED for i in alive):
            found = meeting(plan, {i: ranks[i].report() for i in alive})
            if isinstance(found, Meeting):
                changes += [(i, Rank(found.step, Phase.COMPUTING, Is.PARKED)) for i in found.coming]
    for i, rank in changes:
        if rank is not None:
            yield (*ranks[:i], rank, *ranks[i + 1 :])


@cache
def reachable(gate: Gate, everywhere: bool) -> tuple[Layout, frozenset[State]]:
    plan = layout(gate, EVERYWHERE if everywhere else CHAIN)
    first: State = (Rank(),) * 3
    seen = {first}
    left = [first]
    while left:
        for state in successors(left.pop(), plan):
            if state not in seen:
                seen.add(state)
                left.append(state)
    return plan, frozenset(seen)


WALKS = [
    (Gate.NONE, True),
    *(
        (gate, everywhere)
        for gate in (Gate.IMPLICIT, Gate.EXPLICIT)
        for everywhere in (True, False)
    ),
]


def parked(ranks: State) -> dict[int, Stopped]:
    return {i: rank.report() for i, rank in enumerate(ranks) if rank.state is Is.PARKED}


@clause("T10", "T11")
@pytest.mark.parametrize(("gate", "everywhere"), WALKS)
def test_in_every_state_survivors_meet_at_one_step_that_is_at_most_one_back(
    gate: Gate, everywhere: bool
) -> None:
    plan, states = reachable(gate, everywhere)
    met: Counter[int] = Counter()
    for ranks in states:
        reports = parked(ranks)
        alive = {i for i, rank in enumerate(ranks) if rank.state is not Is.DEAD}
        if not alive or alive != reports.keys():
            continue
        found = meeting(plan, reports)
        coverable = all(alive & set(holders) for holders in plan.holders.values())
        assert isinstance(found, Meeting) == coverable
        if isinstance(found, NoCover):
            assert all(not alive & set(plan.holders[shard]) for shard in found.missing)
            continue
        met[len(found.coming)] += 1
        assert found.step == max(report.done for report in reports.values())
        assert all(abs(rank.done - found.step) <= 1 for rank in ranks), (
            "S is within one of every rank's done, also of the dead"
        )
        assert found.there | found.coming == (
            alive if gate is not Gate.NONE else {i for i in alive if ranks[i].done == found.step}
        )
        assert not found.behind or gate is Gate.NONE
        chosen = cover(plan, found.there | found.coming)
        assert not isinstance(chosen, NoCover)
        assert chosen.keys() == plan.holders.keys()
        assert all(rank in alive and rank in plan.holders[shard] for shard, rank in chosen.items())
    assert met[0] > 50
    assert gate is Gate.NONE or met[1] > 10, (
        "the walk has states in which somebody must finish alone"
    )


@clause("T12")
@pytest.mark.parametrize(("gate", "everywhere"), WALKS)
def test_settling_again_after_a_further_fault_meets_at_the_same_step_or_behind_the_dead(
    gate: Gate, everywhere: bool
) -> None:
    plan, states = reachable(gate, everywhere)
    for ranks in states:
        found = (
            meeting(plan, reports)
            if (reports := parked(ranks)) and not any(r.state is Is.RUNNING for r in ranks)
            else None
        )
        if not isinstance(found, Meeting):
            continue
        settled = {
            i: replace(report, done=found.step, ready=found.step, phase=Phase.COMPUTING)
            for i, report in reports.items()
            if i in found.coming
        }
        for i in found.coming:  # any one has settled, none or all of the others
            partly = {**reports, i: settled[i]}
            for then in (partly, {**reports, **settled}):
                again = meeting(plan, then)
                assert isinstance(again, Meeting)
                assert again.step == found.step
            left = meeting(
                plan,
                {other: report for other, report in partly.items() if other in (*found.coming, i)},
            )
            assert isinstance(left, NoCover) or left.step == found.step


def hello(
    rank: int, holders: Mapping[str, tuple[int, ...]], gate: Gate = Gate.EXPLICIT, world: int = 3
) -> Hello:
    return Hello(
        rank,
        world,
        f"node{rank}",
        1,
        1,
        gate,
        {shard: ranks for shard, ranks in holders.items() if rank in ranks},
    )


def test_a_layout_that_all_agree_about() -> None:
    found = layout_of({rank: hello(rank, CHAIN) for rank in range(3)})
    assert found.holders == CHAIN
    assert sorted(found.shards[1]) == ["a", "b"]
    assert found.nodes[2] == "node2"


@clause("T13")
def test_ranks_that_do_not_agree_are_named() -> None:
    good = {rank: hello(rank, CHAIN) for rank in range(3)}
    wrong = {
        "ranks 1 have not registered": {0: good[0], 2: good[2]},
        "gate": {**good, 1: hello(1, CHAIN, Gate.NONE)},
        "world": {**good, 1: hello(1, CHAIN, world=4)},
        "ranks 0 and 1 do not agree about who holds a": {
            **good,
            1: hello(1, {"a": (0, 1, 2), "b": (1, 2)}),
        },
        "ranks 2 are said to hold b": {**good, 2: hello(2, {"c": (0, 2)})},
        "every rank must hold everything": {
            rank: hello(rank, CHAIN, Gate.NONE) for rank in range(3)
        },
        "no rank holds": {rank: hello(rank, {}) for rank in range(3)},
    }
    for text, hellos in wrong.items():
        with pytest.raises(LayoutError, match=text):
            layout_of(hellos)


@clause("T14")
def test_a_torn_copy_is_in_no_cover() -> None:
    plan = layout(Gate.EXPLICIT, CHAIN)
    ready = Stopped(4, 5, Phase.READY)
    torn = {0: Stopped(4, 5, Phase.UPDATING), 1: ready, 2: replace(ready, damaged=("c",))}
    assert isinstance(
        found := meeting(
            plan,
            {
                0: replace(ready, done=5, phase=Phase.COMPUTING),
                1: ready,
                2: replace(ready, damaged=("c",)),
            },
        ),
        Meeting,
    )
    assert cover(plan, found.there | found.coming, found.torn) == {"a": 1, "b": 2, "c": 0}
    assert meeting(plan, torn) == NoCover(("c",))


def test_without_the_result_of_an_implicit_gate_the_step_before_is_tried() -> None:
    plan = layout(Gate.IMPLICIT, {"all": (0, 1, 2), "x": (1, 2)})
    ready = Stopped(4, 5, Phase.READY, gate=GateResult(4, (1.0,)))
    found = meeting(plan, {0: Stopped(5, 5, Phase.COMPUTING), 1: ready, 2: ready})
    assert isinstance(found, Meeting)
    assert (found.step, set(found.there), set(found.behind)) == (4, {1, 2}, {0})


def test_a_cover_is_spread_over_nodes_and_ranks() -> None:
    world = 8
    plan = layout(Gate.EXPLICIT, {f"s{n}": tuple(range(world)) for n in range(8)}, world)
    chosen = cover(plan, range(world))
    assert not isinstance(chosen, NoCover)
    assert sorted(chosen.values()) == list(range(world))
    chosen = cover(plan, [0, 1, 2, 5])
    assert not isinstance(chosen, NoCover)
    assert Counter(plan.nodes[rank] for rank in chosen.values()) == {
        "node0": 3,
        "node1": 3,
        "node2": 2,
    }


@clause("T15")
def test_of_three_different_copies_the_majority_counts_and_of_two_none() -> None:
    plan = layout(Gate.EXPLICIT, {"all": (0, 1, 2), "a": (0, 1)})
    different = differing(
        plan, {0: {"all": "x", "a": "p"}, 1: {"all": "y", "a": "q"}, 2: {"all": "x"}}
    )
    assert different == {"all": {0: "x", 1: "y", 2: "x"}, "a": {0: "p", 1: "q"}}
    assert outvoted(different) == {(1, "all")}
    assert cover(plan, range(3), outvoted(different)) == {"all": 0, "a": 1} or cover(
        plan, range(3), outvoted(different)
    ) == {
        "a": 0,
        "all": 2,
    }


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, dict[int, Stopped]]:
    """Any layout with any reports, also such as no job can have."""
    world = draw(st.integers(1, 6))
    holders = draw(
        st.dictionaries(
            st.sampled_from("abcd"),
            st.sets(st.integers(0, world - 1), min_size=1).map(lambda s: tuple(sorted(s))),
            min_size=1,
        )
    )
    reports = {}
    for rank in draw(st.sets(st.integers(0, world - 1))):
        done = draw(st.integers(0, 3))
        phase = draw(st.sampled_from(Phase))
        damaged = draw(st.sets(st.sampled_from("abcd"), max_size=1))
        reports[rank] = Stopped(
            done,
            draw(st.integers(done, done + 1)),
            phase,
            tuple(damaged),
            draw(st.just(GateResult(done, ())) | st.none()),
        )
    return layout(draw(st.sampled_from(Gate)), holders, world), reports


@clause("T14")
@settings(max_examples=150, deadline=None)
@given(jobs())
def test_whatever_is_reported_a_cover_is_complete_whole_and_at_one_step(
    job: tuple[Layout, dict[int, Stopped]],
) -> None:
    plan, reports = job
    found = meeting(plan, reports)
    if isinstance(found, NoCover):
        return
    chosen = cover(plan, found.there | found.coming, found.torn)
    assert not isinstance(chosen, NoCover)
    assert chosen.keys() == plan.holders.keys()
    for shard, rank in chosen.items():
        report = reports[rank]
        assert rank in plan.holders[shard]
        assert report.phase is not Phase.UPDATING
        assert shard not in report.damaged
        assert report.done == found.step or (
            plan.gate is not Gate.NONE
            and (report.done, report.ready) == (found.step - 1, found.step)
        )
    assert found.there | found.coming | found.behind == reports.keys()


LONE = {"a": (0,), "b": (1,), "c": (2,)}


def at(done: int, **copies: tuple[int, ...]) -> Stopped:
    """`copies`: s4=(0, 2) are those of step 4 of ranks 0 and 2."""
    kept = {int(name[1:]): whose for name, whose in copies.items()}
    return Stopped(done, done, Phase.COMPUTING, copies=kept)


@clause("T214")
def test_survivors_go_back_to_the_newest_copy_that_has_every_shard() -> None:
    """Rank 1 is lost. Of step 6 nobody has its copy, of step 4 its buddy has."""
    reports = {0: at(7, s4=(0, 2), s6=(0, 2)), 2: at(7, s4=(1, 2), s6=(2,))}
    assert isinstance(meeting(layout(Gate.EXPLICIT, LONE), reports), NoCover)
    found = newest_copy(layout(Gate.EXPLICIT, LONE), reports)
    assert found is not None
    assert (found.step, found.cover, found.whose) == (
        4,
        {"a": 0, "b": 2, "c": 2},
        {"a": 0, "b": 1, "c": 2},
    )
    assert newest_copy(layout(Gate.EXPLICIT, LONE), {0: reports[0]}) is None
    # rank 0 has rank 2's copy as well, and rank 2 cannot write
    able = {0: at(7, s4=(0, 1, 2)), 2: at(7, s4=(2,))}
    found = newest_copy(layout(Gate.EXPLICIT, LONE), able, frozenset({2}))
    assert found is not None
    assert set(found.cover.values()) == {0}


@clause("T214")
def test_of_holders_the_living_write_their_own_copies() -> None:
    reports = {0: at(5, s4=(0, 1)), 2: at(5, s4=(1, 2))}
    found = newest_copy(layout(Gate.EXPLICIT, CHAIN), reports)
    assert found is not None
    assert found.whose == {"a": 0, "b": 2, "c": 0}
