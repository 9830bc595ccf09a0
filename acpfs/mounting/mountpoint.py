"""The mount point: may it be used, is it ours, take it away again.

Reads the mount table before it looks at anything.

A mount point whose daemon hangs or is gone must never be touched: even stat would wait for it.
Thread-safe.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

from acpfs.control import registry
from acpfs.errors import MachineError, RefusedError
from acpfs.ram.mounts import mounted_at, unmount
from acpfs.supervisor import fallthrough

KIND = "fuse.acpfs"
FUSERMOUNT = ("fusermount3", "fusermount")
FUSERMOUNT_WAIT_S = 30.0


def is_mounted(mountpoint: str) -> bool:
    """Whether an acpfs lies there, alive or dead."""
    entry = mounted_at(mountpoint)
    return entry is not None and entry.kind == KIND


def check_free(mountpoint: str, runtime: Path) -> None:
    """Refuse a mount point that an acpfs uses; clear away what a dead daemon left there.

    Raises:
        RefusedError: an acpfs is mounted there, and its daemon lives.
        MachineError: missing, or not a directory.
    """
    beneath = fallthrough.beneath(runtime, mountpoint)
    if beneath is not None and beneath.uncovered:
        return  # an earlier mount fell through to it; looking into it could hang
    if is_mounted(mountpoint):
        owner = next(
            (record for record in registry.records() if record.mountpoint == mountpoint), None
        )
        if owner is None or owner.alive:
            who = "" if owner is None else f" (process {owner.pid}, {owner.backing})"
            raise RefusedError(f"mount point {mountpoint} is in use by another acpfs{who}")
        take_away(mountpoint, detach=True)
        if beneath is not None:
            return
    try:
        os.stat(mountpoint, follow_symlinks=True)
        os.close(os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError:
        raise MachineError(f"mount point {mountpoint} does not exist") from None
    except NotADirectoryError:
        raise MachineError(f"mount point {mountpoint} is not a directory") from None
    except OSError as error:
        raise MachineError(f"mount point {mountpoint} cannot be used: {error.strerror}") from error


def check_apart(backing: Path, mountpoint: str) -> None:
    """Refuse a pair of directories of which one lies in the other: calls on the backing directory
    would come back through the mount.

    Raises:
        RefusedError: they do.
    """
    lower = os.path.realpath(backing)
    upper = os.path.realpath(mountpoint)
    if (
        lower == upper
        or lower.startswith(upper.rstrip("/") + "/")
        or upper.startswith(lower.rstrip("/") + "/")
    ):
        raise RefusedError(
            f"backing directory {backing} and mount point {mountpoint} lie one inside the other"
        )


def take_away(mountpoint: str, *, detach: bool = False, abort: bool = False) -> None:
    """Unmount, as root or as the mount's owner through fusermount3.

    With `detach`, users of it keep what they have open; with `abort` too (root), they get errors.

    Raises:
        RefusedError: it is in use.
        MachineError: not permitted, or nothing is mounted there.
    """
    try:
        unmount(mountpoint, detach=detach, abort=abort)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise RefusedError(
                f"{mountpoint} is in use: some process has a file open or its working directory "
                "there"
            ) from None
        if error.errno != errno.EPERM:
            raise MachineError(f"cannot unmount {mountpoint}: {error.strerror}") from error
        _through_fusermount(mountpoint, detach=detach)


def _through_fusermount(mountpoint: str, *, detach: bool) -> None:
    program = next((path for name in FUSERMOUNT if (path := shutil.which(name))), None)
    if program is None:
        raise MachineError(
            f"cannot unmount {mountpoint}: not permitted, and there is no fusermount3"
        )
    command = [program, "-u", *(["-z"] if detach else []), mountpoint]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=FUSERMOUNT_WAIT_S, check=False
    )
    if done.returncode == 0:
        return
    said = done.stderr.strip()
    if "busy" in said.lower():
        raise RefusedError(
            f"{mountpoint} is in use: some process has a file open or its working directory there"
        )
    raise MachineError(f"cannot unmount {mountpoint}: {said or f'{program} failed'}")
