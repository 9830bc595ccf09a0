"""What a coordinator leaves in the job's directory: its log, and one line per fault for the
interval advisor.

State of the process: configured once, in the coordinator's program. Files are written behind it
(`Behind`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from acpfs.logger import FIELDS, get_logger

_log = get_logger(__name__)

FILE_BYTES_MAX = 10_000_000
FILES_KEPT = 5
FAULTS = "faults.jsonl"


class Behind:
    """Writes files in a thread of its own: a mount whose RAM is full, or that does not answer,
    holds up nobody who decides.
    """

    def __init__(self) -> None:
        self._writes: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], object]) -> None:
        """It is done after all that was put before; an `OSError` of it is the log's only loss."""
        self._writes.put(write)

    def wait(self, timeout_s: float) -> bool:
        """Whether all that was put before is written, so long at most."""
        done = threading.Event()
        self.put(done.set)
        return done.wait(timeout_s)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._writes.get()()


behind = Behind()
"""Of this process."""


def log_to(file: Path) -> None:
    """Everything that is logged goes to this file, as JSON lines, and to four older ones.

    Raises:
        OSError: it cannot be opened.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = logging.getLogger()
    root.addHandler(_ToFile(file))
    root.setLevel(logging.INFO)


class _ToFile(logging.Handler):
    """Formats at once, writes later."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.setFormatter(_JsonLines())
        self._file = _Reopened(
            file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT - 1, errors="backslashreplace"
        )

    def emit(self, record: logging.LogRecord) -> None:
        line = logging.makeLogRecord({"msg": self.format(record)})
        behind.put(lambda: self._file.emit(line))


class _Reopened(logging.handlers.RotatingFileHandler):
    """One whose file is opened again when it cannot be written: the mount may have been made
    anew.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # as logging calls it
        stream = self.stream
        self.stream = None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        told = {
            "timestamp": at,
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=repr)


def note_fault(job_directory: Path, fields: Mapping[str, Any]) -> None:
    """Append a fault: when, who was lost and where they were, S, what was saved, how long it
    took.
    """
    line = json.dumps({"at": round(time.time(), 3), **fields}, default=repr) + "\n"

    def write() -> None:
        try:
            with (job_directory / FAULTS).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            _log.error("the fault could not be noted", error=str(error))

    behind.put(write)
