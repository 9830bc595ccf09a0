"""Falling through: the backing directory is bound to the mount point first, the FUSE mount lies over it, and taking that away leaves it.

Owns the layer beneath: lays it at mount time, uncovers it when acpfs gives up or is told to (`fall`), lifts it at the end of a mount. A
small record in the runtime directory says what lies where, and since when it is uncovered. Knows mounts and never looks into one: no
call here can hang on a dead daemon or (but for `lay`) on the backing directory. Needs CAP_SYS_ADMIN. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from acpfs.control import registry
from acpfs.control.runtime import places_to_look
from acpfs.ram.mounts import bind, mount_table, mounted_at, unmount

KIND = "fuse.acpfs"
STACKED_MAX = 16
"""Dead mounts of acpfs over one another that are cleared away at once."""
_DIRECTORY = "beneath"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Beneath:
    """The layer beneath one mount point."""

    mountpoint: str
    backing: str
    number: int
    """The kernel's id of the bind mount."""
    since: float = 0.0
    """Wall clock, seconds: when the mount was bypassed; 0: it is not."""
    reason: str = ""
    kept_operations: int = 0
    """What the RAM tier held then and the backing directory did not."""
    kept_bytes: int = 0

    @property
    def lies(self) -> bool:
        """Whether it is still there."""
        return any(entry.number == self.number and entry.path == self.mountpoint for entry in mount_table())

    @property
    def uncovered(self) -> bool:
        """Whether it is what applications see at the mount point."""
        entry = mounted_at(self.mountpoint)
        return entry is not None and entry.number == self.number


def lay(runtime: Path, backing: Path, mountpoint: str) -> str:
    """Bind the backing directory to the mount point, before anything is mounted there; "" or why that cannot be.

    One that an earlier, bypassed mount left is taken over: between two of them, applications that go on natively would write into the
    bare directory.
    """
    found = beneath(runtime, mountpoint)
    if found is not None and found.uncovered and found.backing == os.fspath(backing):
        _write(runtime, replace(found, since=0.0, reason="", kept_operations=0, kept_bytes=0))
        return ""
    if found is not None:
        lift(runtime, mountpoint)
    try:
        bind(backing, mountpoint)
    except OSError as error:
        return "only root may bind it there" if error.errno == errno.EPERM else f"binding it there: {error.strerror}"
    entry = mounted_at(mountpoint)
    assert entry is not None, mountpoint
    _write(runtime, Beneath(mountpoint, os.fspath(backing), entry.number))
    return ""


def fall(runtime: Path, mountpoint: str, reason: str, *, kept: tuple[int, int] | None = None, tier: Path | None = None) -> bool:
    """Take the FUSE mount away from over the backing directory, so that new opens are native; False: nothing lies beneath.

    What is open in the old mount goes on as long as somebody serves it. `kept`: (operations, bytes) in the RAM tier; without a worker
    that knows, they are counted in the state database of `tier`.

    Raises:
        OSError: the mount cannot be detached.
    """
    found = beneath(runtime, mountpoint)
    if found is None:
        return False
    operations, size = kept if kept is not None else count_kept(tier)
    _write(runtime, replace(found, since=time.time(), reason=reason, kept_operations=operations, kept_bytes=size))
    for _ in range(STACKED_MAX):
        entry = mounted_at(mountpoint)
        if entry is None or entry.kind != KIND:
            break
        unmount(mountpoint, detach=True)
    log.error("bypassed: new opens are native", mount=mountpoint, backing=found.backing, reason=reason, kept_operations=operations)
    return True


def lift(runtime: Path, mountpoint: str) -> None:
    """Remove the layer beneath, where it is uncovered; whoever has files open in it keeps them. Nothing when there is none."""
    found = beneath(runtime, mountpoint)
    if found is not None:
        if not found.uncovered:
            return
        with contextlib.suppress(OSError):
            unmount(mountpoint, detach=True)
    _file(runtime, mountpoint).unlink(missing_ok=True)


def beneath(runtime: Path, mountpoint: str) -> Beneath | None:
    """What lies beneath a mount point, covered or not."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = Beneath(**json.loads(_file(runtime, mountpoint).read_text()))
        if found.mountpoint == mountpoint and found.lies:
            return found
    return None


def bypassed(directories: Iterable[Path] | None = None) -> list[tuple[Path, Beneath]]:
    """All mounts that are bypassed now, each with its runtime directory."""
    found = []
    for directory in places_to_look() if directories is None else directories:
        for file in sorted((directory / _DIRECTORY).glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                record = Beneath(**json.loads(file.read_text()))
                if record.since and record.uncovered:
                    found.append((directory, record))
    return found


def count_kept(tier: Path | None) -> tuple[int, int]:
    """(operations, bytes) in the log of a RAM tier that no worker has; (0, 0) where it cannot be read."""
    if tier is None:
        return 0, 0
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(f"file:{tier}/state.sqlite?mode=ro", uri=True)) as db:
        (operations,) = db.execute("SELECT count(*) FROM op").fetchone()
        (size,) = db.execute("SELECT coalesce(sum(version.size), 0) FROM op JOIN version ON version.vid = op.vid").fetchone()
        return int(operations), int(size)
    return 0, 0


def _file(runtime: Path, mountpoint: str) -> Path:
    return runtime / _DIRECTORY / f"{registry.slug(mountpoint)}.json"


def _write(runtime: Path, record: Beneath) -> None:
    file = _file(runtime, record.mountpoint)
    file.parent.mkdir(mode=0o755, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "w") as stream:
        json.dump(asdict(record), stream)
    temporary.rename(file)
