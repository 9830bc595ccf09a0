"""What a coordinator leaves in the job's directory: its log, and one line per fault for the interval advisor.

State of the process: configured once, in the coordinator's program.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from acpfs.logger import FIELDS

FILE_BYTES_MAX = 10_000_000
FILES_KEPT = 5
FAULTS = "faults.jsonl"


def log_to(file: Path) -> None:
    """Everything that is logged goes to this file, as JSON lines, and to four older ones.

    Raises:
        OSError: it cannot be opened.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT - 1, errors="backslashreplace")
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        told = {"timestamp": at, "level": record.levelname.lower(), "event": record.getMessage(), **getattr(record, FIELDS, {})}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=repr)


def note_fault(job_directory: Path, fields: Mapping[str, Any]) -> None:
    """Append a fault: when, who was lost and where they were, S, what was saved, how long it took.

    Raises:
        OSError: it cannot be written.
    """
    line = json.dumps({"at": round(time.time(), 3), **fields}, default=repr) + "\n"
    with (job_directory / FAULTS).open("a", encoding="utf-8") as file:
        file.write(line)
