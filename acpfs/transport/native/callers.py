"""Who waits for an answer, and whether it is about to die, as far as that can be seen.

Knows /proc and signals; any thread.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path

from acpfs.processes import PROC, directory_of, filesystem_ids, is_ended_by_signal


class Fate(enum.Enum):
    """What becomes of a caller."""

    LIVES = "lives"
    DYING = "dying"
    """A deadly signal waits for it, or it is gone."""
    UNSEEN = "unseen"
    """It cannot be told: it is in another PID namespace (0), or /proc does not show it
    (`hidepid`).
    """


NOT_SAID = 0xFFFFFFFF
"""What the kernel gives for user and group where idmapped mounts are allowed, in every request but
those that make a file (Linux 6.12, fs/fuse/dev.c: FUSE_INVALID_UIDGID). A file belongs to who makes
it as the mount that was used maps him; nobody else is mapped.
"""
NOBODY = 65534


def user_of(uid: int, gid: int, pid: int, proc: Path = PROC) -> tuple[int, int]:
    """User and group of a thread that makes a call, as a request gives all three.

    Where the kernel does not say, those of the host by which the thread is known to file systems;
    of one that cannot be told, `NOBODY`, who has no privilege.
    """
    if uid != NOT_SAID:
        return uid, gid
    directory = directory_of(pid, proc)
    if directory is None:
        return NOBODY, NOBODY
    try:
        return filesystem_ids(directory)
    except OSError:
        return NOBODY, NOBODY


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
