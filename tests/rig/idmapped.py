"""Idmapped mounts (mount_setattr(2)): what a kubelet makes of a volume for a pod with
`hostUsers: false`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FIRST = 100_000
"""User 0 of the pod, as the host numbers it."""
COUNT = 65_536
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_IDMAP = 0x00100000
_LIBC = ctypes.CDLL(None, use_errno=True)
_OWN_USERS = """
import ctypes, sys
print(ctypes.CDLL(None).unshare(0x10000000), flush=True)
sys.stdin.read()
"""


class _MountAttr(ctypes.Structure):
    """`struct mount_attr`."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _call(number: int, *arguments: object) -> int:
    """Raises the call's OSError."""
    result: int = _LIBC.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@contextmanager
def _user_namespace() -> Iterator[int]:
    """A descriptor of one whose users 0 to `COUNT` are the host's from `FIRST` on."""
    child = subprocess.Popen(
        [sys.executable, "-c", _OWN_USERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child.pid}/{name}").write_text(f"0 {FIRST} {COUNT}\n")
        fd = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        child.kill()
        child.communicate()
    try:
        yield fd  # the namespace lives as long as this
    finally:
        os.close(fd)


@contextmanager
def idmapped(source: Path, target: Path) -> Iterator[Path]:
    """A second mount of what is at `source`, whose user 0 is the host's `FIRST`, and so on.

    Raises:
        OSError: EINVAL: the file system cannot be idmapped.
    """
    target.mkdir()
    with _user_namespace() as users:
        tree = _call(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE)
        try:
            attr = _MountAttr(_MOUNT_ATTR_IDMAP, 0, 0, users)
            size = ctypes.sizeof(attr)
            _call(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attr), size)
            to = os.fsencode(target)
            _call(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, to, _MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(tree)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", target], check=True, timeout=30)
