"""What everything logs through: one event in plain words, and its fields by name.

Over the standard logging, so that the lines of libraries come along, and imported in a millisecond.
`worker.logs` says where lines go and how they look; until it has, warnings go to stderr.
Thread-safe.
"""

from __future__ import annotations

import logging

FIELDS = "acpfs_fields"
"""The attribute of a log record that has them."""


class Logger:
    """One per module."""

    def __init__(self, name: str) -> None:
        """`name`: as logging has it; a module's `__name__`."""
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        """What only somebody who looks for a defect wants to read."""
        self._log(logging.DEBUG, event, None, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """What an operator may want to know later."""
        self._log(logging.INFO, event, None, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """What an operator should look at."""
        self._log(logging.WARNING, event, None, fields)

    def error(
        self, event: str, /, *, exc_info: BaseException | None = None, **fields: object
    ) -> None:
        """What failed. `exc_info`: an exception whose stack is told too."""
        self._log(logging.ERROR, event, exc_info, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """What failed, with the stack of the exception that is being handled."""
        self._log(logging.ERROR, event, True, fields)

    def _log(
        self,
        level: int,
        event: str,
        exc_info: BaseException | bool | None,
        fields: dict[str, object],
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, exc_info=exc_info, extra={FIELDS: fields})


def shown(path: bytes | tuple[bytes, ...]) -> str:
    """A path, or its names, as log and messages show it; bytes that are no text by their
    numbers.
    """
    return (path if isinstance(path, bytes) else b"/".join(path)).decode(
        "utf-8", "backslashreplace"
    )


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(name)
