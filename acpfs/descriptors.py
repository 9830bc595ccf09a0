"""Waiting for a descriptor, whatever its number: `select.select` takes none beyond 1023, and a
training process, or a worker, has more.
"""

from __future__ import annotations

import select
from typing import Protocol


class HasDescriptor(Protocol):
    """A file, socket or pipe object."""

    def fileno(self) -> int:
        """Its descriptor."""


def readable(descriptor: int | HasDescriptor, timeout_s: float | None) -> bool:
    """Whether there is something to read, or an end, within that time; None: wait for ever.

    For a pidfd: whether the process has ended.
    """
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))
