"""A small file about one backing directory that outlasts its RAM tier and a reboot: JSON beside
what the runtime directory keeps.

Whoever reads it must do without: it may be missing, damaged or of another time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from acpfs.config import Settings
from acpfs.control import runtime
from acpfs.logger import get_logger

_BYTES_MAX = 8 << 20

log = get_logger(__name__)


class RememberedFile:
    """One kind of knowledge about the backing directory's path."""

    def __init__(self, settings: Settings, runtime_dir: Path, kind: str) -> None:
        name = hashlib.sha256(os.fsencode(settings.backing)).hexdigest()[:16]
        self._kind = kind
        self._file = runtime.memory_dir(runtime_dir) / kind / f"{name}.json"

    def read(self) -> dict[str, object]:
        """What was written last; nothing, where that cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            with open(self._file, "rb") as file:
                found = json.loads(file.read(_BYTES_MAX))
            return found if isinstance(found, dict) else {}
        return {}

    def write(self, what: dict[str, object]) -> None:
        """For the next mount, whole or not at all. Where that cannot be, the log says so."""
        temporary = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(json.dumps(what) + "\n", encoding="utf-8")
            temporary.replace(self._file)
        except OSError as error:
            log.warning(
                "something cannot be remembered for the next mount",
                what=self._kind,
                file=str(self._file),
                error=error.strerror,
            )
            with contextlib.suppress(OSError):
                temporary.unlink()
