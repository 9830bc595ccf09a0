"""Taking set-uid and set-gid away where the kernel leaves it to the daemon.

With HANDLE_KILLPRIV_V2 it leaves all of it to the daemon, and says when. Without, it does it
itself, but for an open with O_TRUNC: that clears the bits only in the kernel's own copy, because
the truncation is the daemon's. Any thread; no state.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import AttributeChange, Attributes, Caller
from acpfs.filesystem.steps import Call
from acpfs.types import Ino


def truncates_unprivileged(flags: int, caller: Caller) -> bool:
    """Whether an open takes the bits away of which the kernel says nothing.

    Root alone is taken to have CAP_FSETID.
    """
    return bool(flags & os.O_TRUNC) and caller.uid != 0


async def and_clear(fs: FileSystem, ino: Ino, caller: Caller, call: Call[Any]) -> Any:
    """A call that changes a file or gives it away, and its value; the bits go in its last step."""
    value = await call
    mode = (await fs.getattr(ino, None)).mode
    kept = _without(mode)
    if kept == mode:
        return value
    attributes = await fs.setattr(ino, AttributeChange(mode=stat.S_IMODE(kept)), None, caller)
    return attributes if isinstance(value, Attributes) else value


def _without(mode: int) -> int:
    """The mode after a change: set-gid without permission to execute means nothing, and stays."""
    if stat.S_ISDIR(mode):
        return mode
    return mode & ~stat.S_ISUID & ~(stat.S_ISGID if mode & stat.S_IXGRP else 0)
