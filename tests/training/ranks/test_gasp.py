"""A rank dies at a named point, and the survivors leave the last step, bit for bit as without the
fault.

Two layouts are in CI; each takes six seconds of processor time, so HSDP and the second death are
not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.ranks.forked import Ranks
from tests.training.ranks.gasps import DIES, WORLD, Fault, assert_gasp, protected, yardstick

POINTS = ("forward", "backward", "reduce", "ready", "gated", "updating", "updated", "sent_round")


def gasp(fault: Fault, tmp_path: Path, yardsticks: Path) -> int:
    """The step of the gasp."""
    expected = yardstick(fault.kind, yardsticks)
    directory = tmp_path / "run"
    with Ranks(
        WORLD, tmp_path, lambda rank: protected(rank, fault, directory, tmp_path / "store")
    ) as ranks:
        return assert_gasp(fault, ranks, directory, expected).step


@pytest.mark.clause("T47")
@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("ddp", "backward"),
        ("zero", "gated"),
        pytest.param("hsdp", "updated", marks=pytest.mark.long),
    ],
)
def test_a_rank_dies(tmp_path: Path, yardsticks: Path, kind: str, point: str) -> None:
    step = gasp(Fault(kind, {1: point}), tmp_path, yardsticks)
    assert point != "backward" or step == DIES - 1


@pytest.mark.long
@pytest.mark.clause("T49")
def test_a_second_rank_dies_while_both_begin_to_save(tmp_path: Path, yardsticks: Path) -> None:
    """The group of savers was being made: the next one has to have the same name on all of them."""
    gasp(Fault("hsdp", {1: "backward", 0: "saving"}), tmp_path, yardsticks)
