"""A few histories of the simulation, always the same ones; `python -m tests.sim` runs others.

Each run is a process of its own: a history has its own clock, and its own calls of `os`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
HISTORIES = 14
"""Of each profile."""
FIRST = 14
"""With these, all of `REACHED` is reached: look for others where a change makes them other
histories.
"""
REACHED = (
    "files said to be persisted",
    "files that ended with their mapping",
    "lives with copies aside",
    "lives with evictions",
    "lives with files that outgrew RAM",
    "lives with holds",
    "lives with operations left out",
    "lives with repairs",
    "lives with retries",
    "lives with writes without a page",
    "looks at what nobody changes",
    "looks at which all was mirrored",
    "pointers seen",
    "RAM came back",
    "reads beside others",
    "waits that ended",
    "writes for nobody",
    "writes that were held up",
)
PATIENCE_S = 800


def simulate(*arguments: str, hash_seed: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments],
        cwd=TREE,
        env={**os.environ, "PYTHONPATH": str(TREE), "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.clause("S60", "S61", "S430", "S492")
def test_no_history_fails() -> None:
    done = simulate("--from", str(FIRST), "--seeds", str(HISTORIES))
    assert done.returncode == 0, done.stdout + done.stderr
    for place in REACHED:
        assert re.search(rf"'{place}': [1-9]", done.stdout), f"none has {place}: {done.stdout}"


@pytest.mark.slow
@pytest.mark.clause("S491")
def test_what_failed_once_does_not_fail() -> None:
    done = simulate("--corpus")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_is_the_same_history_in_each_process() -> None:
    """Also where sets of names have another order, as they have with another Python."""
    first, second = (simulate("--seeds", "2", "--digests", hash_seed=one) for one in (0, 77))
    digests = [line for line in first.stdout.splitlines() if "histories" not in line]
    assert digests
    assert digests == [line for line in second.stdout.splitlines() if "histories" not in line]
