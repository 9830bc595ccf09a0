"""The /dev/fuse descriptors of a session: cloning them, notifications, backing files.

Owns descriptors and the few system calls on them that are not requests and replies. Knows nothing
of files. Every method may be called from any thread; `notify_*` may block on inode locks that a
request under way holds, so never call them from a thread that serves requests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Sequence

from acpfs.transport.native.protocol import (
    BACKING_MAP,
    DEV_IOC_BACKING_CLOSE,
    DEV_IOC_BACKING_OPEN,
    DEV_IOC_CLONE,
    NOTIFY_DELETE_OUT,
    NOTIFY_INVAL_INODE_OUT,
    OUT_HEADER,
    Notify,
)

DEVICE = "/dev/fuse"
_NOT_CACHED = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR, errno.EBUSY})
"""What the kernel answers to a notification about something that it does not have cached, or cannot
drop because it is in use.
"""


def clone(fd: int) -> int:
    """A further descriptor of a session, with a queue of its own for requests under way.

    What was read through it and not answered fails with ECONNABORTED when its last copy is closed:
    whoever keeps a session for a later worker has to keep its clones too.

    Raises:
        OSError: the kernel cannot clone.
    """
    copy = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(copy, DEV_IOC_CLONE, struct.pack("=I", fd))
    except OSError:
        os.close(copy)
        raise
    return copy


def clones(fd: int, count: int) -> list[int]:
    """`fd` and so many clones of it that there are `count`; fewer where the kernel cannot clone."""
    fds = [fd]
    with contextlib.suppress(OSError):
        while len(fds) < count:
            fds.append(clone(fd))
    return fds


class Device:
    """The descriptors of a session."""

    def __init__(self, fds: Sequence[int]) -> None:
        """`fds`: the one that was given to mount, or received from whoever kept it, and clones;
        owned from now on.
        """
        self.fds = tuple(fds)
        self._fd = fds[0]

    def close(self) -> None:
        """Let go of the session; the mount is dead when nobody else holds a descriptor of it."""
        for fd in self.fds:
            os.close(fd)

    # -- passthrough

    def backing_open(self, fd: int) -> int:
        """Register an open file; the id goes into OPEN replies, belongs to the session and outlives
        this process.

        Raises:
            OSError: no CAP_SYS_ADMIN, a file system stacked too deep, or no passthrough in this
                session.
        """
        return int(
            fcntl.ioctl(self._fd, DEV_IOC_BACKING_OPEN, bytearray(BACKING_MAP.pack(fd, 0, 0)))
        )

    def backing_close(self, backing_id: int) -> None:
        """Let go of a registered file; opens that use it keep it."""
        fcntl.ioctl(self._fd, DEV_IOC_BACKING_CLOSE, struct.pack("=I", backing_id))

    # -- notifications

    def notify_inval_inode(self, ino: int) -> None:
        """Attributes of a node and all its cached bytes are out of date."""
        self._notify(Notify.INVAL_INODE, NOTIFY_INVAL_INODE_OUT.pack(ino, 0, 0))

    def notify_delete(self, parent: int, child: int, name: bytes) -> None:
        """A name is gone; whoever watches it with inotify is told."""
        self._notify(
            Notify.DELETE, NOTIFY_DELETE_OUT.pack(parent, child, len(name), 0) + name + b"\0"
        )

    def resend(self) -> None:
        """Make the kernel queue again every request that was read and not answered (needs
        HAS_RESEND).
        """
        self._notify(Notify.RESEND, b"")

    def _notify(self, code: Notify, body: bytes) -> None:
        try:
            os.write(self._fd, OUT_HEADER.pack(OUT_HEADER.size + len(body), code, 0) + body)
        except OSError as error:
            if error.errno not in _NOT_CACHED:
                raise
