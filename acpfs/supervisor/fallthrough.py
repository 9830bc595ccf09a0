"""Falling through: the backing directory is bound to the mount point first, the FUSE mount lies
over it, and taking that away leaves it.

Over a network a directory entry can become invalid (one look-up that fails with ENOTCONN or ESTALE
is enough, whoever makes it), and the kernel then takes away what is mounted on it: acpfs, whose
mount would lie on the backing directory's own entry. Such a directory is bound *aside*, in the
runtime directory, and put to the mount point only when acpfs gives up.

Owns the layer beneath: lays it at mount time, uncovers it when acpfs gives up or is told to
(`fall`), lifts it at the end of a mount. A small record in the runtime directory says what lies
where, and since when it is uncovered. Knows mounts and never looks into one: no call here can hang
on a dead daemon or (but for `lay`) on the backing directory. Needs CAP_SYS_ADMIN. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from acpfs.control import registry
from acpfs.control.runtime import places_to_look
from acpfs.logger import get_logger
from acpfs.ram.mounts import (
    attach,
    bind,
    clone,
    mount_of,
    mount_table,
    mounted_at,
    number_of,
    unmount,
)
from acpfs.runtime.threads import THREADS

KIND = "fuse.acpfs"
STACKED_MAX = 16
"""Dead mounts of acpfs over one another that are cleared away at once."""
_DIRECTORY = "beneath"
_INVALID = "//deleted"
"""What the mount table says of a mount whose root has lost its name; such a one cannot be bound."""
LOOK_S = 5.0
"""How long a name of the backing directory may take when acpfs gives up."""
_LASTING = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs", "ramfs"}
)
"""File systems whose directory entries nobody changes but this machine's kernel."""

Kept = tuple[int | None, int | None]
"""Operations and bytes; None: not known."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BypassedMount:
    """The layer beneath one mount point."""

    mountpoint: str
    backing: str
    number: int
    """The kernel's id of the bind mount."""
    since: float = 0.0
    """Wall clock, seconds: when the mount was bypassed; 0: it is not."""
    reason: str = ""
    kept_operations: int | None = 0
    """What the RAM tier held then and the backing directory did not; None: its state could not be
    read.
    """
    kept_bytes: int | None = 0
    aside: str = ""
    """Where it is bound until it is needed; "": at the mount point."""
    coming: int = 0
    """The kernel's id of the copy that is on its way from aside to the mount point; 0: none is."""

    @property
    def lies(self) -> bool:
        """Whether it is still there."""
        return any(
            entry.number == self.number and entry.path == (self.aside or self.mountpoint)
            for entry in mount_table()
        )

    def as_it_lies(self) -> BypassedMount:
        """What is on its way may have come, and whoever brought it been killed before noting that:
        the mount table knows.
        """
        at_mountpoint = [
            entry.number
            for entry in mount_table()
            if entry.path == self.mountpoint and entry.kind != KIND
        ]
        return (
            replace(self, number=self.coming, aside="", coming=0)
            if self.coming in at_mountpoint
            else self
        )

    @property
    def uncovered(self) -> bool:
        """Whether it is what applications see at the mount point."""
        entry = mounted_at(self.mountpoint)
        return entry is not None and entry.number == self.number


def lay(runtime: Path, backing: Path, mountpoint: str) -> str:
    """Bind the backing directory to the mount point, before anything is mounted there; "" or why
    that cannot be.

    One that an earlier, bypassed mount left is taken over: between two of them, applications that
    go on natively would write into the bare directory.
    """
    found = beneath(runtime, mountpoint)
    if found is not None and found.uncovered and found.backing == os.fspath(backing):
        _write(runtime, replace(found, since=0.0, reason="", kept_operations=0, kept_bytes=0))
        return ""
    if found is not None:
        lift(runtime, mountpoint)
    aside = "" if _lasts(backing) else _aside(runtime, mountpoint)
    try:
        if aside:
            os.makedirs(aside, mode=0o700, exist_ok=True)
        bind(backing, aside or mountpoint)
    except OSError as error:
        return (
            "only root may bind it there"
            if error.errno == errno.EPERM
            else f"binding it there: {error.strerror}"
        )
    _write(
        runtime,
        BypassedMount(mountpoint, os.fspath(backing), _number(aside or mountpoint), aside=aside),
    )
    return ""


def _lasts(backing: Path) -> bool:
    """Whether the kernel never takes away what is mounted on the directory: local, or the root of
    its file system, which is no entry.
    """
    path = os.path.realpath(backing)
    entry = mount_of(path)
    return entry is not None and (entry.kind in _LASTING or (entry.path, entry.root) == (path, "/"))


def _number(path: str) -> int:
    entry = mounted_at(path)
    assert entry is not None, path
    return entry.number


