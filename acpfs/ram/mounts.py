"""The mount table, and the two system calls that change it.

Never looks at a mount point itself (a dead or hung mount would answer with a hang): everything here
reads /proc/self/mountinfo. Thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_MOUNT_SETATTR = 442
"""The same numbers on every architecture."""
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOVE_MOUNT_BENEATH = 0x200
_MS_PRIVATE = 1 << 18

LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "overlay", "tmpfs", "ramfs"}
)
"""Kinds of file systems that no other machine writes to."""

_libc = ctypes.CDLL(None, use_errno=True)
_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of the mount table. `path` is what os.fsdecode makes of its bytes."""

    path: str
    kind: str
    source: str
    options: str
    device: str
    number: int = 0
    """The kernel's id of the mount; used again after it is gone."""
    root: str = "/"
    """Which directory of its file system it shows."""

    def is_there(self) -> bool:
        """Whether it is still in the table, under its path, covered or not."""
        return any(
            (entry.number, entry.device, entry.path) == (self.number, self.device, self.path)
            for entry in mount_table()
        )


def mount_table(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[MountEntry]:
    """All mounts that this process sees, oldest first."""
    entries = []
    for line in mountinfo.read_bytes().splitlines():
        before, _dash, after = line.partition(b" - ")
        fields = before.split(b" ")
        (kind, source, options) = after.split(b" ", 2)
        words = (_text(fields[4]), _text(kind), _text(source), _text(options), _text(fields[2]))
        entries.append(MountEntry(*words, int(fields[0]), _text(fields[3])))
    return entries


def mounted_at(path: str) -> MountEntry | None:
    """The topmost mount at exactly this path."""
    return next((entry for entry in reversed(mount_table()) if entry.path == path), None)


def holders(device: str) -> list[int]:
    """Processes that have a mount of this file system, in whatever mount namespace; those that this
    process can see.
    """
    found = []
    field = f" {device} ".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if any(field in line for line in (entry / "mountinfo").read_bytes().splitlines()):
                    found.append(int(entry.name))
    return sorted(found)


def users_elsewhere(
    mount: MountEntry, has_directory: Callable[[str], bool] = lambda _end: False
) -> list[str]:
    """Who else has a mount, in words: those whom unmounting it does not reach. Reads tables only.

    An overlay over a directory in it, another mount of it here, and mounts in other mount
    namespaces to which its end is not propagated. Not seen: what the kernel has by itself
    otherwise, and the overlays of other namespaces, whose paths mean something else.
    `has_directory`: whether the kernel has one in the mount whose path ends so. An overlay that was
    mounted with relative names does not say relative to what, and has its directories all the time.
    """
    table = mount_table()
    own = [entry for entry in table if entry.device == mount.device]
    numbers = {entry.number for entry in own}
    if mount.number not in numbers:
        return []  # it is gone
    found = [f"it is mounted on {entry.path}, too" for entry in own if entry.path != mount.path]
    since = [entry.number for entry in table].index(mount.number)
    found += [
        f"the overlay on {entry.path} has a directory of it"
        for entry in table[since:]
        if entry.kind == "overlay" and _lies_in(entry.options, mount.path)
    ]
    found += [
        f"the overlay on {entry.path} seems to have a directory of it ({name})"
        for entry in table[since:]
        if entry.kind == "overlay"
        for name in _layers(entry.options)
        if _may_lie_in(name, mount.path, has_directory)
    ]
    processes = _beyond(mount.device, numbers)
    found += [
        f"process {pid} still has it in another mount namespace (a container?)" for pid in processes
    ]
    return found


def _layers(options: str) -> list[str]:
    """Directories that an overlay shows, as they were named."""
    return [
        place
        for option in options.split(",")
        if option.startswith(("lowerdir", "upperdir", "workdir", "datadir"))
        for place in option.partition("=")[2].split(":")
        if place
    ]


def _lies_in(options: str, path: str) -> bool:
    """Whether a directory that an overlay shows lies at or below a path."""
    return any(
        place == path or place.startswith(path.rstrip("/") + "/") for place in _layers(options)
    )


def _may_lie_in(name: str, path: str, has_directory: Callable[[str], bool]) -> bool:
    """Whether a relative name may be one of a directory at or below a path: named from in there, or
    from above.

    Of `.` and `..` alone nothing is known.
    """
    words = [] if name.startswith("/") else os.path.normpath(name).split("/")
    words = [word for word in words if word not in (".", "..")]
    if not words:
        return False
    above = path.strip("/").split("/")
    for count in range(1, min(len(above), len(words)) + 1):
        if words[:count] == above[-count:]:
            below = words[count:]
            if not below or has_directory("/".join(below)):
                return True
    return has_directory("/".join(words))


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a mount: its number, and the peer groups of the mount that it lies on, by which its end
    travels to other name spaces.

    `shared` gets and gives what happens in a group, `master` only gets it; b"" is none.
    """

    number: int
    shared: bytes
    master: bytes


def _beyond(device: str, own: set[int]) -> list[int]:
    """Processes that have mounts of a file system beside ours, and beside those that the unmounting
    of ours is propagated to.
    """
    found: dict[int, list[_Place]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                text = (process / "mountinfo").read_bytes()
                found[int(process.name)] = _places(text, device.encode())
    every = {one for places in found.values() for one in places}
    reached = {one.shared for one in every if one.number in own} - {b""}
    while more := {one.shared for one in every if one.master in reached} - reached - {b""}:
        reached |= more
    return sorted(
        pid
        for pid, places in found.items()
        if any(
            one.number not in own and one.shared not in reached and one.master not in reached
            for one in places
        )
    )


def _places(mountinfo: bytes, device: bytes) -> list[_Place]:
    """Of the mounts of a file system."""
    if b" " + device + b" " not in mountinfo:
        return []
    lines = [line.partition(b" - ")[0].split(b" ") for line in mountinfo.splitlines()]
    groups = {
        fields[0]: dict(field.split(b":", 1) for field in fields[6:] if b":" in field)
        for fields in lines
    }
    parents = [
        (int(fields[0]), groups.get(fields[1], {})) for fields in lines if fields[2] == device
    ]
    return [
        _Place(number, tags.get(b"shared", b""), tags.get(b"master", b""))
        for number, tags in parents
    ]


def kind_at(fd: int) -> str:
    """The kind of file system that a descriptor leads to; asks the kernel's tables alone, so it
    cannot hang. "" when they do not say.
    """
    number = number_of(fd)
    return next((entry.kind for entry in mount_table() if entry.number == number), "")


def number_of(fd: int) -> int:
    """The kernel's id of the mount that a descriptor leads to, attached or not; -1 when it does not
    say.
    """
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("mnt_id:")), -1)


def mount_tmpfs(directory: Path, options: str, *, remount: bool = False) -> None:
    """Mount a tmpfs, or change the options of one.

    Raises:
        OSError: EPERM without CAP_SYS_ADMIN, EINVAL for an option that this kernel does not know.
    """
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | (MS_REMOUNT if remount else 0)
    _checked(
        _libc.mount(
            b"acpfs-ram", os.fsencode(directory), b"tmpfs", ctypes.c_ulong(flags), options.encode()
        ),
        directory,
    )


def mount_of(path: str) -> MountEntry | None:
    """The mount that a path without symlinks lies in, by its name."""
    over = [
        entry
        for entry in mount_table()
        if entry.path in (path, "/") or path.startswith(entry.path + "/")
    ]
    return max(reversed(over), key=lambda entry: len(entry.path), default=None)


def bind(source: str | Path, target: str | Path) -> None:
    """Show a directory, with what is mounted below it, at another place too; what is mounted over
    it there does not appear at `source`.

    A detached copy is taken out of `source`'s peer group first and attached afterwards, so that it
    gets the propagation of where it lies: bound the old way it would be a peer of `source`, and a
    mount over the one would cover the other.

    Raises:
        OSError: EPERM without CAP_SYS_ADMIN, ENOSYS before Linux 5.12.
    """
    tree = clone(source)
    try:
        attach(tree, target)
    finally:
        os.close(tree)


def clone(source: str | Path) -> int:
    """The first half of `bind`, all that looks at `source`: a descriptor of the detached copy.

    Raises:
        OSError: as `bind`, or what the look-up says.
    """
    tree: int = _libc.syscall(
        _OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    )
    _checked(min(tree, 0), source)
    try:
        private = struct.pack("4Q", 0, 0, _MS_PRIVATE, 0)
        _checked(
            _libc.syscall(
                _MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, private, len(private)
            ),
            source,
        )
    except OSError:
        os.close(tree)
        raise
    return tree


def attach(tree: int, target: str | Path, *, beneath: bool = False) -> None:
    """The second half of `bind`. With `beneath`, under what is mounted on the target already.

    Raises:
        OSError: as `bind`; EINVAL: not beneath this (before Linux 6.5, beneath nothing).
    """
    flags = _MOVE_MOUNT_F_EMPTY_PATH | (_MOVE_MOUNT_BENEATH if beneath else 0)
    _checked(_libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), flags), target)


def unmount(path: str | Path, *, detach: bool = False, abort: bool = False) -> None:
    """umount(2).

    With `abort`, whoever waits for the server of a FUSE mount gets an error: it is dead, and may
    never be seen to be.

    Raises:
        OSError: EBUSY (in use), EPERM, EINVAL (nothing mounted there).
    """
    _checked(
        _libc.umount2(
            os.fsencode(path),
            UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0) | (MNT_FORCE if abort else 0),
        ),
        path,
    )


def _checked(result: int, path: str | Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))
