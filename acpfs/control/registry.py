"""Which mounts there are: one small JSON file per mount in the runtime directory, found without
touching any mount point.

A stat of a mount point can hang for as long as the daemon does, and control must not. So a path is
matched against the registered mount points as a string, after its symlinks were followed component
by component *up to* a registered mount point.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from acpfs.control.runtime import ENVIRONMENT_VARIABLE, places_to_look
from acpfs.errors import NotMountedError, SeveralMountsError
from acpfs.processes import PROC, state_of

SYMLINKS_MAX = 40
KIND = b"fuse.acpfs"
_ADOPTING = "adopting"


@dataclass(frozen=True, slots=True)
class MountRecord:
    """What a control command must know to reach a daemon."""

    mountpoint: str
    backing: str
    node: str
    pid: int
    pid_started: int
    """Start time of the process in clock ticks since boot: tells a live daemon from a later process
    with its number.
    """
    socket: str
    version: str
    runtime_dir: str

    @property
    def alive(self) -> bool:
        """Whether the daemon's process is still there."""
        return process_started(self.pid) == self.pid_started

    @property
    def file(self) -> Path:
        """Where the record lies."""
        return Path(self.runtime_dir) / "mounts" / f"{slug(self.mountpoint)}.json"


def adopting_lock(runtime: Path, node: str) -> Path:
    """The file that a command locks which adopts a node's log at a member of that runtime
    directory: one at a time.
    """
    directory = runtime / _ADOPTING
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory / f".{slug(node)}.lock"


def adopting_place(runtime: Path, node: str) -> Path:
    """Where the log of a node is mounted while a member of that runtime directory drains it."""
    return runtime / _ADOPTING / node


def slug(mountpoint: str) -> str:
    """File name for a mount point: readable, and unique by a hash."""
    readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in mountpoint).strip("-")[
        -40:
    ]
    return f"{readable}-{hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:12]}"


def process_started(pid: int) -> int:
    """Start time of a process, 0 when there is none."""
    state, *rest = _stat(pid)
    return 0 if state in "ZX" else int(rest[18])


def is_stopped(pid: int) -> bool:
    """Whether a process runs no more until somebody lets it (SIGSTOP, a debugger)."""
    try:
        return state_of(PROC / str(pid)) in ("T", "t")
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """What /proc tells of a process, from its state on; of one that is not there, that it is
    dead.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["X"]


def write(record: MountRecord) -> None:
    """Register a mount, replacing a dead one's record."""
    temporary = record.file.with_suffix(f".{os.getpid()}")
    temporary.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # it may have been moved away
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    with os.fdopen(fd, "w") as stream:
        json.dump(asdict(record), stream)
    temporary.rename(record.file)


