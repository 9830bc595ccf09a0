"""Collected by the interpreter that has torch (`tests/frameworks/test_fast_saves.py` runs it), in a
mount that `ACPFS_SAVES` names.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["*.py"]


@pytest.fixture
def mounted(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory in the mount, for this test alone."""
    directory = Path(os.environ["ACPFS_SAVES"]) / request.node.name.replace("/", "-")
    directory.mkdir()
    yield directory
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
