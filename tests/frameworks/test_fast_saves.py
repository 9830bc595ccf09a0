"""`acpfs.torch`: the tests below `saves` need torch, and run in the interpreter that has it, in a
mount that is made here.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.conftest import Place
from tests.training.test_ranks import LIBRARIES, REPOSITORY

SAVES = Path(__file__).parent / "saves"
TIMEOUT_S = 900

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.mount]


@pytest.mark.timeout(TIMEOUT_S)
def test_with_torch(place: Place, torch_python: str, tmp_path: Path) -> None:
    words = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["--basetemp", str(tmp_path / "plain"), str(SAVES)]
    done = subprocess.run(
        [torch_python, "-m", "tests.training.ranks", str(LIBRARIES), *words],
        cwd=REPOSITORY,
        timeout=TIMEOUT_S,
        env={**os.environ, "ACPFS_SAVES": str(place.directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-4000:]}"
    place.settle()
