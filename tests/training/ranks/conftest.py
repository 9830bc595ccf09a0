"""What needs torch: collected by the interpreter that has it (`tests/training/test_ranks.py` runs
it).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["*.py"]


@pytest.fixture(scope="session")
def yardsticks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `yardstick` keeps runs without a fault: one of each layout for all tests."""
    return tmp_path_factory.mktemp("yardsticks")
