"""System calls that Python does not offer: openat2, renameat2, fallocate and syncfs.

Every path is resolved beneath a directory descriptor.

No symlink is ever followed, nothing above the directory is ever reached, whatever others do to the
tree meanwhile: the kernel checks it (openat2), or each component is opened on its own with
O_NOFOLLOW where a kernel or sandbox has no openat2.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

_OPENAT2 = 437
"""The same number on every architecture."""
_RESOLVE = 0x02 | 0x04 | 0x08
"""RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH."""
_RENAME_EXCHANGE = 2
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE."""
_PATH_BYTES_MAX = 4000
"""Below PATH_MAX (4096 with the final zero); longer paths are walked in pieces."""
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _fail() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def openat2(dir_fd: int, path: bytes, flags: int) -> int:
    """Open an existing entry beneath `dir_fd`.

    Raises:
        OSError: ELOOP for a symlink on the way, EXDEV for a way out, ENOSYS or EPERM where the
            system call is not to be had.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE)
    while True:
        fd: int = _libc.syscall(_OPENAT2, dir_fd, path, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        error = _fail()
        if error.errno not in (
            errno.EAGAIN,
            errno.EINTR,
        ):  # EAGAIN: a rename elsewhere raced with the check
            raise error


def allocate(fd: int, size: int) -> None:
    """Room for the first bytes of a file, whose length stays.

    Not posix_fallocate: that writes zeros where there is no such call.

    Raises:
        OSError: ENOSPC; EOPNOTSUPP where the file system has no such call.
    """
    if _libc.fallocate(fd, ctypes.c_int(_KEEP_SIZE), ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        raise _fail()


def _probe_openat2() -> bool:
    fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        os.close(openat2(fd, b".", os.O_PATH))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class Opener:
    """Opens paths beneath a root descriptor."""

    def __init__(self, root_fd: int, *, openat2: bool | None = None) -> None:
        """`openat2`: None probes; tests force the fallback."""
        self.root_fd = root_fd
        self.uses_openat2 = _probe_openat2() if openat2 is None else openat2

    def open(self, path: Sequence[bytes], flags: int) -> int:
        """A descriptor of an existing entry; the last component is not followed either."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        if not path:
            return os.open(".", flags, dir_fd=self.root_fd)
        if not self.uses_openat2:
            return self._walk(path, flags)
        joined = b"/".join(path)
        if len(joined) <= _PATH_BYTES_MAX:
            return openat2(self.root_fd, joined, flags)
        return self._open_in_pieces(path, flags)

    def _open_in_pieces(self, path: Sequence[bytes], flags: int) -> int:
        """Half the path at a time: each component has at most 255 bytes, so halving ends."""
        half = len(path) // 2
        middle = self.open(path[:half], _DIRECTORY)
        try:
            return Opener(middle, openat2=True).open(path[half:], flags)
        finally:
            os.close(middle)

    def _walk(self, path: Sequence[bytes], flags: int) -> int:
        fd = self.root_fd
        try:
            for name in path[:-1]:
                below = os.open(name, _DIRECTORY, dir_fd=fd)
                if fd != self.root_fd:
                    os.close(fd)
                fd = below
            return os.open(path[-1], flags, dir_fd=fd)
        finally:
            if fd != self.root_fd:
                os.close(fd)

    def open_directory(self, path: Sequence[bytes]) -> int:
        """A descriptor to use as `dir_fd`."""
        return self.open(path, _DIRECTORY)


def rename_exchange(source_fd: int, source: bytes, target_fd: int, target: bytes) -> None:
    """Swap two entries in one step.

    Raises:
        OSError: EINVAL or ENOSYS where the file system or kernel cannot.
    """
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.renameat2(source_fd, source, target_fd, target, _RENAME_EXCHANGE) != 0:
        raise _fail()


def sync_file_system(fd: int) -> None:
    """Have everything that was written to the file system of `fd` on stable storage (syncfs(2)).

    Raises:
        OSError: the kernel could not write something back (Linux 5.8 and later). Each descriptor is
            told once, and only of what happened after it was opened or was told to nobody yet: one
            that is opened for the purpose may hear nothing.
    """
    if _libc.syncfs(fd) != 0:
        raise _fail()
