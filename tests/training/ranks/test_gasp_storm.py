"""Random kills: no wrong and no torn checkpoint, and at most one step lost.

`tools/gasp-storm 1000` runs many.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.ranks.storm import Storm

KILLS = int(os.environ.get("ACPFS_GASP_KILLS", "30"))
MINUTES = float(os.environ.get("ACPFS_GASP_MINUTES", "inf"))
KEEP = os.environ.get("ACPFS_GASP_KEEP", "")
"""Where the result goes as well."""


def _where() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"commit {commit or 'unknown'}, torch {torch.__version__}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[2]:.0f}"
    )


@pytest.mark.long
@pytest.mark.mount
@pytest.mark.timeout(0)
@pytest.mark.clause("T10", "T17", "T21", "T45", "T47", "T49", "T54", "T56")
def test_a_storm_of_kills_leaves_whole_and_right_checkpoints(tmp_path: Path, seed: int) -> None:
    storm = Storm(tmp_path, seed, os.environ.get("ACPFS_TRAIN_COORDINATOR_PYTHON", sys.executable))
    storm.run(KILLS, MINUTES)
    print(storm.told())
    if KEEP:
        Path(KEEP).write_text(
            storm.kept(f"ACPFS_TEST_SEED={seed} tools/gasp-storm {KILLS} {MINUTES:g}", _where())
        )
    assert not storm.failed
