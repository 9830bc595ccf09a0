"""Making and ending the mount: mount(2) where the process may, fusermount3's descriptor passing
where it may not.

Owns mount options and the two ways to the kernel, and serves no requests. Never called from a
thread that serves: the kernel may ask the file system while it unmounts. Blocking; any other
thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from acpfs.errors import MachineError
from acpfs.transport.native.device import DEVICE

FSTYPE = "fuse.acpfs"
MS_NOSUID = 2
MS_NODEV = 4
MNT_DETACH = 2
FUSERMOUNT_TIMEOUT_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MountOptions:
    """What the kernel is told at mount."""

    source: str
    """Shown by `mount` and `df`, and what tools go by that look for a mount: the backing
    directory.
    """
    allow_other: bool = True

    def kernel_text(self, fd: int, root_mode: int) -> str:
        """Options for mount(2)."""
        words = [
            f"fd={fd}",
            f"rootmode={stat.S_IFMT(root_mode):o}",
            f"user_id={os.getuid()}",
            f"group_id={os.getgid()}",
        ]
        words.append("default_permissions")
        if self.allow_other:
            words.append("allow_other")
        return ",".join(words)

    def fusermount_text(self) -> str:
        """Options for fusermount3; it adds descriptor, mode and ids itself."""
        words = [
            "default_permissions",
            "subtype=acpfs",
            "fsname=" + self.source.replace("\\", "\\\\").replace(",", "\\,"),
        ]
        if self.allow_other:
            words.append("allow_other")
        return ",".join(words)


def mount(mountpoint: Path, options: MountOptions) -> int:
    """Mount, and return the session's descriptor; the kernel waits for INIT to be answered.

    Raises:
        MachineError: no /dev/fuse, not permitted, or the mount point is not a directory.
    """
    try:
        mode = os.stat(mountpoint).st_mode
        fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        message = f"cannot open {error.filename}: {error.strerror}"
        raise MachineError(message) from error
    error_number = _mount_syscall(mountpoint, options.source, options.kernel_text(fd, mode))
    if not error_number:
        return fd
    os.close(fd)
    if error_number not in (errno.EPERM, errno.EACCES):
        message = f"cannot mount on {mountpoint}: {os.strerror(error_number)}"
        raise MachineError(message)
    return mount_with_helper(mountpoint, options)


def _mount_syscall(mountpoint: Path, source: str, text: str) -> int:
    """mount(2); returns 0 or an errno."""
    arguments = (source.encode(errors="surrogateescape"), os.fsencode(mountpoint), FSTYPE.encode())
    if _libc.mount(*arguments, ctypes.c_ulong(MS_NOSUID | MS_NODEV), text.encode()) == 0:
        return 0
    return ctypes.get_errno()


def mount_with_helper(mountpoint: Path, options: MountOptions) -> int:
    """Let fusermount3 mount, which is set-uid root; it sends the descriptor over the socket that
    _FUSE_COMMFD names.

    Raises:
        MachineError: it is not there, or refuses.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        os.set_inheritable(theirs.fileno(), True)
        command = ["fusermount3", "-o", options.fusermount_text(), "--", str(mountpoint)]
        environment = {**os.environ, "_FUSE_COMMFD": str(theirs.fileno())}
        try:
            done = subprocess.run(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                capture_output=True,
                timeout=FUSERMOUNT_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            message = (
                f"cannot mount on {mountpoint}: not permitted to mount, and fusermount3 is not "
                f"usable ({error})"
            )
            raise MachineError(message) from error
        if done.returncode != 0:
            message = (
                f"cannot mount on {mountpoint}: "
                f"{done.stderr.decode(errors='replace').strip() or 'fusermount3 failed'}"
            )
            raise MachineError(message)
        ours.settimeout(FUSERMOUNT_TIMEOUT_S)
        _data, fds, _flags, _address = socket.recv_fds(ours, 1, 1)
    if not fds:
        message = f"cannot mount on {mountpoint}: fusermount3 sent no descriptor"
        raise MachineError(message)
    os.set_inheritable(fds[0], False)
    return fds[0]


def unmount(mountpoint: Path, *, lazy: bool = False) -> None:
    """End the mount.

    `lazy`: detach it from the tree now; it ends when the last open file is closed.

    Raises:
        OSError: EBUSY while files are open and not `lazy`; EINVAL when nothing is mounted there.
    """
    if _libc.umount2(os.fsencode(mountpoint), MNT_DETACH if lazy else 0) == 0:
        return
    error_number = ctypes.get_errno()
    if error_number != errno.EPERM:
        raise OSError(error_number, os.strerror(error_number), str(mountpoint))
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(mountpoint)]
    done = subprocess.run(command, capture_output=True, timeout=FUSERMOUNT_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise OSError(
            errno.EBUSY,
            done.stderr.decode(errors="replace").strip() or os.strerror(errno.EBUSY),
            str(mountpoint),
        )
