"""`tools/train-accelerator-check` without an accelerator: four ranks on the double of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.conftest import interpreter
from tests.training.test_ranks import LIBRARIES, REPOSITORY

TIMEOUT_S = 1800


@pytest.mark.frameworks
@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.clause("T203")
def test_four_ranks_on_the_double(tmp_path: Path) -> None:
    record = tmp_path / "record.md"
    words = ["--double", "--kills", "2", "--libraries", str(LIBRARIES), "--record", str(record)]
    environment = {
        "ACPFS_TORCH_PYTHON": interpreter("ACPFS_TORCH_PYTHON", "torch"),
        "ACPFS_TRAIN_COORDINATOR_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [REPOSITORY / "tools" / "train-accelerator-check", *words],
        env={**os.environ, **environment},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [line for line in record.read_text().splitlines() if line.startswith("| ")]
    ours = [row for row in rows if "double" in row or "without the gate" in row]
    assert len(ours) == 3, done.stdout + done.stderr
    assert all("| yes |" in row for row in ours), done.stdout
    assert any("the gate costs" in row for row in rows)  # how much is said on a quiet machine
