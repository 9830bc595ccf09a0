"""A copy of a file with all that it has, for where no rename or hard link leads: to another file
system.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

CHUNK_BYTES = 4 << 20


def copy(source_fd: int, target_fd: int, progress: Callable[[str], None]) -> None:
    """Bytes, owner, mode, xattrs and times, flushed.

    What the target cannot hold of attributes is left out.

    `progress`: told of each piece.
    """
    while data := os.read(source_fd, CHUNK_BYTES):
        progress("copy")
        while data:
            data = data[os.write(target_fd, data) :]
    st = os.fstat(source_fd)
    with contextlib.suppress(OSError):
        os.fchown(target_fd, st.st_uid, st.st_gid)
    os.fchmod(target_fd, stat.S_IMODE(st.st_mode))
    with contextlib.suppress(OSError):
        for name in os.listxattr(source_fd):
            with contextlib.suppress(OSError):
                os.setxattr(target_fd, name, os.getxattr(source_fd, name))
    with contextlib.suppress(OSError):
        os.utime(target_fd, ns=(st.st_atime_ns, st.st_mtime_ns))
    os.fsync(target_fd)
