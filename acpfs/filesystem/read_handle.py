"""An open file as far as reading from the backing directory goes: what the view on the lower layer
needs to know of a handle.

The handle itself, with lane and flags, is `kept_handles.Handle`.
"""

from __future__ import annotations

from typing import Protocol

from acpfs.filesystem.nodes import Node


class ReadHandle(Protocol):
    """An open file as far as reading from the backing directory goes."""

    node: Node
    lower_fd: int
    """Descriptor on the backing directory; -1: not open yet."""
    lower_ino: int
    """Inode number there of what it is open on."""
    left_fds: list[int]
    """What was open before that: others may still read through it."""
