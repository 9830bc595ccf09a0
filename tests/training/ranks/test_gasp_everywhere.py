"""Every point, every layout, and what else can go wrong meanwhile; minutes, so not in CI."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.training.ranks.gasps import DIES, Fault
from tests.training.ranks.jobs import JOBS
from tests.training.ranks.test_gasp import POINTS, gasp

pytestmark = pytest.mark.long
LATER = ("stopping", "settling", "saving", "publishing", "published")


@pytest.mark.clause("T47")
@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("point", POINTS)
def test_every_point(tmp_path: Path, yardsticks: Path, kind: str, point: str) -> None:
    gasp(Fault(kind, {random.Random(f"{kind}{point}").randrange(4): point}), tmp_path, yardsticks)


@pytest.mark.clause("T49")
@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("later", LATER)
def test_a_second_rank_dies_later(tmp_path: Path, yardsticks: Path, kind: str, later: str) -> None:
    """Ranks 0 and 1 hold different shards where there are two, so a cover is left."""
    gasp(Fault(kind, {1: "backward", 0: later}), tmp_path, yardsticks)


@pytest.mark.clause("T110")
@pytest.mark.parametrize("kind", ["experts", "experts on meshes"])
@pytest.mark.parametrize("dies", [{0: "between"}, {0: "between", 1: "saving"}])
def test_an_update_that_was_left_between_two_optimizers(
    tmp_path: Path, yardsticks: Path, kind: str, dies: dict[int, str]
) -> None:
    """As where parameters of the first one are sent round: that fails in the only one left with its
    shard, which does the rest alone.
    """
    assert gasp(Fault(kind, dies, shut_out={2: "between"}), tmp_path, yardsticks) == DIES
