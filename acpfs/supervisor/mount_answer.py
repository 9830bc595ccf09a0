"""What whoever mounts is told: the steps of the start, and then once that the mount is ready or
what is wrong.

Owns the pipe to that command. The supervisor's; standard library only, no thread. Knows nothing of
what it says.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any


class MountAnswer:
    """A pipe, or nothing in the foreground."""

    def __init__(self, fd: int) -> None:
        """`fd`: -1 where nobody waits."""
        if fd >= 0:
            os.set_inheritable(fd, False)
        self._fd = fd

    def write(self, message: dict[str, Any]) -> None:
        """One line; one that has gone does not matter."""
        if self._fd >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._fd, json.dumps(message).encode() + b"\n")

    def last(self, message: dict[str, Any]) -> None:
        """The outcome: nothing is said after it."""
        self.write(message)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def settings_from_input() -> dict[str, Any]:
    """What whoever mounts has written to standard input, which nothing reads after this."""
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.read() or b"{}")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return settings
