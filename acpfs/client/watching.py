"""Checkpoints for the process that writes them: which there are, and being told when one is safe,
by names, sizes and checksums.

    def safe(checkpoint):
        print(checkpoint.path, [(file.path, file.size, file.checksum) for file in checkpoint.files])
    watching = on_persisted("/mnt/acp/run1", safe)

Standard library only, no FUSE. Each call has a connection of its own, so it is safe in any thread
and after a fork; a callback's thread stays with the process that asked for it. The end of a worker
goes unnoticed: the next one is asked.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from acpfs.client.persistence import StrPath
from acpfs.control import client, registry
from acpfs.control.client import Line
from acpfs.control.socket_messages import Json
from acpfs.errors import AcpfsError

WAIT_FOR_MOUNT_S = 1.0
"""Between two tries to reach a daemon that is away."""
log = logging.getLogger("acpfs.client")


@dataclass(frozen=True, slots=True)
class SafeFile:
    """One persisted file of a checkpoint."""

    path: str
    """Absolute, in the mount."""
    size: int
    checksum: str | None
    """xxh3-128 as `xxh128sum` prints it; None for a file that was not written through the mount."""


@dataclass(frozen=True, slots=True)
class SafeCheckpoint:
    """A checkpoint whose every file is on stable storage; times are seconds, wall clock, None where
    not known.
    """

    path: str
    """Absolute, in the mount; with `*` where several files beside each other make one
    checkpoint.
    """
    step: int | None
    epoch: int
    size: int
    """Bytes of all files."""
    files: tuple[SafeFile, ...]
    began_at: float | None
    closed_at: float | None
    persisted_at: float | None


class Watching:
    """A callback that was asked for; a context manager that ends it."""

    def __init__(self, line: Line, thread: threading.Thread) -> None:
        self._line = line
        self._thread = thread

    def cancel(self) -> None:
        """No call begins after this; one that is under way is waited for (unless it is this very
        one).
        """
        self._line.cut()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_error: object) -> None:
        self.cancel()


def checkpoints(directory: StrPath) -> list[dict[str, Any]]:
    """Checkpoints at and below a directory, as `acpfs-ctl checkpoints --json` has them.

    Raises:
        acpfs.errors.NotMountedError: the directory lies in no acpfs mount, or its daemon is gone.
    """
    record, below = registry.locate(os.fspath(directory))
    found: list[dict[str, Any]] = client.request(record, "checkpoints", {"paths": [below]})["items"]
    return found


def on_persisted(
    directory: StrPath,
    callback: Callable[[SafeCheckpoint], None],
    *,
    count: int | None = None,
    settle_s: float | None = None,
) -> Watching:
    """Have `callback` called, in a thread of its own, with each checkpoint at and below a directory
    that becomes safe from now on.

    `count`: a checkpoint is safe when it has at least so many files and all are persisted; without,
    when nothing came to it for `settle_s` seconds (default 5) and all is persisted. One that is
    written to again is told again. An exception of the callback is logged, and the next checkpoint
    is told all the same.

    Raises:
        acpfs.errors.NotMountedError: the directory lies in no acpfs mount.
    """
    place = _located(directory)
    line = Line()
    arguments = (place, _guarded(callback, line), line, count, settle_s, time.monotonic())
    thread = threading.Thread(target=_watch, args=arguments, name="acpfs-on-persisted", daemon=True)
    try:
        thread.start()
    except BaseException:  # of a signal's handler: it may run all the same, and tells nobody
        line.cut()
        raise
    return Watching(line, thread)


def persisted_checkpoints(
    directory: StrPath,
    *,
    count: int | None = None,
    settle_s: float | None = None,
    line: Line | None = None,
) -> Generator[SafeCheckpoint, None, None]:
    """Each checkpoint at and below a directory that becomes safe from the first `next` on, without
    end; as `on_persisted`.

    `line`: lets another thread end it.
    """
    told: queue.SimpleQueue[SafeCheckpoint | None] = queue.SimpleQueue()
    line = Line() if line is None else line

    place = _located(directory)
    after = time.monotonic()  # not in the thread, which may run late

    def watch() -> None:
        _watch(place, told.put, line, count, settle_s, after)
        told.put(None)

    thread = threading.Thread(target=watch, name="acpfs-persisted", daemon=True)
    try:
        thread.start()
        while (checkpoint := told.get()) is not None:
            yield checkpoint
    finally:
        line.cut()
        if thread.ident is not None:  # else a signal's handler raised before it was started
            thread.join()


def _located(directory: StrPath) -> str:
    """Its absolute path, wherever the process goes later.

    Raises:
        acpfs.errors.NotMountedError: it lies in no acpfs mount.
    """
    place = os.path.join(os.getcwd(), os.fspath(directory))
    registry.locate(place)
    return place


def _guarded(
    callback: Callable[[SafeCheckpoint], None], line: Line
) -> Callable[[SafeCheckpoint], None]:
    def call(checkpoint: SafeCheckpoint) -> None:
        if line.is_cut:
            return
        try:
            callback(checkpoint)
        except Exception:
            log.exception("on_persisted: the callback failed for %s", checkpoint.path)

    return call


def _watch(
    place: str,
    tell: Callable[[SafeCheckpoint], None],
    line: Line,
    count: int | None,
    settle_s: float | None,
    after: float,
) -> None:
    """Until the line is cut.

    Another daemon, or the same one again, tells what the last one did not.
    """
    told: set[tuple[str, int, int, float | None]] = set()

    def take(event: Json) -> None:
        if event.get("event") == "checkpoint":
            checkpoint = _checkpoint(mountpoint, event)
            mark = (
                checkpoint.path,
                len(checkpoint.files),
                checkpoint.size,
                checkpoint.persisted_at,
            )
            if mark not in told:
                told.add(mark)
                tell(checkpoint)

    complaint = ""
    while not line.is_cut:
        try:
            record, below = registry.locate(place)
            mountpoint = record.mountpoint
            client.request(
                record,
                "watch",
                {"paths": [below], "count": count, "settle_s": settle_s, "after": after},
                take,
                line,
            )
        except (AcpfsError, OSError) as error:  # no daemon for now, or no descriptor
            if (
                str(error) != complaint and not line.is_cut
            ):  # what was cancelled ends with an error, and that is none
                complaint = str(error)
                log.warning("nothing is told of %s for now: %s", place, complaint)
        line.wait_cut(WAIT_FOR_MOUNT_S)


def _checkpoint(mountpoint: str, event: Json) -> SafeCheckpoint:
    report = event["checkpoint"]
    files = tuple(
        SafeFile(os.path.join(mountpoint, f["path"]), f["size"], f["checksum"])
        for f in event["files"]
    )
    times = (report[key] for key in ("began_at", "closed_at", "persisted_at"))
    return SafeCheckpoint(
        os.path.join(mountpoint, report["path"]),
        report["step"],
        report["epoch"],
        report["bytes"],
        files,
        *times,
    )