def remove(record: MountRecord) -> None:
    """The mount is gone."""
    for path in (record.file, Path(record.socket)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def records(directories: Iterable[Path] | None = None) -> list[MountRecord]:
    """All registered mounts, dead ones too; unreadable records are passed over."""
    found = []
    for directory in places_to_look() if directories is None else directories:
        for file in sorted((directory / "mounts").glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                found.append(_read(file))
    return found


def as_it_is_now(record: MountRecord) -> MountRecord:
    """The record that lies in the place of this one: another supervisor may have the mount since.

    The same where there is none.
    """
    try:
        return _read(record.file)
    except (OSError, ValueError, TypeError, AttributeError):
        return record


def _read(file: Path) -> MountRecord:
    """Raises OSError, ValueError, TypeError or AttributeError where it is none."""
    values = json.loads(file.read_text())
    return MountRecord(**{field.name: values.get(field.name, "") for field in fields(MountRecord)})


def reachable(known: list[MountRecord] | None = None) -> list[MountRecord]:
    """Those whose daemon lives and hears this user; where it hears this user of none, those that
    live.
    """
    living = [record for record in (records() if known is None else known) if record.alive]
    return [
        record for record in living if os.access(record.socket, os.W_OK)
    ] or living  # others' mounts are no choice


def find(mountpoint: str | None, known: list[MountRecord] | None = None) -> MountRecord:
    """The mount that a command is about; with None, the only one there is.

    Raises:
        NotMountedError: there is none.
        SeveralMountsError: there is more than one to choose from.
    """
    known = records() if known is None else known
    if mountpoint is not None:
        return locate(mountpoint, known)[0]
    living = reachable(known)
    if len(living) == 1:
        return living[0]
    if not living:
        raise NotMountedError(_why_none_lives(known))
    names = ", ".join(record.mountpoint for record in living)
    raise SeveralMountsError(f"several are mounted, name one: {names}")


def locate(path: str, known: list[MountRecord] | None = None) -> tuple[MountRecord, str]:
    """The mount that a path lies in, and the path below its mount point ("" for the mount point
    itself).

    Raises:
        NotMountedError: the path lies in no registered mount.
    """
    known = records() if known is None else known
    mountpoints = {record.mountpoint: record for record in known}
    reached, rest = _walk(os.path.join(os.getcwd(), path), mountpoints)
    if reached not in mountpoints:
        raise NotMountedError(_why_in_none(path, mountpoints))
    return mountpoints[reached], rest


def _why_none_lives(known: Iterable[MountRecord]) -> str:
    """Of these, none has a daemon. One that is mounted still is told from none at all."""
    mounted = _mounted()
    dead = next((one for one in known if one.mountpoint in mounted), None)
    if dead is None:
        return "no acpfs is mounted"
    return (
        f"the daemon of {dead.mountpoint} is gone: `acpfs mount {dead.backing} {dead.mountpoint}` "
        "clears that mount away, and drains what is in RAM"
    )


def lies_in_mount(path: str) -> bool:
    """Whether it does by the kernel's table, whoever could ask the daemon."""
    mounted = _mounted()
    return _walk(os.path.join(os.getcwd(), path), mounted)[0] in mounted


def _why_in_none(path: str, registered: Iterable[str]) -> str:
    mounted = _mounted()
    mountpoint = _walk(os.path.join(os.getcwd(), path), {*registered, *mounted})[0]
    return _elsewhere(mountpoint) if mountpoint in mounted else f"{path} lies in no acpfs mount"


def _elsewhere(mountpoint: str) -> str:
    """Of a mount that the kernel knows, and no run directory that was looked into."""
    looked = ", ".join(map(os.fspath, places_to_look())) or "no run directory"
    return (
        f"{mountpoint} is an acpfs mount, but its run directory is not here ({looked}): "
        f"name the one it was mounted with in {ENVIRONMENT_VARIABLE}, or ask as its user or in "
        "its container"
    )


def _mounted() -> set[str]:
    """Mount points of acpfs, by the kernel's table: nothing of a mount is looked at."""
    try:
        lines = Path("/proc/self/mounts").read_bytes().splitlines()
    except OSError:
        return set()
    fields = [line.split(b" ") for line in lines]
    return {
        os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), words[1]))
        for words in fields
        if words[2] == KIND
    }


def normalised(mountpoint: str) -> str:
    """A mount point's name as the registry and the mount table have it; the mount point itself is
    not looked at.
    """
    absolute = os.path.normpath(os.path.join(os.getcwd(), mountpoint))
    return os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))


def _walk(path: str, mountpoints: Iterable[str]) -> tuple[str, str]:
    """Follow a path until a mount point is reached; (mount point or real path, rest)."""
    known = set(mountpoints)
    reached = "/"
    parts = path.split("/")
    followed = 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            reached = os.path.dirname(reached)
            continue
        step = os.path.join(reached, part)
        if step in known:
            rest = os.path.normpath("/".join(parts)) if parts else "."
            if rest == ".." or rest.startswith("../"):  # leaves the mount again
                reached = step
                parts = rest.split("/")
                continue
            return step, "" if rest == "." else rest.lstrip("/")
        target = _link_target(step)
        if target is None:
            reached = step
        elif (followed := followed + 1) > SYMLINKS_MAX:
            raise NotMountedError(f"{path}: {os.strerror(errno.ELOOP)}")
        else:
            parts = target.split("/") + parts
            reached = "/" if target.startswith("/") else reached
    return reached, ""


def _link_target(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
