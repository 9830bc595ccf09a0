"""Waiting for paths to be persisted or verified, from inside a training process.

Paths are matched by name and never looked at, so that a call cannot hang on the mount itself. Safe
after a fork and in any thread: each call has a connection of its own.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

from acpfs.control import client, registry
from acpfs.control.client import Line
from acpfs.errors import DeadlineError, NotMountedError

StrPath = str | os.PathLike[str]


def wait_persisted(
    path: StrPath,
    timeout_s: float | None = None,
    *,
    count: int | None = None,
    line: Line | None = None,
) -> None:
    """Return when everything at and below `path`, as it is now, is committed and flushed to stable
    storage.

    `count`: when at least so many files there are, and none is left that is not. `line`: lets
    another thread end the wait.

    Raises:
        acpfs.errors.DeadlineError: not in time, nothing is lost; it is a `TimeoutError`, too.
        acpfs.errors.AcpfsError: the backing directory refused it for good.
        acpfs.errors.NotMountedError: the path lies in no acpfs mount, or its daemon is gone.
    """
    _wait(path, timeout_s, {"verified": False, "count": count}, line)


class Durability(str, Enum):
    """Where what was closed is safe."""

    # of what lies in a mount, a later one survives more than one before it

    RAM = "ram"
    """In this node's memory, at least some of it: the end of the node loses that."""
    COPIED = "copied"
    """In another node's memory, too (`copies = 1`), or on stable storage: the end of this node
    loses nothing of it.
    """
    PERSISTED = "persisted"
    """On stable storage."""
    NATIVE = "native"
    """In no acpfs mount: its file system decides, and fsync asks it."""


def durability(path: StrPath) -> Durability:
    """How safe everything at and below `path` is now; `RAM` also of what is being written. Told
    to be copied is what `wait_copied` would wait for no more.

    Raises:
        acpfs.errors.AcpfsError: there is nothing, or the backing directory refused some of it for
            good, or some of it lost its writer.
        acpfs.errors.NotMountedError: it lies in a mount whose daemon cannot be asked from here.
    """
    try:
        wait_persisted(path, 0.0)
    except DeadlineError:
        return _in_ram(path)
    except NotMountedError:
        if registry.lies_in_mount(os.fspath(path)):
            raise  # a bind mount in a container, say: it may be in RAM alone
        return Durability.NATIVE
    return Durability.PERSISTED


def _in_ram(path: StrPath) -> Durability:
    try:
        return wait_copied(path, 0.0)
    except DeadlineError:
        return Durability.RAM


def wait_copied(
    path: StrPath, timeout_s: float | None = None, *, line: Line | None = None
) -> Durability:
    """Return when another node has everything at and below `path`, as it is now, in its memory, or
    when it is persisted: `COPIED`, or `PERSISTED` where that was sooner, or there are no copies.

    Raises:
        acpfs.errors.DeadlineError: neither in time.
        acpfs.errors.AcpfsError: as `wait_persisted`.
    """
    done = _wait(path, timeout_s, {"copied": True}, line)
    return Durability(done.get("state", Durability.PERSISTED.value))


def wait_verified(
    path: StrPath, timeout_s: float | None = None, *, line: Line | None = None
) -> None:
    """`wait_persisted`, and then read back from the backing directory and equal by checksum.

    Raises:
        acpfs.errors.DeadlineError: as `wait_persisted`.
        acpfs.errors.AcpfsError: as `wait_persisted`; also when a checksum differs.
    """
    _wait(path, timeout_s, {"verified": True}, line)


def flush(mountpoint: StrPath, timeout_s: float | None = None, *, line: Line | None = None) -> None:
    """Return when everything in the mount that is complete now is persisted.

    Raises:
        acpfs.errors.AcpfsError: as `wait_persisted`.
    """
    client.request(
        registry.find(os.fspath(mountpoint)), "flush", {"timeout_s": timeout_s}, line=line
    )


def wait_for_nodes(
    path: StrPath, timeout_s: float | None = None, *, line: Line | None = None
) -> None:
    """Return when what other nodes had closed before this call can be read here; `path`: anything
    in the mount. Missing nodes do not count.

    For a job that loads what all its ranks have just saved: after the barrier, before the first
    open.

    Raises:
        acpfs.errors.DeadlineError: some are still draining.
        acpfs.errors.NotMountedError: as `wait_persisted`.
    """
    record, _below = registry.locate(os.fspath(path))
    client.request(record, "wait_nodes", {"timeout_s": timeout_s}, line=line)


def status(path: StrPath | None = None) -> dict[str, Any]:
    """The mount's status, as `acpfs-ctl status --json` has it; `path`: anything in the mount, None:
    the only mount there is.

    Raises:
        acpfs.errors.NotMountedError: there is none.
        acpfs.errors.SeveralMountsError: `path` is None, and there are several.
    """
    answer: dict[str, Any] = client.request(
        registry.find(None if path is None else os.fspath(path)), "status"
    )
    return answer


def _wait(
    path: StrPath, timeout_s: float | None, how: dict[str, Any], line: Line | None
) -> dict[str, Any]:
    record, below = registry.locate(os.fspath(path))
    words = {"paths": [below], "timeout_s": timeout_s, **how}
    done: dict[str, Any] = client.request(record, "wait", words, line=line)
    return done
