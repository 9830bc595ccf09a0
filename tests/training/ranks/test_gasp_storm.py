"""Random kills: no wrong and no torn checkpoint, and at most one step lost. `tools/gasp-storm 1000` runs many."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.training.ranks.storm import Storm

KILLS = int(os.environ.get("ACPFS_GASP_KILLS", "30"))


@pytest.mark.long
@pytest.mark.mount
@pytest.mark.timeout(0)
@pytest.mark.clause("T10", "T17", "T21", "T45", "T47", "T49", "T54", "T56")
def test_a_storm_of_kills_leaves_whole_and_right_checkpoints(tmp_path: Path, seed: int) -> None:
    storm = Storm(tmp_path, seed, os.environ.get("ACPFS_TRAIN_COORDINATOR_PYTHON", sys.executable))
    storm.run(KILLS)
    print(storm.told())
    assert not storm.failed
