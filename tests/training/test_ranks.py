"""The tests below `ranks` need torch: they run in the interpreter that has it, one process for all,
from which ranks are forked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from tests.frameworks.conftest import interpreter

REPOSITORY = Path(__file__).parents[2]
RANKS, ADAPTERS, TRAINERS = (
    Path(__file__).parent / name for name in ("ranks", "adapters", "trainers")
)
LIBRARIES = Path(xxhash.__file__).parents[1]
TIMEOUT_S = 900
LONG_TIMEOUT_S = 3600


def run_ranks(
    python: str, tests: Path, tmp_path: Path, marker: str, timeout_s: float = TIMEOUT_S
) -> None:
    words = [
        "-q",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--basetemp",
        str(tmp_path / "ranks"),
        "-m",
        marker,
        str(tests),
    ]
    command = [python, "-m", "tests.training.ranks", str(LIBRARIES), *words]
    environment = {**os.environ, "ACPFS_TRAIN_COORDINATOR_PYTHON": sys.executable}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        timeout=timeout_s,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-4000:]}"


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_with_torch(tmp_path: Path) -> None:
    run_ranks(interpreter("ACPFS_TORCH_PYTHON", "torch"), RANKS, tmp_path, "not long")


@pytest.mark.frameworks
@pytest.mark.long
@pytest.mark.mount
@pytest.mark.timeout(LONG_TIMEOUT_S)
def test_every_point_and_circumstance(tmp_path: Path) -> None:
    run_ranks(interpreter("ACPFS_TORCH_PYTHON", "torch"), RANKS, tmp_path, "long", LONG_TIMEOUT_S)


@pytest.mark.frameworks
@pytest.mark.long
@pytest.mark.timeout(LONG_TIMEOUT_S)
def test_adapters_of_frameworks(tmp_path: Path) -> None:
    run_ranks(
        interpreter("ACPFS_ADAPTERS_PYTHON", "lightning"),
        ADAPTERS,
        tmp_path,
        "long",
        LONG_TIMEOUT_S,
    )


@pytest.mark.frameworks
@pytest.mark.long
@pytest.mark.timeout(LONG_TIMEOUT_S)
@pytest.mark.parametrize("of", ["deepspeed", "torchtitan", "torchtitan_gasp"])
def test_trainers_that_keep_their_loop(tmp_path: Path, of: str) -> None:
    """A process for each: ranks are forked, and those of one have nothing of the other."""
    python = interpreter("ACPFS_TRAINERS_PYTHON", "torchtitan")
    run_ranks(python, TRAINERS / f"test_{of}.py", tmp_path, "long", LONG_TIMEOUT_S)
