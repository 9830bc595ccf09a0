"""System calls that the standard library does not offer, by ctypes, with OSError as it should
be.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.telldir.restype = ctypes.c_long
_LIBC.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
_LIBC.telldir.argtypes = [ctypes.c_void_p]
_LIBC.opendir.restype = ctypes.c_void_p
_LIBC.opendir.argtypes = [ctypes.c_char_p]
_LIBC.readdir64.restype = ctypes.c_void_p
_LIBC.readdir64.argtypes = [ctypes.c_void_p]
_LIBC.rewinddir.argtypes = [ctypes.c_void_p]
_LIBC.closedir.argtypes = [ctypes.c_void_p]
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_LIBC.syscall.restype = ctypes.c_long

AT_FDCWD = -100
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4
FALLOC_KEEP_SIZE = 1
FALLOC_PUNCH_HOLE = 2
FALLOC_ZERO_RANGE = 16
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
_D_NAME_OFFSET = 19


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("ns", ctypes.c_long))


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


def rename2(old: Path, new: Path, flags: int) -> None:
    """renameat2(2)."""
    _checked(_LIBC.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags))


def link_descriptor(fd: int, path: Path) -> None:
    """Give an open file a name; os.link follows /proc/self/fd only when it calls linkat(2)."""
    _checked(
        _LIBC.linkat(AT_FDCWD, f"/proc/self/fd/{fd}".encode(), AT_FDCWD, os.fsencode(path), 0x400)
    )


def fallocate(fd: int, mode: int, offset: int, size: int) -> None:
    """fallocate(2), never the C library's substitute."""
    _checked(_LIBC.fallocate(fd, mode, offset, size))


def utimens(path: Path, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    """utimensat(2) with (seconds, ns) pairs; ns may be UTIME_NOW or UTIME_OMIT."""
    times = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
    _checked(_LIBC.utimensat(AT_FDCWD, os.fsencode(path), times, 0))


class Directory:
    """A directory stream as C programs have it, with telldir and seekdir."""

    def __init__(self, path: Path) -> None:
        self._stream = _LIBC.opendir(os.fsencode(path))
        if not self._stream:
            raise OSError(ctypes.get_errno(), "opendir")

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_exc: object) -> None:
        _LIBC.closedir(self._stream)

    def next(self) -> bytes | None:
        """The next name, or None at the end."""
        entry = _LIBC.readdir64(self._stream)
        return ctypes.string_at(entry + _D_NAME_OFFSET) if entry else None

    def rest(self) -> list[bytes]:
        """All names that are left, without `.` and `..`."""
        names = []
        while (name := self.next()) is not None:
            names.append(name)
        return [n for n in names if n not in (b".", b"..")]

    def tell(self) -> int:
        """telldir(3)."""
        return int(_LIBC.telldir(self._stream))

    def seek(self, position: int) -> None:
        """seekdir(3)."""
        _LIBC.seekdir(self._stream, position)

    def rewind(self) -> None:
        """rewinddir(3)."""
        _LIBC.rewinddir(self._stream)


def error_of(function: Callable[..., object], *args: object) -> int:
    """Errno of a call; 0 where it succeeds."""
    try:
        function(*args)
    except OSError as error:
        return error.errno or -1
    return 0


_CACHESTAT = 451


def cached_pages(fd: int, size: int) -> int:
    """cachestat(2), since Linux 6.5: how many pages the cache has of a file's first `size` bytes;
    on a tmpfs, also of those that were allocated and never written.
    """
    extent = (ctypes.c_uint64 * 2)(0, size)
    counts = (ctypes.c_uint64 * 5)()
    if not size:
        return 0
    _checked(_LIBC.syscall(_CACHESTAT, fd, extent, counts, 0))
    return counts[0]
