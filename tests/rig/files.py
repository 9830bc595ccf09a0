"""Files of many blocks, and what is in them."""

from __future__ import annotations

import hashlib
from pathlib import Path


def write_blocks(path: Path, block: bytes, count: int) -> str:
    """A new file, unbuffered; returns its checksum."""
    with open(path, "wb", buffering=0) as file:
        for _ in range(count):
            piece = memoryview(block)
            while piece:
                piece = piece[file.write(piece) :]
    return hashlib.sha256(block * count).hexdigest()


def checksum(path: Path) -> str:
    """Of all its bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
