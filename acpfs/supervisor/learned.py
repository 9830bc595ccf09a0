"""Sizes that a mount has learnt, kept for the next one: a RAM tier that is drained is removed, and its state with it.

A file beside what else a reboot must not take. It is a help and no more: one that is missing, damaged or of another time costs a slower
first save.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from acpfs.config import Settings
from acpfs.control import runtime
from acpfs.filesystem.expectations import Expectations
from acpfs.logger import get_logger

SIZES_MAX = 1000
"""The newest ones."""
_BYTES_MAX = 8 << 20

log = get_logger(__name__)


class LearnedSizes:
    """What is kept for one backing directory's path."""

    def __init__(self, settings: Settings, runtime_dir: Path) -> None:
        name = hashlib.sha256(os.fsencode(settings.backing)).hexdigest()[:16]
        self._file = runtime.memory_dir(runtime_dir) / "sizes" / f"{name}.json"

    def recall(self, expectations: Expectations) -> None:
        """Expect what the last mount has learnt."""
        with contextlib.suppress(OSError, ValueError):
            with open(self._file, "rb") as file:
                kept = json.loads(file.read(_BYTES_MAX))
            if isinstance(kept, dict):
                for path, size in list(kept.items())[:SIZES_MAX]:
                    if isinstance(size, int):
                        expectations.learn(os.fsencode(path), size)

    def keep(self, expectations: Expectations) -> None:
        """For the next mount. Where that cannot be, the log says so."""
        kept = {os.fsdecode(pattern): size for pattern, size in expectations.newest(SIZES_MAX)}
        if not kept:
            return
        temporary = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(json.dumps(kept) + "\n", encoding="utf-8")
            temporary.replace(self._file)
        except OSError as error:
            log.warning("what was learnt about sizes cannot be kept for the next mount", file=str(self._file), error=error.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink()
