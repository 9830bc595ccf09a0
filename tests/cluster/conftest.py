"""What members share."""

from pathlib import Path

import pytest


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """An empty backing directory for several mounts."""
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory
