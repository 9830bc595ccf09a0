"""The record of a file's bytes in the RAM tier."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from acpfs.types import TierId

UNSEEN = (0, -1)
"""Looks like no file: every look at one finds it changed."""


@dataclass(slots=True, eq=False)
class Content:
    """Current content of a regular file: all bytes of one tier file, or of one staging file (`overflow`)."""

    tier_id: TierId
    overflow: str = ""
    """Name of the staging file that has the bytes, because RAM had no room for them; then `tier_id` is 0."""
    sealed: bool = False
    """A version needs the staging file as it is; it changes only after that is persisted."""
    modified: bool = False
    """Changed since the last version was frozen (or never frozen)."""
    modified_since: float = 0.0
    """Monotonic time, seconds, of the first such change."""
    interrupted: bool = False
    """Its writer was lost with an earlier daemon: shown, but not committed before someone decides."""
    seen: tuple[int, int] = UNSEEN
    """(mtime in ns, size) that the tier file was marked with (`kernel_writes`); differs: the kernel may have written in passthrough."""
    fd: int = -1
    """Open while the file is; -1 otherwise."""
    in_flight: int = 0
    """Reads and writes that use the descriptor without the lock: it is closed by the last of them."""
    closing: bool = False
    busy: Future[None] | None = None
    """A copy of its bytes is under way; changes wait for it."""
    failed: int = 0
    """errno of a write that failed at `failed_at`: the file is not published before those bytes are written, or truncated away."""
    failed_at: int = 0
