"""The checks of the tree as tests, so that one runner does all: format, lint, types, shell,
documents, package, the demonstration.

`tools/test NAME` runs one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PYTHON = sys.executable
SCRIPTS = ("tools/test", "tools/quickstart", "tools/bundle", "tools/environment.sh", ".ci/run")
DEMONSTRATION_BYTES = 128 << 20
TIMEOUT_S = 1500
CHECKS = {
    "types": [PYTHON, "-m", "mypy", "--strict", "acpfs", "bench", "tools", "tests"],
    "format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "lint": [PYTHON, "-m", "ruff", "check", "."],
    "documents": [PYTHON, "tools/check_documents.py"],
}


def ended(command: list[str], **environment: str) -> str:
    """What a command says that must succeed."""
    words = {"cwd": REPOSITORY, "env": {**os.environ, **environment}, "stdin": subprocess.DEVNULL}
    done = subprocess.run(
        command, **words, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )  # type: ignore[call-overload]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.mark.check
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    ended(CHECKS[name])


@pytest.mark.check
@pytest.mark.parametrize("script", SCRIPTS)
def test_shell(script: str) -> None:
    ended(["bash", "-n", script])


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_package(tmp_path: Path) -> None:
    ended([PYTHON, "tools/check_package.py", str(tmp_path / "wheel")])


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.timeout(1800)
def test_quickstart(tmp_path: Path) -> None:
    """The README's first command, with less to save: whole after the kill and after the loss of
    power, whatever the times.

    Where PyTorch is there already, as in CI, it is not installed once more for this.
    """
    there = {"ACPFS_QUICKSTART_PYTHON": PYTHON} if "ACPFS_TORCH_PYTHON" in os.environ else {}
    picture = tmp_path / "stalls.svg"
    size = os.environ.get("ACPFS_QUICKSTART_BYTES", str(DEMONSTRATION_BYTES))
    ended(
        ["bash", "tools/quickstart", "--quick"],
        ACPFS_QUICKSTART_BYTES=size,
        ACPFS_QUICKSTART_PICTURE=str(picture),
        **there,
    )
    assert picture.read_text().endswith("</svg>\n")
