"""Who this mount is among all that share a backing directory, and which backing directory it is.

The node id is random, because containers share machine-ids and host names; it is kept in the
runtime directory, next to the RAM tier, and lives exactly as long: both are gone after a reboot.
Two mounts of one backing directory under one id are kept apart by a lock on this machine;
`.acpfs/nodes/<id>` tells the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import select
import time
from dataclasses import dataclass
from pathlib import Path

from acpfs.backing.anchor import volume_of
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.leftovers import MachineId
from acpfs.errors import RefusedError, unknown_version
from acpfs.lock_holders import holders
from acpfs.runtime.chance import Chance
from acpfs.runtime.clock import Clock

VOLUME_VERSION = 1
"""Of all that lies below `.acpfs`: names of directories, staging files, and how a later mount knows
them. A mount refuses a newer one before it touches anything there; members that serve when it
comes have looked already, and are told by node records instead.
"""
_VOLUME = (b"volume",)
_HELPERS = ("hold_process.py",)
"""Of `transport.native`: it lives until the last worker has ended, or what is left of it."""
HELPER_ENDS_S = 2.0
"""So long a mount waits, in all, for the end of those whose worker has ended."""
LOOK_AGAIN_S = 0.1
"""While they are waited for: another one may have come to an end, or to light."""


def node_id(
    runtime_dir: Path,
    mountpoint: Path,
    chance: Chance,
    chosen: str | None = None,
    remembered: str | None = None,
) -> str:
    """`chosen`, or what the runtime directory keeps for this mount point: from its first mount on
    `remembered`, or `<host>-<8 hex>`.

    Not for a takeover: the session has its id, and another one that is kept beside it would have
    the next mount miss what is in RAM.
    """
    if chosen is not None:
        return chosen
    path = _id_file(runtime_dir, mountpoint)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        _write_once(path, remembered or f"{MachineId.this().prefix()}{chance.token(4)}", chance)
    return path.read_text(encoding="ascii").strip()


def has_node_id(runtime_dir: Path, mountpoint: Path) -> bool:
    """Whether the runtime directory still has the id of this mount point's last mount."""
    return _id_file(runtime_dir, mountpoint).exists()


def _id_file(runtime_dir: Path, mountpoint: Path) -> Path:
    return runtime_dir / "identity" / id_name(mountpoint)


def id_name(mountpoint: Path) -> str:
    """Of the file in the run directory that has a mount point's node id."""
    return hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]


def _write_once(path: Path, text: str, chance: Chance) -> None:
    """Whole or not at all; FileExistsError when it is there."""
    temporary = path.with_name(f".{path.name}.{chance.token(4)}")
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        os.write(fd, text.encode("ascii"))
        os.link(temporary, path)
    finally:
        os.close(fd)
        temporary.unlink()


@dataclass(frozen=True, slots=True)
class Identity:
    """Held as long as the mount lives."""

    node_id: str
    volume_id: str
    """Of the backing directory: 32 hex digits, made by its first mount, `.acpfs/volume`."""
    lock_fd: int

    @property
    def lock(self) -> str:
        """Which file that is, on this machine since it was started: as long as somebody has it
        open, no other file has these numbers.
        """
        st = os.fstat(self.lock_fd)
        return f"{st.st_dev}:{st.st_ino}"

    def release(self) -> None:
        """Let another mount have it."""
        os.close(self.lock_fd)


def claim(directory: BackingDirectory, runtime_dir: Path) -> Identity:
    """Read or make the volume id, lock (volume, node) on this machine.

    Raises:
        RefusedError: another mount of the same backing directory under the same node id lives on
            this machine.
    """
    volume_id = _volume_id(directory)
    lock_fd = _lock(runtime_dir, volume_id, directory.node_id, directory.clock)
    return Identity(directory.node_id, volume_id, lock_fd)


def _volume_id(directory: BackingDirectory) -> str:
    for _attempt in range(2):
        with contextlib.suppress(FileNotFoundError):
            found, version = volume_of(directory.read_own(_VOLUME))
            own = f"{directory.path}/.acpfs"
            way_out = "mount it with the newer acpfs"
            if version and (why := unknown_version(own, version, VOLUME_VERSION, way_out)):
                raise RefusedError(why)
            if version and re.fullmatch(r"[0-9a-f]{32}", found):
                return found
            raise RefusedError(
                f"{directory.path}/.acpfs/volume does not hold a volume id: look at it, and "
                "remove it if no RAM tier is left"
            )
        directory.create_own(_VOLUME, directory.chance.token(16).encode() + b"\n")
    return volume_of(directory.read_own(_VOLUME))[0]


def _lock(runtime_dir: Path, volume_id: str, node: str, clock: Clock) -> int:
    """A descriptor that has the lock."""
    deadline = clock.now() + HELPER_ENDS_S
    directory = runtime_dir / "locks"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(
        directory / f"{volume_id}-{node}",
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o600,
    )
    while not _is_locked(fd):
        # who has let go of it between the two looks is not seen: look again, as long as one may
        remains_s = deadline - clock.now()
        if remains_s <= 0 or holders(fd, _HELPERS):
            refused = RefusedError(_held(fd, node))
            os.close(fd)
            raise refused
        _wait_for_helpers(fd, remains_s)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _is_locked(fd: int) -> bool:
    """By us, from now on."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_helpers(fd: int, timeout_s: float) -> None:
    """Where all that served was killed just now, the helper of the last worker has the lock for a
    moment longer: until one of them has ended, or none is seen.
    """
    ends = select.poll()
    with contextlib.ExitStack() as stack:
        for helper in holders(fd, ()):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(helper.pid)
                stack.callback(os.close, pidfd)
                ends.register(pidfd, select.POLLIN)
        # nobody: it went just now, or is a process that we may not see
        ends.poll(min(timeout_s, LOOK_AGAIN_S) * 1000)


def _held(fd: int, node: str) -> str:
    """Why the lock cannot be had.

    Who took it wrote its number there; others have it from that one, and may have outlived it.
    """
    written = os.pread(fd, 64, 0).decode("ascii", "replace").strip() or "unknown"
    found = holders(fd, _HELPERS)
    living = [str(holder.pid) for holder in found if not holder.hangs]
    if living or not found:
        who = written if written in living or not living else living[0]
        return (
            f"this backing directory is already mounted under node id {node} (process {who}): "
            "choose another --node-id"
        )
    since = "for some time"
    if found[0].since is not None:
        since = f"since {time.strftime('%H:%M:%S', time.localtime(found[0].since))}"
    return (
        f"the last mount of this backing directory under node id {node} was killed, and has not "
        "ended: "
        f"process {found[0].pid} hangs in a call on the storage {since}. What is in its RAM tier "
        "is kept. "
        "It ends when the storage answers, or when that call is broken off there (umount -f of "
        "the storage): mount again then"
    )
