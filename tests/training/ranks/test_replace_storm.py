"""Faults at random moments of jobs that go on; `tools/replace-storm` makes a thousand."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import pytest

from tests.training.ranks.replace_storm import ReplaceStorm, Scene

FEW = 30
"""As many as CI would have; all of it is long, since a job with six faults takes several seconds of
two processors.
"""


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.clause("T84", "T142")
def test_a_storm(tmp_path: Path) -> None:
    seed = int(os.environ.get("ACPFS_TEST_SEED", random.randrange(1 << 30)))
    until_s = 60 * float(os.environ.get("ACPFS_REPLACE_MINUTES", "240"))
    with Scene(tmp_path, os.environ.get("ACPFS_TRAIN_COORDINATOR_PYTHON", sys.executable)) as scene:
        storm = ReplaceStorm(tmp_path, seed, scene, until=time.time() + until_s)
        storm.run(int(os.environ.get("ACPFS_REPLACE_FAULTS", str(FEW))))
        print(storm.told())
        if result := os.environ.get("ACPFS_REPLACE_RESULT"):
            keep(
                storm, Path(result)
            )  # before the mounts are taken down, which another one's mount namespace may keep
    assert not storm.failed, storm.told()


def keep(storm: ReplaceStorm, path: Path) -> None:
    """As a record."""
    times = (
        {"median": round(statistics.median(storm.took_s), 3), "most": max(storm.took_s)}
        if storm.took_s
        else {}
    )
    found = {
        "seed": storm.seed,
        "kernel": platform.release(),
        "faults": dict(storm.faults),
        "jobs": storm.jobs,
    }
    found |= {
        "failed": [text[:300] for text in storm.failed],
        "fault_to_all_running_s": {**times, "count": len(storm.took_s)},
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
