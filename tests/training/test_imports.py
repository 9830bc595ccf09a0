"""Planning needs no member, and a member needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

QUESTION = """
import sys
{statement}
heavy = {{"torch", "transformers", "pyfuse3", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "statement",
    [
        "from acpfs.training import protect",
        "import acpfs.training.interval",
        "import acpfs.training.coordinator.__main__",
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUESTION.format(statement=statement)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_planning_imports_no_member() -> None:
    words = (
        "import sys; import acpfs.training.interval, acpfs.training.planner; assert 'trio' not "
        "in sys.modules"
    )
    subprocess.run([sys.executable, "-c", words], timeout=60, check=True)
