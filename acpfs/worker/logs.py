"""Where log lines go and how they look: key=value to stderr, JSON to a rotating file; level and
file changeable at run time.

Everything logs through `acpfs.logger` (libraries through logging) by name and knows nothing of
this. State of the process: configured once, in the daemon.
"""

from __future__ import annotations

import io
import json
import logging
import logging.handlers
import os
import sys
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from acpfs.logger import FIELDS

FILE_BYTES_MAX = 10_000_000
FILES_KEPT = 5
_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


class RotatingFile(logging.handlers.RotatingFileHandler):
    """A rotating file that also takes what the interpreter and C libraries write to stderr."""

    def __init__(self, path: Path, *, with_stderr: bool) -> None:
        """`with_stderr`: descriptors 1 and 2 follow the file through every rotation."""
        self._with_stderr = with_stderr
        super().__init__(
            path,
            maxBytes=FILE_BYTES_MAX,
            backupCount=FILES_KEPT - 1,
            encoding="utf-8",
            errors="backslashreplace",
        )

    def _open(self) -> io.TextIOWrapper:
        stream = super()._open()
        if self._with_stderr:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        return stream

    def reopen(self) -> None:
        """The file may have been moved away: open it by its name again."""
        self.acquire()
        try:
            if self.stream is not None:
                self.stream.close()
            self.stream = self._open()
        finally:
            self.release()


def configure(level: str, file: Path | None, *, detached: bool = False) -> None:
    """Log to `file`, or to stderr when there is none.

    `detached`: stderr is nobody's, so it follows the file.

    Raises:
        OSError: the file cannot be opened.
    """
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFile(file, with_stderr=detached)
    handler.setFormatter(
        _JsonLines()
        if file is not None
        else _KeyValueLines(for_journal=bool(os.environ.get("JOURNAL_STREAM")))
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """Change what is logged, now."""
    logging.getLogger().setLevel(level.upper())


def reopen() -> None:
    """SIGHUP: a log rotated by others goes on in a new file."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RotatingFile):
            handler.reopen()


class _JsonLines(logging.Formatter):
    """One object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_told(record), ensure_ascii=True, default=repr)


class _KeyValueLines(logging.Formatter):
    """logfmt.

    `for_journal`: `<3>` at the start of a line is how the journal learns that it is an error.
    """

    def __init__(self, *, for_journal: bool) -> None:
        super().__init__()
        self._for_journal = for_journal

    def format(self, record: logging.LogRecord) -> str:
        told = _told(record)
        line = " ".join(f"{key.replace(' ', '_')}={_value(value)}" for key, value in told.items())
        return f"<{_PRIORITY.get(told['level'], 6)}>{line}" if self._for_journal else line


def _told(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says, in its order. A field does not hide what every line has."""
    told: dict[str, Any] = {
        "timestamp": datetime.fromtimestamp(record.created, timezone.utc).strftime(
            "%Y-%m-%dT%H:%M:%S.%fZ"
        ),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    told = {**told, **getattr(record, FIELDS, {}), **told}
    if record.exc_info and record.exc_info[1] is not None:
        told["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
    if record.stack_info:
        told["stack"] = record.stack_info
    return told


def _value(value: object) -> str:
    """As logfmt has it."""
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if any(sign in text for sign in ' ="'):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text.replace("\n", "\\n")
