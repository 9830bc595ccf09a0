"""Whether whoever waits for an answer is about to die, as far as that can be seen.

Knows /proc and signals; any thread.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path

from acpfs.processes import PROC, directory_of, is_ended_by_signal


class Fate(enum.Enum):
    """What becomes of a caller."""

    LIVES = "lives"
    DYING = "dying"
    """A deadly signal waits for it, or it is gone."""
    UNSEEN = "unseen"
    """It cannot be told: it is in another PID namespace (0), or /proc does not show it
    (`hidepid`).
    """


def fate_of(pid: int, proc: Path = PROC) -> Fate:
    """What becomes of a thread that makes a call; `pid` as the kernel reports it."""
    if pid and not _exists(pid):
        return Fate.DYING
    directory = directory_of(pid, proc)
    if directory is None:
        return Fate.UNSEEN
    try:
        return Fate.DYING if is_ended_by_signal(directory, own=True) else Fate.LIVES
    except OSError:
        return Fate.UNSEEN if _exists(pid) else Fate.DYING


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
