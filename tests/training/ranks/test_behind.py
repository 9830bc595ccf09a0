"""Ranks that train on a device which runs behind its host: what is queued behind an aborted
collective is in no checkpoint.

Only a double is here. Where the gate is missing it corrupts, and that is tested as well.
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
    Fails,
    Moment,
    OnDouble,
    OnProcessors,
    Place,
    Signalled,
    drawn,
    verdict,
)

KILLS = 20


@pytest.mark.clause("T197", "T207", "T214")
@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.long) for kind in WHERE[1:])]
)
def test_a_rank_dies_in_its_backward_pass(tmp_path: Path, yardsticks: Path, kind: str) -> None:
    fault = Moment(kind, {1: "backward"}, number=5)
    assert verdict(fault, tmp_path, yardsticks) == "right"


@pytest.mark.long
@pytest.mark.clause("T197")
def test_others_are_ahead_when_a_collective_is_aborted(tmp_path: Path, yardsticks: Path) -> None:
    """They have done the update, and what this rank has is garbage: it stays where it was."""
    fault = Moment("ddp", {1: "gated"}, number=5, slow=frozenset({2}))
    assert verdict(fault, tmp_path, yardsticks) == "right"


@pytest.mark.clause("T187", "T203")
@pytest.mark.parametrize("dies", [0, 3])
def test_a_rank_dies_when_the_others_are_told_how_ddp_lays_its_buckets_out_anew(
    tmp_path: Path, yardsticks: Path, dies: int
) -> None:
    """All others live: none of them reads what an aborted collective has left."""
    fault = Moment("ddp", {dies: "sent_round"}, number=1)
    assert verdict(fault, tmp_path, yardsticks) == "right"


@pytest.mark.long
@pytest.mark.clause("T207")
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("place", [OnDouble(), OnProcessors()], ids=["double", "gloo"])
def test_every_way_to_update(tmp_path: Path, yardsticks: Path, kind: str, place: Place) -> None:
    fault = Moment(kind, {1: "backward"}, number=5)
    assert verdict(fault, tmp_path, yardsticks, place) == "right"


@pytest.mark.long
@pytest.mark.clause("T173", "T190", "T233")
@pytest.mark.parametrize(("kind", "point"), CHANGED)
def test_what_a_loop_changes_behind_its_update_is_queued(
    tmp_path: Path, yardsticks: Path, kind: str, point: str
) -> None:
    assert verdict(Moment(kind, {1: point}, number=5), tmp_path, yardsticks) == "right"


@pytest.mark.long
@pytest.mark.clause("T172", "T198", "T233")
def test_a_signal_tears_no_update_that_is_queued(tmp_path: Path, yardsticks: Path) -> None:
    """All ranks leave their loops with it, and the update is done behind that."""
    assert verdict(Signalled("ddp", {}, number=5), tmp_path, yardsticks) == "right"


@pytest.mark.long
@pytest.mark.clause("T199", "T202")
@pytest.mark.parametrize("never", [False, True])
def test_a_rank_whose_device_fails_counts_as_dead(
    tmp_path: Path, yardsticks: Path, *, never: bool
) -> None:
    """It says so, and none of its memory is read: that would end the process by a signal. Or it
    never answers, and the main thread may be in C for good.
    """
    fault = Fails("ddp", {1: "backward"} if never else {}, number=5, never=never)
    assert verdict(fault, tmp_path, yardsticks, probe_s=1.0) == "right"


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.clause("T197", "T203")
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_ranks_die_at_any_moment(tmp_path: Path, yardsticks: Path, kind: str, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(KILLS):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert verdict(drawn(kind, chance), directory, yardsticks) in ("right", "too late")


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.clause("T203")
@pytest.mark.parametrize("gate", sorted(WRONG))
def test_each_wrong_gate_is_found(tmp_path: Path, yardsticks: Path, gate: str, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(KILLS):
        directory = tmp_path / str(number)
        directory.mkdir()
        found = verdict(drawn("ddp", chance, gate), directory, yardsticks)
        if found.startswith("corrupted"):
            print(gate, "found by kill", number + 1)
            return
    pytest.fail(f"{gate} was not found in {KILLS} kills")
