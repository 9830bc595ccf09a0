"""Whatever fails in acpfs, a train function of the product's scripts comes to what it comes to
without.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.mounts import REPOSITORY

pytestmark = pytest.mark.clause("T178", "T183")


@pytest.mark.parametrize(
    "kind",
    ["saves", "goes_on", "fails", "fails_and_goes_on", "thread_fails", "thread_fails_and_goes_on"],
)
def test_whatever_fails_in_acpfs_the_train_function_does_not_notice(
    tmp_path: Path, kind: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.compatible.faulty_rank", str(tmp_path), kind],
        cwd=REPOSITORY,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
