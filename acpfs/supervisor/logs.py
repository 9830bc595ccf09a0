"""Where log lines go and how they look: key=value to stderr, JSON to a rotating file; level and file changeable at run time.

Everything logs through structlog (or logging) by name and knows nothing of this. State of the process: configured once, in the daemon.
"""

from __future__ import annotations

import io
import logging
import logging.handlers
import os
import sys
from pathlib import Path
from typing import Any

import structlog

FILE_BYTES_MAX = 10_000_000
FILES_KEPT = 5
_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
    structlog.processors.format_exc_info,
]


class RotatingFile(logging.handlers.RotatingFileHandler):
    """A rotating file that also takes what the interpreter and C libraries write to stderr."""

    def __init__(self, path: Path, *, with_stderr: bool) -> None:
        """`with_stderr`: descriptors 1 and 2 follow the file through every rotation."""
        self._with_stderr = with_stderr
        super().__init__(path, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT - 1, encoding="utf-8", errors="backslashreplace")

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
    """Log to `file`, or to stderr when there is none. `detached`: stderr is nobody's, so it follows the file.

    Raises:
        OSError: the file cannot be opened.
    """
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFile(file, with_stderr=detached)
    handler.setFormatter(_formatter(as_json=file is not None))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    set_level(level)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def set_level(level: str) -> None:
    """Change what is logged, now."""
    logging.getLogger().setLevel(level.upper())


def reopen() -> None:
    """SIGHUP: a log rotated by others goes on in a new file."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RotatingFile):
            handler.reopen()


def _formatter(*, as_json: bool) -> logging.Formatter:
    renderer: structlog.typing.Processor
    if as_json:
        renderer = structlog.processors.JSONRenderer(ensure_ascii=True, default=repr)
    else:
        renderer = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "logger", "event"], bool_as_flag=False)
    final: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    if not as_json:
        final.insert(1, _plain_values)
        if os.environ.get("JOURNAL_STREAM"):
            final.append(_journal_priority)
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=final)


def _plain_values(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A traceback keeps its lines; keys that key=value cannot carry are none of ours."""
    return {key.replace(" ", "_"): value for key, value in event.items()}


def _journal_priority(_logger: Any, _method: str, line: Any) -> Any:
    """`<3>` at the start of a line is how the journal learns that it is an error."""
    text = str(line)
    level = next((word.removeprefix("level=") for word in text.split(" ", 3) if word.startswith("level=")), "info")
    return f"<{_PRIORITY.get(level, 6)}>{text}"
