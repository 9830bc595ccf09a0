"""Ranks that train on a device which runs behind its host are replaced: what is queued behind an
aborted collective is in nobody's state.

Only a double is here.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.training.ranks.behind import (
    CHANGED,
    WAYS,
    WHERE,
    WRONG,
    Exits,
    Fails,
    Moment,
    OnDouble,
    OnProcessors,
    Place,
    drawn,
)
from tests.training.ranks.replaced_behind import verdict

KILLS = 20


@pytest.mark.clause("T204", "T207", "T209")
@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.long) for kind in WHERE[1:])]
)
def test_a_rank_that_died_in_its_backward_pass_is_replaced(
    tmp_path: Path, yardsticks: Path, kind: str
) -> None:
    assert verdict(Moment(kind, {1: "backward"}, number=5), tmp_path, yardsticks) == "right"


@pytest.mark.long
@pytest.mark.clause("T204")
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_others_are_ahead_when_a_collective_is_aborted(
    tmp_path: Path, yardsticks: Path, kind: str
) -> None:
    fault = Moment(kind, {1: "gated"}, number=5, slow=frozenset({2}))
    assert verdict(fault, tmp_path, yardsticks) == "right"


@pytest.mark.long
@pytest.mark.clause("T207")
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("place", [OnDouble(), OnProcessors()], ids=["double", "gloo"])
def test_every_way_to_update_is_gone_on_with(
    tmp_path: Path, yardsticks: Path, kind: str, place: Place
) -> None:
    fault = Moment(kind, {1: "backward"}, number=5)
    assert verdict(fault, tmp_path, yardsticks, place) == "right"


@pytest.mark.long
@pytest.mark.clause("T180", "T233")
@pytest.mark.parametrize(("kind", "point"), CHANGED)
def test_what_a_loop_changes_behind_its_update_is_queued(
    tmp_path: Path, yardsticks: Path, kind: str, point: str
) -> None:
    assert verdict(Moment(kind, {1: point}, number=5), tmp_path, yardsticks) == "right"


@pytest.mark.long
@pytest.mark.clause("T205")
@pytest.mark.parametrize("never", [False, True])
def test_a_rank_whose_device_fails_is_replaced(
    tmp_path: Path, yardsticks: Path, *, never: bool
) -> None:
    """It says so, and none of its memory is read: that would end the process by a signal. Or it
    never answers, and the main thread may be in C for good.
    """
    fault = Fails("ddp", {1: "backward"} if never else {}, number=5, never=never)
    assert verdict(fault, tmp_path, yardsticks, probe_s=1.0) == "right"


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.clause("T204")
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_ranks_die_at_any_moment_and_are_replaced(
    tmp_path: Path, yardsticks: Path, kind: str, seed: int
) -> None:
    """From the first update on."""
    chance = random.Random(seed)
    for number in range(KILLS):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert verdict(drawn(kind, chance, first=1), directory, yardsticks) in ("right", "too late")


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.clause("T204")
@pytest.mark.parametrize("gate", sorted(WRONG))
def test_each_wrong_gate_is_found(tmp_path: Path, yardsticks: Path, gate: str, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(KILLS):
        directory = tmp_path / str(number)
        directory.mkdir()
        if verdict(drawn("ddp", chance, gate), directory, yardsticks).startswith("corrupted"):
            print(gate, "found by kill", number + 1)
            return
    pytest.fail(f"{gate} was not found in {KILLS} kills")


@pytest.mark.long
@pytest.mark.clause("T231")
def test_loops_exit_for_what_an_aborted_collective_has_left(
    tmp_path: Path, yardsticks: Path
) -> None:
    fault = Exits("ddp", {1: "backward"}, number=5)
    assert verdict(fault, tmp_path, yardsticks) == "right"