def fall(
    runtime: Path,
    mountpoint: str,
    reason: str,
    *,
    kept: Kept | None = None,
    tier: Path | None = None,
) -> bool:
    """Take the FUSE mount away from over the backing directory, so that new opens are native;
    False: nothing lies beneath.

    What is open in the old mount goes on as long as somebody serves it. `kept`: (operations, bytes)
    in the RAM tier; without a worker that knows, they are counted in the state database of `tier`.

    Raises:
        OSError: the mount cannot be detached, or the backing directory does not answer: then the
            mount stays, dead or not.
    """
    found = beneath(runtime, mountpoint)
    if found is None:
        return False
    tree = _tree(found) if found.aside else -1
    operations, size = kept if kept is not None else count_kept(tier)
    coming = number_of(tree) if tree >= 0 else 0
    record = replace(
        found,
        since=time.time(),
        reason=reason,
        kept_operations=operations,
        kept_bytes=size,
        coming=coming,
    )
    try:
        _write(runtime, record)
        _uncover(mountpoint, tree)
    finally:
        if tree >= 0:
            os.close(tree)
    if found.aside:
        _write(runtime, record.as_it_lies())
        _remove_aside(found.aside)
    log.error(
        "bypassed: new opens are native",
        mount=mountpoint,
        backing=found.backing,
        reason=reason,
        kept_operations=operations,
    )
    return True


def end_mount(runtime: Path, settings: dict[str, Any], facts: dict[str, Any], reason: str) -> None:
    """Nobody will serve this mount any more: uncover what lies beneath, or take it away; with
    `on_failure = "stop"` it stays dead.
    """
    mountpoint = settings["mountpoint"]
    tier = facts.get("tier")
    with contextlib.suppress(OSError):
        fell = fall(runtime, mountpoint, reason, tier=Path(tier) if tier else None)
        if not fell and settings.get("on_failure") != "stop":
            unmount(Path(mountpoint), detach=True)


def end_unserved(
    settings: dict[str, Any], facts: dict[str, Any], reason: str, *, told: bool
) -> None:
    """No worker comes any more: `end_mount`; one that was `told` to end is taken away, and its last
    words say what it leaves.
    """
    say(
        settings,
        f"{settings['mountpoint']}: {reason}" + (f"; {_left(settings, facts)}" if told else ""),
    )
    if told:
        clear_away(settings, mounted=covers(settings["mountpoint"]))
    else:
        end_mount(Path(settings["runtime_dir"]), settings, facts, reason)


def say(settings: dict[str, Any], text: str) -> None:
    """To stderr, and into the workers' log: a detached supervisor's stderr leads nowhere."""
    sys.stderr.write(f"acpfs: {text}\n")
    if settings.get("log_file"):
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"timestamp": at, "level": "error", "logger": __name__, "event": text})
        with (
            contextlib.suppress(OSError),
            open(settings["log_file"], "a", encoding="ascii") as file,
        ):
            file.write(f"{line}\n")


def _left(settings: dict[str, Any], facts: dict[str, Any]) -> str:
    """What the RAM tier keeps, and how to get it."""
    tier = Path(facts["tier"]) if facts.get("tier") else None
    operations, size = count_kept(tier)
    known = (
        "how much is not known"
        if operations is None
        else f"operations: {operations}, bytes: {size}"
    )
    return (
        f"what is not persisted stays in the RAM tier{f' {tier}' if tier else ''} ({known}): "
        f"`acpfs mount {settings['backing']} {settings['mountpoint']}` drains it, unless this "
        "machine loses its memory first"
    )


def _uncover(mountpoint: str, tree: int) -> None:
    """Take away what acpfs has mounted, and leave `tree` there (-1: it lies beneath); nobody is to
    see the bare directory.

    Where the kernel cannot put the tree beneath the last mount first, an open in between does, and
    a kill leaves it to `finished`.
    """
    over = _stacked(mountpoint)
    for _ in range(over - 1):
        unmount(mountpoint, detach=True)
    lies = tree < 0
    if over and not lies:
        with contextlib.suppress(OSError):
            attach(tree, mountpoint, beneath=True)
            lies = True
    if over:
        unmount(mountpoint, detach=True)
    if not lies:
        attach(tree, mountpoint)


def _stacked(mountpoint: str) -> int:
    """How many mounts of acpfs lie over one another there, on top of all others."""
    there = reversed([entry for entry in mount_table() if entry.path == mountpoint])
    return len(
        list(
            itertools.islice(
                itertools.takewhile(lambda entry: entry.kind == KIND, there), STACKED_MAX
            )
        )
    )


def covers(mountpoint: str) -> bool:
    """Whether a mount of acpfs is what applications see there."""
    return _stacked(mountpoint) > 0


