"""The kernel's request time-outs (Linux 6.15): it aborts the mount when one call takes longer, and
calls of ours may wait for hours.

A writer waits for room as long as the drain needs. `default_request_timeout` is for servers that do
not say what they want, so the native transport says it; `max_request_timeout` binds every server,
so all that is left is a warning. Pure but for reading the two.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

SYSCTLS = Path("/proc/sys/fs/fuse")
LONGEST_S = 0xFFFF
"""Most that an answer to INIT can ask for: 18 hours."""


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """Seconds; 0: none."""

    default_s: int
    max_s: int

    @classmethod
    def read(cls, directory: Path = SYSCTLS) -> RequestTimeouts:
        """Those of this machine; none before Linux 6.15."""
        return cls(
            _number(directory / "default_request_timeout"),
            _number(directory / "max_request_timeout"),
        )

    @property
    def to_ask_for_s(self) -> int:
        """What a server should ask for; 0: nothing, for then there is none."""
        return LONGEST_S if self.default_s else 0

    def warning(self, *, asks: bool) -> str:
        """What an operator should know; "" for nothing.

        `asks`: this transport can say what it wants.
        """
        if self.max_s:
            name = "max"
            limit_s = self.max_s
        elif self.default_s and not asks:
            name = "default"
            limit_s = self.default_s
        else:
            return ""
        return (
            f"fs.fuse.{name}_request_timeout = {limit_s} s: the kernel aborts the mount when a "
            "call waits longer, for room in RAM or for "
            "the backing directory; set it to 0"
        )


def _number(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return 0
