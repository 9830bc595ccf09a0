"""The process that takes inode locks: a thread per file calls chown(-1, -1), which changes nothing, and the daemon does not answer at once.

A program of its own, run by file name without site-packages: a process must never wait for its own mount, and this one does nothing
else. Reads node numbers from standard input, ends with it, and dies with its parent. Has no /dev/fuse descriptor, and of the capabilities
only the one that opens a file by its node number, so that renamed and deleted files are found. Threads share nothing.

It runs as a real-time task where it may: the kernel's inode lock is then handed over to it in turn (`RWSEM_FLAG_HANDOFF`), while
a normal task that waits for the lock is overtaken by a writer that comes back for it within microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys
import threading

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SIGKILL = 9
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION_3 = 0x20080522
AT_EMPTY_PATH = 0x1000
FILEID_INO64_GEN = 0x81
"""A FUSE file handle: node number, high and low half, and generation (0: numbers are never used again)."""
FUSE_SUPER_MAGIC = 0x65735546
STATFS_WORDS = 32

_libc = ctypes.CDLL(None, use_errno=True)


class FileHandle(ctypes.Structure):
    """struct file_handle."""

    _fields_ = (("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 12))


def open_node(mountpoint: bytes, ino: int) -> int:
    """A descriptor of a file in the mount that is good for calls on the file itself, by node number."""
    root = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        info = (ctypes.c_long * STATFS_WORDS)()
        if _libc.fstatfs(root, info) != 0 or info[0] != FUSE_SUPER_MAGIC:
            raise OSError(errno.ESTALE, "the mount is gone")
        handle = FileHandle(12, FILEID_INO64_GEN)
        handle.data[:] = struct.pack("=III", ino >> 32, ino & 0xFFFFFFFF, 0)
        fd = int(_libc.open_by_handle_at(root, ctypes.byref(handle), os.O_PATH | os.O_CLOEXEC))
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return fd
    finally:
        os.close(root)


def hold(mountpoint: bytes, ino: int) -> None:
    """Take the lock of a file again and again, as long as the daemon says so (EAGAIN)."""
    try:
        fd = open_node(mountpoint, ino)
    except OSError as error:
        sys.stderr.write(f"acpfs: node {ino} cannot be held: {error}\n")
        return
    nobody = ctypes.c_uint(0xFFFFFFFF)
    while _libc.fchownat(fd, b"", nobody, nobody, AT_EMPTY_PATH) != 0 and ctypes.get_errno() == errno.EAGAIN:
        pass
    os.close(fd)


def confine() -> None:
    """Die with the parent, get no new privileges, keep one capability, and be handed locks in turn."""
    parent = os.getppid()
    _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    with contextlib.suppress(OSError):  # needs CAP_SYS_NICE
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    kept = 1 << CAP_DAC_READ_SEARCH
    _libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def main() -> None:
    """Argument: the mount point."""
    mountpoint = os.fsencode(sys.argv[1])
    confine()
    for line in sys.stdin:
        threading.Thread(target=hold, args=(mountpoint, int(line)), daemon=True).start()
    os._exit(0)  # threads may wait in the kernel


if __name__ == "__main__":
    main()
