"""What a script may have under the tracker's name, and what has to be left of it when a gasp has
taken that.
"""

from __future__ import annotations

import os
from pathlib import Path

CHECKPOINT = b"a whole checkpoint " * 1000
TAKEN = (
    "link to a checkpoint",
    "link to a directory",
    "link to nothing",
    "second name",
    "checkpoint",
    "directory",
    "pipe",
)


def take(directory: Path, kind: str) -> dict[str, bytes]:
    """Take the name `latest` there; what is to be there afterwards."""
    latest, checkpoint, other = (directory / name for name in ("latest", "ckpt-5.pt", "ckpt-5"))
    checkpoint.write_bytes(b"small" if kind == "second name" else CHECKPOINT)
    other.mkdir()
    (other / "part").write_bytes(CHECKPOINT)
    left = {"ckpt-5.pt": checkpoint.read_bytes(), "ckpt-5/part": CHECKPOINT}
    if kind == "second name":
        latest.hardlink_to(checkpoint)
    elif kind == "checkpoint":
        latest.write_bytes(CHECKPOINT)
        left["latest.before-gasp-2"] = CHECKPOINT
    elif kind == "directory":
        latest.mkdir()
        (latest / "part").write_bytes(CHECKPOINT)
        left["latest.before-gasp-2/part"] = CHECKPOINT
    elif kind == "pipe":
        os.mkfifo(latest)
    else:
        targets = {"link to a checkpoint": checkpoint.name, "link to a directory": other.name}
        latest.symlink_to(targets.get(kind, "nowhere"))
    return left


def assert_only_the_name_went(directory: Path, left: dict[str, bytes]) -> None:
    """The tracker is a file of its own, and everything else is as it was."""
    latest = directory / "latest"
    assert not latest.is_symlink()
    assert latest.read_text() == "step-7\n"
    assert latest.lstat().st_nlink == 1
    assert {name: (directory / name).read_bytes() for name in left} == left
    assert not (directory / "nowhere").exists()
