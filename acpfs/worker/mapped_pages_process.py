"""The process that has the kernel write back what was changed through mappings of files in the
mount.

What is dirty in a mapping only the kernel knows. It sends all of it, and waits until it was taken,
when somebody calls `sync_file_range` on any descriptor of the file; and a process must never wait
for its own mount. So this is a program of its own, run by file name without site-packages, which
does nothing else: it may be killed at any time, and is left where it is if it does not end
(`mapped_pages`).

It goes by names, and takes a name only for the file that it was told: by the way of a symbolic
link, or in another mount that lies there by now, there may be anything.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import sys

ROOT_INO = 1
WAIT_BEFORE = 1
WRITE = 2
WAIT_AFTER = 4
"""Of sync_file_range. All that is dirty, and an error of it is one of this call."""
WHOLE = 0
"""As a length: up to the end, wherever that is."""
ONLY_A_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def root_of(mountpoint: str) -> int:
    """The mount, by its first directory; anything else lies there when it was taken away, or lies
    beneath another one.

    Raises:
        OSError: ESTALE.
    """
    root = os.open(mountpoint, ONLY_A_NAME | os.O_DIRECTORY)
    if os.fstat(root).st_ino != ROOT_INO:
        os.close(root)
        raise error_of(errno.ESTALE)
    return root


def opened(root: int, path: bytes, ino: int) -> int:
    """A descriptor of that file, at that path below the root.

    Raises:
        OSError: ENOENT, another file is there, or none.
    """
    *above, name = path.split(b"/")
    here = os.dup(root)
    try:
        for directory in above:
            below = os.open(directory, ONLY_A_NAME | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        st = os.stat(name, dir_fd=here, follow_symlinks=False)
        if st.st_ino != ino or not stat.S_ISREG(st.st_mode):
            raise error_of(errno.ENOENT)
        return os.open(name, TO_READ, dir_fd=here)
    finally:
        os.close(here)


def write_back(fd: int) -> None:
    """Return when the daemon has all that was changed through mappings until now.

    Raises:
        OSError: it has not; also what it answered.
    """
    if _libc.sync_file_range(fd, 0, WHOLE, WAIT_BEFORE | WRITE | WAIT_AFTER) != 0:
        raise error_of(ctypes.get_errno())


def tried(root: int, path: bytes, ino: int) -> int:
    """0, or why it could not be done."""
    try:
        fd = opened(root, path, ino)
        try:
            write_back(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def main() -> None:
    """Reads `{"mountpoint", "files": [[number, path], …]}`, writes the errors of those with which
    it was in vain.
    """
    asked = json.load(sys.stdin)
    files = [(ino, os.fsencode(path)) for ino, path in asked["files"]]
    try:
        root = root_of(asked["mountpoint"])
    except OSError as error:
        errors = {ino: error.errno for ino, _path in files}
    else:
        errors = {ino: tried(root, path, ino) for ino, path in files}
    json.dump([[ino, number] for ino, number in errors.items() if number], sys.stdout)


if __name__ == "__main__":
    main()
