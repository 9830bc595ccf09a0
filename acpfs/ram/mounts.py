"""The mount table, and the two system calls that change it.

Never looks at a mount point itself (a dead or hung mount would answer with a hang): everything here reads
/proc/self/mountinfo. Thread-safe.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 2, 4, 8, 32
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

_libc = ctypes.CDLL(None, use_errno=True)
_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of the mount table. `path` is what os.fsdecode makes of its bytes."""

    path: str
    kind: str
    source: str
    options: str
    device: str


def mount_table(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[MountEntry]:
    """All mounts that this process sees, oldest first."""
    entries = []
    for line in mountinfo.read_bytes().splitlines():
        before, _dash, after = line.partition(b" - ")
        fields, (kind, source, options) = before.split(b" "), after.split(b" ", 2)
        entries.append(MountEntry(_text(fields[4]), _text(kind), _text(source), _text(options), _text(fields[2])))
    return entries


def mounted_at(path: str) -> MountEntry | None:
    """The topmost mount at exactly this path."""
    return next((entry for entry in reversed(mount_table()) if entry.path == path), None)


def mount_tmpfs(directory: Path, options: str, *, remount: bool = False) -> None:
    """Mount a tmpfs, or change the options of one.

    Raises:
        OSError: EPERM without CAP_SYS_ADMIN, EINVAL for an option that this kernel does not know.
    """
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | (MS_REMOUNT if remount else 0)
    _checked(_libc.mount(b"acpfs-ram", os.fsencode(directory), b"tmpfs", ctypes.c_ulong(flags), options.encode()), directory)


def unmount(path: str | Path, *, detach: bool = False) -> None:
    """umount(2).

    Raises:
        OSError: EBUSY (in use), EPERM, EINVAL (nothing mounted there).
    """
    _checked(_libc.umount2(os.fsencode(path), UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0)), path)


def _checked(result: int, path: str | Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))
