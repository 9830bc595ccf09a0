"""What launchers of a job do together: faults, restarts, replacements, nodes that come and go.

No processes.
"""

from __future__ import annotations

import signal

import pytest

from acpfs.training.coordinator.launchers import (
    AWAY_S,
    LAST_CALL_S,
    NODE_LOST,
    NODES_S,
    QUICK_MAX,
    VACANT_S,
    Launchers,
    Post,
    State,
)
from acpfs.training.coordinator.limits import FAULTS_MAX
from acpfs.training.messages import Launcher, Over, Replace, Start, StopRanks, ToLauncher

SAVED = 75 << 8
clause = pytest.mark.clause


def launcher(name: str, **given: object) -> Launcher:
    return Launcher(
        name,
        f"host-{name}",
        f"10.0.0.{name}",
        1000 + int(name),
        **{"slots": 2, **given},  # type: ignore[arg-type]
    )


def told(posts: list[Post]) -> dict[str, list[ToLauncher]]:
    found: dict[str, list[ToLauncher]] = {}
    for post in posts:
        found.setdefault(post.to, []).append(post.message)
    return found


def one(**given: object) -> Launchers:
    launchers = Launchers()
    launchers.registered(launcher("0", **given), 0.0)
    assert launchers.state is State.RUNNING
    return launchers


def two(**given: object) -> Launchers:
    launchers = Launchers()
    for name in ("0", "1"):
        launchers.registered(launcher(name, nodes_min=2, nodes_max=2, **given), 0.0)
    assert launchers.state is State.RUNNING
    return launchers


@clause("T67")
def test_a_fault_stops_all_and_begins_anew() -> None:
    launchers = one(restarts_max=1)
    posts = told(launchers.exited("0", 1, 3 << 8, 1.0))
    assert isinstance(posts["0"][0], StopRanks)
    launchers.exited("0", 0, int(signal.SIGTERM), 2.0)
    (start,) = told(launchers.idle("0", 7, 2.0))["0"]
    assert isinstance(start, Start)
    assert (start.attempt, start.world, start.master_port) == (1, 2, 7)
    launchers.exited("0", 0, 4 << 8, 3.0)
    launchers.exited("0", 1, 0, 3.0)
    assert told(launchers.idle("0", 8, 3.0))["0"][0] == Over(4, "rank 0 ended with status 4")


@clause("T66")
@pytest.mark.parametrize(
    ("statuses", "planned", "status"),
    [
        ((0, 0), False, 0),
        ((3 << 8, int(signal.SIGTERM)), False, 3),
        ((int(signal.SIGKILL), int(signal.SIGTERM)), False, 137),
        ((int(signal.SIGKILL), SAVED), False, 75),
        ((0, 0), True, 75),
        ((SAVED, SAVED), True, 75),
        ((SAVED, int(signal.SIGKILL)), True, 75),
        ((int(signal.SIGTERM), int(signal.SIGTERM)), True, 143),
    ],
)
def test_the_status_of_a_job(statuses: tuple[int, int], planned: bool, status: int) -> None:
    launchers = one()
    posts = launchers.planned("0", 0.5) if planned else []
    for rank, end in enumerate(statuses):
        posts += launchers.exited("0", rank, end, 1.0)
    posts += launchers.idle("0", 7, 2.0)
    assert [message.status for message in told(posts)["0"] if isinstance(message, Over)] == [status]


