"""Sizes that a mount has learnt, kept for the next one: a RAM tier that is drained is removed, and
its state with it.

A file beside what else a reboot must not take. It is a help and no more: one that is missing,
damaged or of another time costs a slower first save.
"""

from __future__ import annotations

import os
from pathlib import Path

from acpfs.config import Settings
from acpfs.filesystem.expectations import Expectations
from acpfs.mounting.remembered import RememberedFile

SIZES_MAX = 1000
"""The newest ones."""


class LearnedSizes:
    """What is kept for one backing directory's path."""

    def __init__(self, settings: Settings, runtime_dir: Path) -> None:
        self._file = RememberedFile(settings, runtime_dir, "sizes")

    def recall(self, expectations: Expectations) -> None:
        """Expect what the last mount has learnt."""
        for path, size in list(self._file.read().items())[:SIZES_MAX]:
            if type(size) is int:
                expectations.learn(os.fsencode(path), size)

    def keep(self, expectations: Expectations) -> None:
        """For the next mount."""
        kept: dict[str, object] = {
            os.fsdecode(pattern): size for pattern, size in expectations.newest(SIZES_MAX)
        }
        if kept:
            self._file.write(kept)
