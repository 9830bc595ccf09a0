"""Files and names of which fsync has answered."""

from __future__ import annotations

import os
from pathlib import Path


def stored(path: Path, data: bytes) -> None:
    """Written, and fsync has returned."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """fsync of its names has returned."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
