"""What a loss of power left of a series of checkpoints: which are whole, and whether the pointer
names one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from bench.layout import MODEL, POINTER

CHECKSUM = "user.acpfs.xxh3"
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Left:
    """Numbers of steps."""

    found: list[int]
    """Of which anything was there."""
    whole: list[int]
    """That load as they were saved."""
    pointer: str
    checksums: str
    """Of the newest whole one: "verified", "DIFFERS", or "none"."""

    @property
    def pointer_is_true(self) -> bool:
        """It names a checkpoint that is whole, or nothing at all where nothing is."""
        return self.pointer in {f"step-{step}" for step in self.whole} or (
            not self.found and not self.pointer
        )

    def words(self) -> str:
        """For a cell of a table."""
        newest = f"newest whole: step {self.whole[-1]}" if self.whole else "none whole"
        named = f"`{POINTER}` says {self.pointer or 'nothing'}" + (
            "" if self.pointer_is_true else ": NOT WHOLE"
        )
        return f"{newest}; {named}"


def look(directory: Path, whole: Callable[[int], bool]) -> Left:
    """`whole` loads a step and compares every bit."""
    steps = (
        sorted(int(entry.name.partition("-")[2]) for entry in directory.glob("step-*"))
        if directory.exists()
        else []
    )
    good = [step for step in steps if whole(step)]
    pointer = directory / POINTER
    said = pointer.read_text(errors="replace").strip("\0\n ") if pointer.exists() else ""
    return Left(
        steps, good, said, checked(directory / f"step-{good[-1]}" / MODEL) if good else "none"
    )


def checked(path: Path) -> str:
    """Whether a file's bytes have the checksum that acpfs wrote beside them."""
    try:
        noted = os.getxattr(path, CHECKSUM).decode().partition(" ")[0]
    except OSError:
        return "none"
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return "verified" if digest.hexdigest() in noted else "DIFFERS"
