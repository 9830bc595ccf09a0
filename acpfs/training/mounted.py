"""What a gasp asks of the mount that it lies in: room, whom its pointers wait for, and when it is
safe. Where there is none, nothing.

No question here fails a gasp: what a mount refuses is logged, and the gasp goes on without. A
worker that was killed answers when the next one does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from acpfs import client
from acpfs.client.needs import NEEDS_XATTR
from acpfs.control import registry
from acpfs.errors import AcpfsError, DeadlineError, NotMountedError
from acpfs.logger import get_logger

log = get_logger(__name__)
PREFIX = "acpfs:"
"""Before the id of a node that has a mount: in a list of nodes, those that a pointer can wait
for.
"""
URGENT_S = 1800.0
LOOK_AGAIN_S = 0.1


def node_name(directory: Path) -> str:
    """What this node is called among those of the job: by its mount, so that two mounts are two
    nodes, else by its host.
    """
    try:
        return PREFIX + client.node_id(directory)
    except NotMountedError:
        return socket.gethostname()


def places(directory: Path) -> list[Path]:
    """Where what lies in a directory can be read: the mount, which has it in RAM, and the storage
    below it.
    """
    found = [directory]
    try:
        record, below = registry.locate(os.fspath(directory))
        found.append(Path(record.backing) / below.strip("/"))
    except (AcpfsError, OSError):
        pass  # no mount
    return found


def readable(directory: Path) -> Path:
    """Where to read small files of the job: in the mount, or in the storage where the mount is dead
    or gone.
    """
    try:
        record, below = registry.locate(os.fspath(directory))
    except (AcpfsError, OSError):
        return directory
    return (
        directory if os.path.ismount(record.mountpoint) else Path(record.backing) / below.strip("/")
    )


def tell_where(directory: Path) -> None:
    """Say it where gasps go to no mount of acpfs: one that is missing is noticed before the fault,
    not behind it.
    """
    try:
        registry.locate(os.fspath(directory))
    except NotMountedError:
        free = shutil.disk_usage(directory).free
        said = f"gasps go to {directory}, which lies in no acpfs mount, with {free >> 30} GiB free"
        log.warning(said)  # outside of a daemon only the event is shown


def needed(nodes: Iterable[str]) -> tuple[str, ...]:
    """Ids that a pointer can wait for. Who has no mount wrote to the storage itself."""
    return tuple(name.removeprefix(PREFIX) for name in nodes if name.startswith(PREFIX))


@contextlib.contextmanager
def written_by_one(directory: Path) -> Iterator[None]:
    """While this rank writes its part of a gasp: the directory is there, it is urgent, and pointers
    in it wait for no other node.

    They need not: nobody looks for them before the directory has its name, and that waits for all
    who wrote.
    """
    directory.mkdir(
        exist_ok=True
    )  # no parents: where the mount is gone for a moment, nothing is made below its mount point
    declare_urgent(directory, URGENT_S)
    try:
        needs = client.node_id(directory)
    except NotMountedError:
        yield
        return
    set_needs(directory, (needs,))
    try:
        yield
    finally:  # the next pointer is somebody else's
        with contextlib.suppress(OSError):
            os.removexattr(directory, NEEDS_XATTR)


def wait_until_back(directory: Path, go_on: Callable[[], bool]) -> None:
    """Return when the mount is there, or `go_on` does not hold.

    With libfuse a mount whose worker was killed is made anew: calls fail until then, or see what
    lies below the mount point.
    """
    try:
        record, _below = registry.locate(os.fspath(directory))
    except NotMountedError:
        return
    while not os.path.ismount(record.mountpoint) and go_on():
        time.sleep(LOOK_AGAIN_S)


def declare_urgent(directory: Path, seconds: float) -> None:
    """Let what is written below it take the reserve."""
    _asked("urgent", lambda: client.declare_urgent(directory, seconds))


def withdraw_urgent(directory: Path) -> None:
    """It is done."""
    _asked("not urgent", lambda: client.withdraw_urgent(directory))


def set_needs(path: Path, nodes: tuple[str, ...]) -> None:
    """The next pointer that this becomes waits for these nodes; none: for all, as ever."""
    if nodes:
        _asked("needs", lambda: client.set_needs(path, nodes))


def wait_safe(checkpoint: Path, tracker: Path | None, durability: str, timeout_s: float) -> bool:
    """Whether a gasp is as safe as a policy has it (`Policy.durability`), its name and its tracker
    included.

    `persisted`: on every node that wrote some of it. `copied`: what this node has of it; a name
    that is not here yet was given on another node, which has seen on the storage what others wrote.
    """
    paths = [checkpoint, *([tracker] if tracker is not None else [])]
    if durability == "copied":
        return _waited(client.wait_copied, [one for one in paths if _is_here(one)], timeout_s)
    return durability == "ram" or _waited(client.wait_persisted, paths, timeout_s)


def _is_here(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError:  # the worker was killed: whoever waits for it hears more
        return True
    return True


def _waited(wait: Callable[[Path, float], object], paths: list[Path], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            for path in paths:
                wait(path, max(0.0, deadline - time.monotonic()))
        except NotMountedError:
            return _synced(paths)
        except DeadlineError:
            return False
        except (
            AcpfsError
        ) as error:  # another node's rename is not there yet, or the worker was killed
            if time.monotonic() > deadline:
                log.error("the gasp is not known to be safe", path=str(paths[0]), error=str(error))
                return False
            time.sleep(LOOK_AGAIN_S)
        else:
            return True


def _synced(paths: Iterable[Path]) -> bool:
    """fsync of all, files before the directories that name them."""
    try:
        for path in paths:
            for one in (
                (*sorted(path.rglob("*"), reverse=True), path, path.parent)
                if path.is_dir()
                else (path, path.parent)
            ):
                descriptor = os.open(one, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
    except OSError as error:
        log.error("the gasp is not known to be persisted", error=str(error))
        return False
    return True


def _asked(what: str, call: Callable[[], object]) -> None:
    """Do it, or go on without."""
    try:
        call()
    except NotMountedError:
        return
    except AcpfsError as error:
        log.warning("a gasp goes on without", what=what, why=str(error))
