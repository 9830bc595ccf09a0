"""Checks before a daemon starts, each with one line that says what is wrong and what to do.

They look at directories from a process that is abandoned when it hangs (`apart`). Nothing here
changes anything.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from acpfs.config import Settings
from acpfs.control import registry, runtime
from acpfs.descriptors import readable
from acpfs.errors import MachineError, NoThreadError, RefusedError
from acpfs.mounting.mountpoint import check_apart, check_free
from acpfs.mounting.nested import volume_above
from acpfs.ram.memory import budget_bytes, read_memory
from acpfs.runtime.threads import THREADS
from acpfs.supervisor import fallthrough
from acpfs.supervisor.service import has_inherited_session

DEV_FUSE = Path("/dev/fuse")
FUSE_CONF = Path("/etc/fuse.conf")
BACKING_WAIT_S = 30.0
NESTED_WAIT_S = 5.0
"""For a look at the directories above: nothing in them is needed."""

T = TypeVar("T")


def normal(settings: Settings) -> Settings:
    """The settings with absolute paths."""
    mountpoint = registry.normalised(os.fspath(settings.mountpoint))
    settings = settings.changed(
        backing=Path(os.path.abspath(settings.backing)), mountpoint=Path(mountpoint)
    )
    return (
        settings
        if settings.spill is None
        else settings.changed(spill=Path(os.path.abspath(settings.spill)))
    )


def check_all(settings: Settings, *, is_mounted: bool = False) -> Settings:
    """All checks; the settings with absolute paths and what this user is not allowed left out.

    `is_mounted`: by a living supervisor, which is to give the mount to another one.

    Raises:
        MachineError: the machine or a directory does not offer what a mount needs.
        RefusedError: in use.
    """
    settings = normal(settings)
    mountpoint = os.fspath(settings.mountpoint)
    check_fuse()
    budget_bytes(settings.ram, read_memory())
    if is_mounted or has_inherited_session():
        # the mount is there, and a look at it would wait for the worker that is still to be started
        return _allowed(settings)
    check_free(mountpoint, settings.runtime_dir or runtime.runtime_dir())
    apart(
        BACKING_WAIT_S,
        f"backing directory {settings.backing} does not answer",
        lambda: check_backing(settings.backing),
    )
    apart(
        BACKING_WAIT_S,
        f"backing directory {settings.backing} does not answer",
        lambda: check_apart(settings.backing, mountpoint),
    )
    if not settings.nested:
        check_not_nested(settings.backing)
    if settings.spill is not None:
        spill = settings.spill
        complaint = f"spill directory {spill} does not answer"
        others = {"backing directory": settings.backing, "mount point": settings.mountpoint}
        apart(BACKING_WAIT_S, complaint, lambda: check_spill(spill, others))
    return _allowed(settings)


def check_backing(backing: Path) -> None:
    """Missing, not a directory, not writable."""
    try:
        fd = os.open(backing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MachineError(f"backing directory {backing} does not exist") from None
    except NotADirectoryError:
        raise MachineError(f"backing directory {backing} is not a directory") from None
    except OSError as error:
        raise MachineError(
            f"backing directory {backing} cannot be opened: {error.strerror}"
        ) from error
    os.close(fd)
    if not os.access(backing, os.W_OK | os.X_OK):
        why = (
            "its file system is read-only"
            if os.statvfs(backing).f_flag & os.ST_RDONLY
            else "permission denied"
        )
        raise MachineError(f"backing directory {backing} is not writable: {why}")


def check_not_bare(backing: Path, tiers: Path) -> None:
    """Refuse a directory that is not the one for which a RAM tier keeps something: most likely its
    file system is not mounted.

    Raises:
        RefusedError: so it is.
    """
    kept = {}
    for meta in sorted(tiers.glob("*/meta.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            owner = json.loads(meta.read_text())
            if (
                owner["backing"] == os.fspath(backing)
                and fallthrough.count_kept(meta.parent)[0] != 0
            ):
                kept[owner["volume_id"]] = meta.parent
    if not kept:
        return
    from acpfs.backing.anchor import volume_at  # most mounts have no need of it

    fd = os.open(backing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = volume_at(fd)
    finally:
        os.close(fd)
    if found not in kept:
        volume, tier = next(iter(kept.items()))
        raise RefusedError(
            f"{backing} is not the directory (volume {volume}) for which the RAM tier {tier} "
            "keeps what is not drained: is its file system "
            f"mounted? To start without what is kept, move that RAM tier away"
        )


def check_not_nested(backing: Path) -> None:
    """Refuse a directory below another backing directory that is in use.

    Raises:
        RefusedError: so it is.
    """
    try:
        found = apart(
            NESTED_WAIT_S, "what lies above does not answer", lambda: volume_above(backing)
        )
    except (MachineError, OSError):
        return  # what hangs above is not this mount's business, and must not keep it from starting
    if found is not None:
        directory, members = found
        raise RefusedError(
            f"{backing} lies in {directory}, which is the backing directory of other mounts "
            f"({', '.join(members[:3])}): between the two "
            "there would be no order, and no pointer waits for the other's files. Mount "
            f"{directory} here too, or say --nested"
        )


def check_spill(spill: Path, apart: dict[str, Path]) -> None:
    """Whether the directory is there, may be written, and lies apart from what acpfs serves, which
    is named.

    Raises:
        MachineError: missing, not a directory, not writable.
        RefusedError: it lies in one of those, or they in it.
    """
    if not spill.is_dir():
        raise MachineError(f"spill directory {spill} does not exist: is its disk mounted?")
    if not os.access(spill, os.W_OK | os.X_OK):
        raise MachineError(f"spill directory {spill} is not writable")
    for what, other in apart.items():
        inner, outer = sorted(
            (os.path.realpath(spill), os.path.realpath(other)), key=len, reverse=True
        )
        if inner == outer or inner.startswith(outer.rstrip("/") + "/"):
            raise RefusedError(
                f"spill directory {spill} and {what} {other} lie one inside the other"
            )


def check_fuse() -> None:
    """/dev/fuse is there, may be opened, and mounting is possible."""
    try:
        os.close(os.open(DEV_FUSE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            raise MachineError(
                f"no {DEV_FUSE}: load the kernel's fuse module (modprobe fuse), or give the "
                "container the device"
            ) from None
        what_to_do = (
            f"root can let users mount: chmod 0666 {DEV_FUSE}, as most distributions have it"
            if error.errno == errno.EACCES
            else "give the container the device"
        )
        raise MachineError(
            f"fuse is not permitted here: {DEV_FUSE}: {error.strerror}; {what_to_do}"
        ) from error
    if os.getuid() != 0 and shutil.which("fusermount3") is None:
        raise MachineError(
            "fuse is not permitted here: not root, and there is no fusermount3 (install fuse3)"
        )


def _allowed(settings: Settings) -> Settings:
    """Users may let others in only where fuse.conf says so.

    Asked for: an error; by default: left out.
    """
    if os.getuid() == 0 or not settings.allow_other or _user_allow_other(FUSE_CONF):
        return settings
    if "allow_other" in settings.given:
        raise MachineError(
            f"allow_other is not permitted to users here: add user_allow_other to {FUSE_CONF}"
        )
    return settings.changed(allow_other=False)


def _user_allow_other(conf: Path) -> bool:
    try:
        return any(line.strip() == "user_allow_other" for line in conf.read_text().splitlines())
    except OSError:
        return False


def apart(wait_s: float, complaint: str, look: Callable[[], T]) -> T:
    """Look at what may hang, in a process of its own, and give what was seen; for commands, which
    have to end.

    A thread that hangs in the kernel keeps its process from ending: whoever typed `acpfs mount`
    would wait for the storage after all. The process lets go of what it was given, so that nobody
    who reads this one's output waits for it either.

    Raises:
        MachineError: `complaint`, when it hung.
        Exception: what `look` raised.
    """
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():  # Python 3.12 warns of threads, of which commands have none
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _look_apart(look, write_fd)
    os.close(write_fd)
    with open(read_fd, "rb", buffering=0) as answers:
        said = b""
        until = time.monotonic() + wait_s
        while readable(answers, max(0.0, until - time.monotonic())):
            more = answers.read(1 << 16)
            if not more:
                os.waitpid(pid, 0)
                seen, error = pickle.loads(said)  # noqa: S301 - our own process has written it
                if error is not None:
                    raise error
                return seen  # type: ignore[no-any-return]
            said += more
    os.kill(pid, signal.SIGKILL)  # nobody waits for it: it ends when the call does
    raise MachineError(f"{complaint} (waited {wait_s:g} s)")


def _look_apart(look: Callable[[], object], write_fd: int) -> NoReturn:
    """In the process of its own."""
    os.dup2(write_fd, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    seen = None
    failed = None
    try:
        seen = look()
    except Exception as error:  # noqa: BLE001 - handed on
        failed = error
    try:
        said = pickle.dumps((seen, failed))
    except Exception:  # noqa: BLE001 - an error that cannot be handed on as it is
        said = pickle.dumps((None, MachineError(f"{type(failed).__name__}: {failed}")))
    with open(3, "wb", closefd=False) as answers:
        answers.write(said)
    os._exit(0)


def within(wait_s: float, complaint: str, check: Callable[[], None]) -> None:
    """Run a check that may hang; a hung one keeps its (daemon) thread and nothing else.

    Raises:
        MachineError: `complaint`, when it did.
        Exception: the check's own; one that fails in whatever way has not passed.
    """
    outcome: list[Exception] = []

    def run() -> None:
        try:
            check()
        except Exception as error:  # noqa: BLE001 - handed on
            outcome.append(error)

    try:
        thread = THREADS.start("check", run, patience_s=wait_s)
    except NoThreadError as error:
        raise MachineError(f"{complaint} ({error.strerror})") from None
    if not thread.join(wait_s):
        thread.withdraw()
        raise MachineError(f"{complaint} (waited {wait_s:g} s)")
    if outcome:
        raise outcome[0]
