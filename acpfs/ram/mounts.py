"""The mount table, and the two system calls that change it.

Never looks at a mount point itself (a dead or hung mount would answer with a hang): everything here reads
/proc/self/mountinfo. Thread-safe.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 2, 4, 8, 32
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
"""The same numbers on every architecture."""
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MS_PRIVATE = 1, 4, 1 << 18

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
    number: int = 0
    """The kernel's id of the mount; used again after it is gone."""


def mount_table(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[MountEntry]:
    """All mounts that this process sees, oldest first."""
    entries = []
    for line in mountinfo.read_bytes().splitlines():
        before, _dash, after = line.partition(b" - ")
        fields, (kind, source, options) = before.split(b" "), after.split(b" ", 2)
        entries.append(MountEntry(_text(fields[4]), _text(kind), _text(source), _text(options), _text(fields[2]), int(fields[0])))
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


def bind(source: str | Path, target: str | Path) -> None:
    """Show a directory, with what is mounted below it, at another place too; what is mounted over it there does not appear at `source`.

    A detached copy is taken out of `source`'s peer group first and attached afterwards, so that it gets the propagation of where it
    lies: bound the old way it would be a peer of `source`, and a mount over the one would cover the other.

    Raises:
        OSError: EPERM without CAP_SYS_ADMIN, ENOSYS before Linux 5.12.
    """
    tree = _libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC)
    _checked(min(tree, 0), source)
    try:
        private = struct.pack("4Q", 0, 0, _MS_PRIVATE, 0)
        _checked(_libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, private, len(private)), source)
        _checked(_libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH), target)
    finally:
        os.close(tree)


def unmount(path: str | Path, *, detach: bool = False, abort: bool = False) -> None:
    """umount(2). With `abort`, whoever waits for the server of a FUSE mount gets an error: it is dead, and may never be seen to be.

    Raises:
        OSError: EBUSY (in use), EPERM, EINVAL (nothing mounted there).
    """
    _checked(_libc.umount2(os.fsencode(path), UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0) | (MNT_FORCE if abort else 0)), path)


def _checked(result: int, path: str | Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))
