"""A roll-out while a job in another container saves with torch: `bench.rolling`, small; its times
are a benchmark's affair.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bench import rolling
from bench.record import Report

TORCH = os.environ.get(
    "ACPFS_TORCH_PYTHON", str(Path(__file__).parents[2] / ".venv/frameworks/bin/python")
)
MIB = int(os.environ.get("ACPFS_ROLLING_MIB", "256"))
ROUNDS = int(os.environ.get("ACPFS_TAKE_OVERS", "5"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.clause("S300", "S302")
@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
@pytest.mark.skipif(
    not os.path.exists(TORCH), reason="needs torch: ACPFS_TORCH_PYTHON, or .venv/frameworks"
)
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_every_take_over_in_the_middle_of_a_save_loses_nothing() -> None:
    report = Report("rolling", "", ["round", "nobody served (s)", "longest write (s)"])
    assert rolling.run(report, TORCH, MIB, ROUNDS) == ROUNDS
    assert len(report.rows) == ROUNDS
    assert next(bar for bar in report.bars if "bytes" in bar.promise).met
