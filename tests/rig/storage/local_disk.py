"""A local file system of another kind in a file: btrfs, whose directories have one link whatever is
in them.

Owns the loop device and the mount. Must not know acpfs, and knows no servers: for suites that ask
what any file system would do.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

IMAGE_BYTES = 4 << 30
"""Sparse: it takes what the tests write."""
MAKERS = {"btrfs": ("mkfs.btrfs", "-q")}
"""Kind → the command that makes it, of the packages that CONFORMANCE names."""


class LocalDisk:
    """One file system, mounted as long as the block runs."""

    def __init__(self, kind: str, base: Path) -> None:
        """`base`: a directory that does not exist yet."""
        self._kind = kind
        self._base = base

    def __enter__(self) -> LocalDisk:
        self._base.mkdir(parents=True)
        image = self._base / "image"
        image.touch()
        os.truncate(image, IMAGE_BYTES)
        subprocess.run([*MAKERS[self._kind], str(image)], check=True)
        return self

    def __exit__(self, *error: object) -> None:
        for path in self._base.glob("client*"):
            subprocess.run(["umount", "-l", str(path)], check=False, timeout=120)
        (self._base / "image").unlink()

    def client(self, name: str) -> Path:
        """Mount it."""
        path = self._base / name
        path.mkdir()
        image = str(self._base / "image")
        subprocess.run(["mount", "-t", self._kind, "-o", "loop", image, str(path)], check=True)
        return path
