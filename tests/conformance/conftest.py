"""A fresh directory for each test, on every file system under test."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.targets import Target

_NUMBERS = itertools.count(1)


@pytest.fixture
def d(target: Target) -> Iterator[Path]:
    """An empty directory, open to all users."""
    directory = target.root / f"t{next(_NUMBERS)}"
    directory.mkdir()
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)