@clause("T68")
def test_after_sigterm_nothing_begins_anew() -> None:
    launchers = two(restarts_max=5, replaces=True)
    assert set(told(launchers.planned("1", 1.0))) == {"0", "1"}
    for rank in range(4):
        assert launchers.exited(str(rank // 2), rank, int(signal.SIGTERM), 2.0) == []
    assert launchers.idle("0", 7, 3.0) == []
    over = told(launchers.idle("1", 7, 3.0))
    assert over == {"0": [Over(143, "SIGTERM")], "1": [Over(143, "SIGTERM")]}


@clause("T69")
def test_one_rank_is_replaced_and_nobody_else_hears_of_it() -> None:
    launchers = two(replaces=True)
    assert told(launchers.exited("1", 3, int(signal.SIGKILL), 1.0)) == {"1": [Replace(3, 1)]}
    assert told(launchers.exited("1", 3, 1 << 8, 2.0)) == {"1": [Replace(3, 2)]}
    posts: list[Post] = []
    for rank in range(4):
        posts = launchers.exited(str(rank // 2), rank, 0, 3.0)
    assert told(posts)["0"] == [Over(0, "all ranks have ended")]


@clause("T69")
@pytest.mark.parametrize("status", [75, 76, 78])
def test_a_rank_that_leaves_with_the_whole_job_is_not_replaced(status: int) -> None:
    launchers = one(replaces=True)
    assert isinstance(told(launchers.exited("0", 0, status << 8, 1.0))["0"][0], StopRanks)


@clause("T69")
def test_when_others_are_through_only_a_process_that_did_an_update_is_replaced() -> None:
    """Of a program that says so, others are through when all is done: the next process is told
    that, and does no update.
    """
    launchers = one(replaces=True)
    launchers.exited("0", 0, 0, 1.0, updated=True)
    assert told(launchers.exited("0", 1, int(signal.SIGKILL), 1.0, updated=True)) == {
        "0": [Replace(1, 1)]
    }
    assert isinstance(told(launchers.exited("0", 1, 1 << 8, 1.0))["0"][0], StopRanks)
    launchers = one(replaces=True)
    launchers.exited("0", 0, 0, 1.0)
    assert isinstance(told(launchers.exited("0", 1, 1 << 8, 1.0))["0"][0], StopRanks)


@clause("T72")
def test_nodes_get_ranks_by_their_number() -> None:
    launchers = Launchers()
    assert (
        launchers.registered(launcher("7", slots=3, node_rank=1, nodes_min=2, nodes_max=2), 0.0)
        == []
    )
    posts = told(
        launchers.registered(launcher("5", slots=1, node_rank=0, nodes_min=2, nodes_max=2), 1.0)
    )
    hosts = ("10.0.0.5", "10.0.0.7")
    first, second = (
        Start("5-0", 0, number, 2, number, 4, "10.0.0.5", 1005, hosts=hosts) for number in (0, 1)
    )
    assert posts == {"5": [first], "7": [second]}


@clause("T72")
def test_enough_nodes_wait_for_more_for_a_while() -> None:
    launchers = Launchers()
    for name in ("0", "1"):
        assert launchers.registered(launcher(name, nodes_min=2, nodes_max=3), 0.0) == []
    assert launchers.wake_at == LAST_CALL_S
    assert set(told(launchers.tick(LAST_CALL_S))) == {"0", "1"}
    late = told(launchers.registered(launcher("2", nodes_min=2, nodes_max=3), 40.0))
    assert late == {"2": [Over(NODE_LOST, "the job runs already, without this node")]}


@clause("T72")
def test_too_few_nodes_end_the_job() -> None:
    launchers = Launchers()
    launchers.registered(launcher("0", nodes_min=2, nodes_max=2), 0.0)
    assert told(launchers.tick(NODES_S))["0"] == [Over(NODE_LOST, "only 1 nodes came in 600 s")]


@clause("T72")
def test_a_lost_node_is_a_fault_and_another_may_come() -> None:
    launchers = two(restarts_max=1)
    launchers.away("1", 1.0)
    assert launchers.tick(AWAY_S) == []
    assert set(told(launchers.tick(1.0 + AWAY_S))) == {"0"}
    assert launchers.idle("0", 7, 20.0) == []
    assert launchers.state is State.GATHERING
    posts = told(launchers.registered(launcher("2", nodes_min=2, nodes_max=2), 21.0))
    assert {name: start.first_rank for name, (start,) in posts.items()} == {"0": 0, "2": 2}  # type: ignore[union-attr]


@clause("T72")
def test_a_launcher_that_begins_in_an_away_one_s_place_need_not_wait() -> None:
    launchers = Launchers()
    for name in ("0", "1"):
        launchers.registered(
            launcher(name, node_rank=int(name), nodes_min=2, nodes_max=2, restarts_max=1), 0.0
        )
    stranger = launcher("2", node_rank=1, nodes_min=2, nodes_max=2, restarts_max=1)
    assert told(launchers.registered(stranger, 1.0)) == {
        "2": [Over(NODE_LOST, "the job runs already, without this node")]
    }
    launchers.away("1", 2.0)
    assert told(launchers.registered(stranger, 3.0)) == {"0": [StopRanks("node host-1 is lost")]}
    posts = told(launchers.idle("0", 7, 4.0))
    assert {name: start.first_rank for name, (start,) in posts.items()} == {"0": 0, "2": 2}  # type: ignore[union-attr]


@clause("T72")
def test_a_lost_node_ends_a_job_without_restarts() -> None:
    launchers = two()
    launchers.away("1", 1.0)
    launchers.tick(1.0 + AWAY_S)
    assert told(launchers.idle("0", 7, 20.0))["0"] == [Over(NODE_LOST, "node host-1 is lost")]


@clause("T73")
def test_a_launcher_that_comes_again_in_time_goes_on() -> None:
    launchers = two()
    start = Start("a", 0, 1, 2, 2, 4, "10.0.0.0", 1000)
    launchers.away("1", 1.0)
    again = launcher("1", nodes_min=2, nodes_max=2, start=start, ended={3: 0})
    assert launchers.registered(again, 2.0) == []
    assert launchers.tick(100.0) == []
    posts = []
    for name, rank in (("0", 0), ("0", 1), ("1", 2)):
        posts = launchers.exited(name, rank, 0, 101.0)
    assert told(posts)["1"] == [Over(0, "all ranks have ended")]


@clause("T73")
def test_a_coordinator_that_knows_nothing_learns_it_from_launchers() -> None:
    launchers = Launchers()
    posts = []
    killed: dict[int, int] = {3: int(signal.SIGKILL)}
    for name, ended in (("0", {}), ("1", killed)):
        start = Start("a", 2, int(name), 2, 2 * int(name), 4, "10.0.0.0", 1000)
        known = launcher(
            name, start=start, ended=ended, nodes_min=2, nodes_max=2, replaces=True, replaced=4
        )
        posts = launchers.registered(known, 0.0)
    assert told(posts) == {"1": [Replace(3, 5)]}
    assert (launchers.state, launchers.attempt) == (State.RUNNING, 2)


@clause("T73")
def test_a_stop_that_was_under_way_goes_on() -> None:
    launchers = Launchers()
    posts = []
    for name, stopping in (("0", True), ("1", False)):
        start = Start("a", 0, int(name), 2, 2 * int(name), 4, "10.0.0.0", 1000)
        posts = launchers.registered(
            launcher(name, nodes_min=2, nodes_max=2, start=start, stopping=stopping), 0.0
        )
    assert isinstance(told(posts)["1"][0], StopRanks)
    assert launchers.state is State.STOPPING


@clause("T73")
def test_a_start_that_was_lost_is_said_again() -> None:
    launchers = Launchers()
    launchers.registered(launcher("0", nodes_min=2, nodes_max=2), 0.0)
    first = told(launchers.registered(launcher("1", nodes_min=2, nodes_max=2), 0.0))["1"]
    launchers.away("1", 1.0)
    assert told(launchers.registered(launcher("1", nodes_min=2, nodes_max=2), 2.0))["1"] == first
    assert launchers.tick(100.0) == []


@clause("T73")
def test_nothing_is_decided_before_all_have_come_again() -> None:
    launchers = Launchers()
    start = Start("a", 0, 0, 2, 0, 4, "10.0.0.0", 1000)
    both = {0: 3 << 8, 1: 0}
    given = launcher("0", nodes_min=2, nodes_max=2, restarts_max=1, start=start, ended=both)
    assert launchers.registered(given, 0.0) == []
    assert launchers.wake_at == AWAY_S
    other = launcher(
        "1",
        nodes_min=2,
        nodes_max=2,
        restarts_max=1,
        start=Start("a", 0, 1, 2, 2, 4, "10.0.0.0", 1000),
    )
    posts = told(launchers.registered(other, 1.0))
    assert isinstance(posts["1"][0], StopRanks)
    assert set(told(launchers.idle("1", 7, 2.0))) == {"0", "1"}
    assert (launchers.state, launchers.attempt) == (State.RUNNING, 1)


@clause("T73")
def test_a_node_that_does_not_come_again_is_lost() -> None:
    launchers = Launchers()
    start = Start("a", 0, 0, 2, 0, 4, "10.0.0.0", 1000)
    launchers.registered(launcher("0", nodes_min=2, nodes_max=2, start=start), 0.0)
    assert told(launchers.tick(AWAY_S)) == {"0": [StopRanks("a node did not come again")]}
    assert told(launchers.idle("0", 7, 20.0)) == {
        "0": [Over(NODE_LOST, "a node did not come again")]
    }


def several(count: int, **given: object) -> Launchers:
    launchers = Launchers()
    for name in map(str, range(count)):
        launchers.registered(
            launcher(name, node_rank=int(name), nodes_min=count, nodes_max=count, **given), 0.0
        )
    assert launchers.state is State.RUNNING
    return launchers


@clause("T123")
def test_a_lost_node_s_place_is_kept_and_another_launcher_takes_it() -> None:
    launchers = several(3, replaces=True)
    launchers.away("0", 1.0)
    assert launchers.tick(1.0 + AWAY_S) == []
    assert launchers.state is State.RUNNING
    posts = told(
        launchers.registered(
            launcher("9", node_rank=0, nodes_min=3, nodes_max=3, replaces=True), 30.0
        )
    )
    assert set(posts) == {"9"}
    (start,) = posts["9"]
    assert isinstance(start, Start)
    assert (start.first_rank, start.group_rank, start.world, start.attempt, start.generation) == (
        0,
        0,
        6,
        0,
        1,
    )
    back = launcher(
        "0", node_rank=0, start=Start("0-0", 0, 0, 3, 0, 6, "10.0.0.0", 1000), replaces=True
    )
    assert told(launchers.registered(back, 31.0)) == {
        "0": [Over(NODE_LOST, "another launcher has this node's place")]
    }
    ends = [
        launchers.exited(name, rank, 0, 40.0)
        for name, first in (("9", 0), ("1", 2), ("2", 4))
        for rank in (first, first + 1)
    ]
    assert told(ends[-1])["9"] == [Over(0, "all ranks have ended")]


@clause("T123")
def test_a_place_that_nobody_takes_is_a_fault() -> None:
    launchers = several(3, replaces=True)
    launchers.away("2", 1.0)
    launchers.tick(1.0 + AWAY_S)
    assert launchers.wake_at == 1.0 + AWAY_S + VACANT_S
    assert isinstance(told(launchers.tick(1.0 + AWAY_S + VACANT_S))["0"][0], StopRanks)


@clause("T123")
def test_a_launcher_that_was_taken_for_lost_and_comes_again_has_its_place() -> None:
    launchers = several(3, replaces=True)
    launchers.away("2", 1.0)
    launchers.tick(1.0 + AWAY_S)
    again = launcher(
        "2",
        node_rank=2,
        start=Start("0-0", 0, 2, 3, 4, 6, "10.0.0.0", 1000),
        replaces=True,
        ended={5: 9},
    )
    assert told(launchers.registered(again, 60.0)) == {"2": [Replace(5, 1)]}


@clause("T124")
@pytest.mark.parametrize("replaces", [True, False])
def test_fewer_than_half_of_the_nodes_never_go_on(replaces: bool) -> None:
    launchers = several(3, replaces=replaces, restarts_max=9)
    for name in ("1", "2"):
        launchers.away(name, 1.0)
    assert isinstance(told(launchers.tick(1.0 + AWAY_S))["0"][0], StopRanks)
    for rank in (0, 1):
        launchers.exited("0", rank, int(signal.SIGTERM), 20.0)
    (over,) = told(launchers.idle("0", 7, 20.0))["0"]
    assert isinstance(over, Over)
    assert (over.status, launchers.state) == (NODE_LOST, State.ENDED)


@clause("T124")
@pytest.mark.parametrize("ours", [True, False])
def test_of_two_halves_the_one_goes_on_that_has_the_claim(ours: bool) -> None:
    launchers = Launchers(succeeds=True, has_witness=True)
    start = Start("0-0", 0, 1, 2, 2, 4, "10.0.0.0", 1000)
    launchers.registered(
        launcher("1", node_rank=1, nodes_min=2, nodes_max=2, start=start, replaces=True), 0.0
    )
    assert launchers.tick(AWAY_S) == []
    assert launchers.wants_claim
    assert (launchers.claimed(ours, AWAY_S) == []) is ours
    if ours:
        posts = told(
            launchers.registered(
                launcher("8", node_rank=0, nodes_min=2, nodes_max=2, replaces=True), 20.0
            )
        )
        assert [
            (one.first_rank, one.generation) for one in posts["8"] if isinstance(one, Start)
        ] == [(0, 1)]


@clause("T124")
def test_without_a_witness_the_half_goes_on_where_launchers_have_met_all_the_time() -> None:
    launchers = Launchers(succeeds=True)
    start = Start("0-0", 0, 1, 2, 2, 4, "10.0.0.0", 1000)
    launchers.registered(launcher("1", nodes_min=2, nodes_max=2, start=start, replaces=True), 0.0)
    assert isinstance(told(launchers.tick(AWAY_S))["1"][0], StopRanks)


@clause("T123")
def test_a_launcher_that_begins_before_the_others_came_again_takes_the_place_left() -> None:
    launchers = Launchers()
    launchers.registered(launcher("9", node_rank=0, nodes_min=3, nodes_max=3, replaces=True), 0.0)
    for number in (1, 2):
        start = Start("0-0", 0, number, 3, 2 * number, 6, "10.0.0.0", 1000)
        launchers.registered(
            launcher(
                str(number), node_rank=number, nodes_min=3, nodes_max=3, start=start, replaces=True
            ),
            1.0,
        )
    posts = told(launchers.tick(AWAY_S))
    assert [(one.first_rank, one.generation) for one in posts["9"] if isinstance(one, Start)] == [
        (0, 1)
    ]


@clause("T69")
def test_a_rank_that_dies_again_and_again_in_a_short_time_is_a_fault() -> None:
    launchers = one(replaces=True)
    for number in range(QUICK_MAX):
        assert told(launchers.exited("0", 1, 1 << 8, float(number))) == {
            "0": [Replace(1, number + 1)]
        }
    assert isinstance(told(launchers.exited("0", 1, 1 << 8, 10.0))["0"][0], StopRanks)
    slow = one(replaces=True)
    for number in range(2 * QUICK_MAX):
        assert told(slow.exited("0", 1, 1 << 8, 30.0 * number)) == {"0": [Replace(1, number + 1)]}


@clause("T150")
def test_deaths_of_processes_that_did_updates_end_no_job_however_many_there_are() -> None:
    launchers = one(replaces=True)
    for number in range(3 * FAULTS_MAX):
        assert told(launchers.exited("0", 1, 9, number / 10, updated=True)) == {
            "0": [Replace(1, number + 1)]
        }
    for _ in range(2):  # an update between two deaths begins the count anew
        for _ in range(QUICK_MAX - 1):
            assert isinstance(told(launchers.exited("0", 1, 9, 1000.0))["0"][0], Replace)
        assert isinstance(told(launchers.exited("0", 1, 9, 1000.0, updated=True))["0"][0], Replace)
    for _ in range(QUICK_MAX):
        assert isinstance(told(launchers.exited("0", 1, 9, 1000.0))["0"][0], Replace)
    assert isinstance(told(launchers.exited("0", 1, 9, 1000.0))["0"][0], StopRanks)


@clause("T150")
def test_a_program_that_takes_long_to_fail_ends_the_job_as_well() -> None:
    launchers = one(replaces=True)
    for number in range(FAULTS_MAX):
        assert isinstance(told(launchers.exited("0", 1, 1 << 8, 90.0 * number))["0"][0], Replace)
    assert isinstance(told(launchers.exited("0", 1, 1 << 8, 90.0 * FAULTS_MAX))["0"][0], StopRanks)