def finished(runtime: Path, mountpoint: str) -> BypassedMount | None:
    """What lies beneath, after a fall in whose middle somebody was killed was ended: nothing of
    acpfs is mounted, but it is still aside.
    """
    found = beneath(runtime, mountpoint)
    if found is None or not (found.since and found.aside) or _stacked(mountpoint):
        return found
    try:
        fall(runtime, mountpoint, found.reason, kept=(found.kept_operations, found.kept_bytes))
    except OSError as error:
        log.error("the mount point is bare", mount=mountpoint, error=str(error))
    return beneath(runtime, mountpoint)


def _tree(found: BypassedMount) -> int:
    """What is to be attached to the mount point: what lies aside, or, where its entry became
    invalid, what is there by that name now.

    All that asks the backing directory, before anything is taken away: the bare directory is no
    place to write to.

    Raises:
        OSError: it does not answer, or refuses.
    """
    entry = mounted_at(found.aside)
    source = (
        found.aside if entry is not None and not entry.root.endswith(_INVALID) else found.backing
    )
    outcome: list[int | OSError] = []

    def look() -> None:
        try:
            outcome.append(clone(source))
        except OSError as error:
            outcome.append(error)

    looking = THREADS.start("look", look, patience_s=LOOK_S)  # only this can hang
    looking.join(LOOK_S)
    tree = (
        outcome[0]
        if outcome
        else TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), found.backing)
    )
    if isinstance(tree, OSError):
        raise tree
    return tree


def _remove_aside(aside: str) -> None:
    with contextlib.suppress(OSError):
        unmount(aside, detach=True)
    with contextlib.suppress(OSError):
        os.rmdir(aside)


def lift(runtime: Path, mountpoint: str) -> None:
    """Remove the layer beneath, where it is uncovered; whoever has files open in it keeps them.

    Nothing when there is none.
    """
    found = beneath(runtime, mountpoint)
    if found is not None and not found.aside:
        if not found.uncovered:
            return
        with contextlib.suppress(OSError):
            unmount(mountpoint, detach=True)
    _remove_aside(_aside(runtime, mountpoint))
    _file(runtime, mountpoint).unlink(missing_ok=True)


def beneath(runtime: Path, mountpoint: str) -> BypassedMount | None:
    """What lies beneath a mount point, covered or not."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = _read(_file(runtime, mountpoint))
        if found.mountpoint == mountpoint and found.lies:
            return found
    return None


def _read(file: Path) -> BypassedMount:
    """Fields that it has and this acpfs does not know are a newer one's."""
    found = json.loads(file.read_text())
    known = [field.name for field in fields(BypassedMount) if field.name in found]
    return BypassedMount(**{name: found[name] for name in known}).as_it_lies()


def bypassed() -> list[tuple[Path, BypassedMount]]:
    """All mounts that are bypassed now, each with its runtime directory."""
    found = []
    for directory in places_to_look():
        for file in sorted((directory / _DIRECTORY).glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                record = _read(file)
                if record.since and record.uncovered:
                    found.append((directory, record))
    return found


def count_kept(tier: Path | None) -> Kept:
    """(operations, bytes) in the log of a RAM tier that no worker has; (None, None) where that
    cannot be told, which is not nothing.

    Without SQLite's locks and shared index, like the worker: on a tmpfs that is full the index
    cannot be made.
    """
    if tier is None:
        return None, None
    # whoever mounts, unmounts or asks for the status needs this module, but seldom this function
    import sqlite3

    place = f"{(tier / 'state.sqlite').absolute().as_uri()}?mode=ro&vfs=unix-none"
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(place, uri=True)) as db,
    ):
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'op'").fetchone():
            return 0, 0  # its maker died before there was a log
        (operations,) = db.execute("SELECT count(*) FROM op").fetchone()
        (size,) = db.execute(
            "SELECT coalesce(sum(version.size), 0) FROM op JOIN version ON version.vid = op.vid"
        ).fetchone()
        return int(operations), int(size)
    return None, None


def _file(runtime: Path, mountpoint: str) -> Path:
    return runtime / _DIRECTORY / f"{registry.slug(mountpoint)}.json"


def _aside(runtime: Path, mountpoint: str) -> str:
    return os.fspath(_file(runtime, mountpoint).with_suffix(".aside"))


def _write(runtime: Path, record: BypassedMount) -> None:
    file = _file(runtime, record.mountpoint)
    file.parent.mkdir(mode=0o755, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    with os.fdopen(fd, "w") as stream:
        json.dump(asdict(record), stream)
    temporary.rename(file)


def clear_away(settings: dict[str, Any], *, mounted: bool) -> None:
    """Take down a mount that never came to be, as far as it goes, and what was laid beneath it."""
    runtime = Path(settings["runtime_dir"])
    mountpoint = settings["mountpoint"]
    with contextlib.suppress(OSError):
        if mounted:
            unmount(Path(mountpoint), detach=True)
    with contextlib.suppress(OSError):
        lift(runtime, mountpoint)
