"""Faults at random moments of jobs that go on; `tools/replace-storm` runs a thousand."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.training.ranks.replace_storm import ReplaceStorm


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.clause("T84")
def test_a_storm(tmp_path: Path) -> None:
    storm = ReplaceStorm(tmp_path, int(os.environ.get("ACPFS_TEST_SEED", random.randrange(1 << 30))))
    storm.run(int(os.environ.get("ACPFS_REPLACE_FAULTS", "30")))
    print(storm.told())
    assert not storm.failed, storm.told()
