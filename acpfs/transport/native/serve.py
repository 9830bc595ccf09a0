"""The native transport as the worker sees it: mount, serve until unmounted or cancelled, unmount.

Trio only supervises here: requests are served by threads of their own (`reader`), so a busy event loop never delays a call. `serve` owns
the mount; `serve_kept` serves a session whose descriptor somebody else keeps (a supervisor), and leaves it when cancelled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import trio

from acpfs.config import Settings
from acpfs.errors import MachineError
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.steps import settled
from acpfs.logger import get_logger
from acpfs.ram.mounts import mounted_at
from acpfs.transport.native.device import clones
from acpfs.transport.native.holding import Holding
from acpfs.transport.native.mount import FSTYPE, MountOptions, mount, unmount
from acpfs.transport.native.negotiate import ALL_FEATURES, Negotiated, ProtocolError
from acpfs.transport.native.reader import reader_count
from acpfs.transport.native.session import Session

CLOSE_TIMEOUT_S = 5.0
MASK_VARIABLE = "ACPFS_FUSE_FEATURE_MASK"
"""For tests and for diagnosis: what an older kernel, or one without passthrough, would be like."""

log = get_logger(__name__)


async def serve(
    fs: FileSystem, settings: Settings, ready: Callable[[], None], *, feature_mask: int | None = None, readers: int = 0
) -> None:
    """Mount, say `ready`, and serve until the mount point is unmounted or the task cancelled.

    `feature_mask`: INIT features whose bit is 0 are treated as not offered by the kernel (None: $ACPFS_FUSE_FEATURE_MASK).
    `readers`: threads, 0 for as many as the machine is worth.

    Raises:
        MachineError: FUSE is not permitted here, or the kernel is too old.
    """
    mask = _mask() if feature_mask is None else feature_mask
    session = await trio.to_thread.run_sync(_begin, fs, settings, mask, readers)
    session.start()
    try:
        ready()
        await settled(session.ended)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_finish, session, settings.mountpoint)


def _mask() -> int:
    return int(os.environ.get(MASK_VARIABLE, str(ALL_FEATURES)), 0)


def make_session(settings: Settings) -> list[int]:
    """Mount; the session's descriptor and clones of it, for `serve_kept`. Nobody has answered INIT yet.

    Raises:
        MachineError: FUSE is not permitted here.
    """
    return clones(mount(settings.mountpoint, MountOptions(os.fspath(settings.backing), allow_other=settings.allow_other)), reader_count())


async def serve_kept(
    fs: FileSystem,
    fds: Sequence[int],
    negotiated: Negotiated | None,
    ready: Callable[[Session], None],
    *,
    feature_mask: int | None = None,
    holding: Holding | None = None,
) -> None:
    """Serve a session over descriptors that another process keeps too, until the mount ends or the task is cancelled.

    `fds`: the session's descriptor, and clones of it if any are kept: what was read through a clone fails when its last copy is closed.
    `negotiated` is what the session of an earlier worker had; None: nobody has answered INIT yet. Cancelling leaves the threads
    to the end of the process: requests under way are resent to the next worker.

    Raises:
        ProtocolError: the kernel is too old.
    """
    if negotiated is None:
        mask = _mask() if feature_mask is None else feature_mask
        session = await trio.to_thread.run_sync(partial(Session.begin, fs, fds, feature_mask=mask, holding=holding))
    else:
        session = await trio.to_thread.run_sync(partial(Session.take_over, fs, fds, negotiated, holding=holding))
    session.start()
    ready(session)
    await settled(session.ended)
    await trio.to_thread.run_sync(session.close, CLOSE_TIMEOUT_S)


def _begin(fs: FileSystem, settings: Settings, feature_mask: int, readers: int) -> Session:
    fd = mount(settings.mountpoint, MountOptions(os.fspath(settings.backing), allow_other=settings.allow_other))
    try:
        readers = readers or reader_count()
        return Session.begin(fs, clones(fd, readers), feature_mask=feature_mask, readers=readers)
    except (ProtocolError, OSError) as error:
        unmount(settings.mountpoint, lazy=True)
        message = f"cannot mount on {settings.mountpoint}: {error}"
        raise MachineError(message) from error


def _finish(session: Session, mountpoint: Path) -> None:
    """Unmount; in a thread, because the kernel asks the file system while it unmounts."""
    entry = mounted_at(os.fspath(mountpoint))
    if not session.ended.done() and entry is not None and entry.kind == FSTYPE:  # not what lies beneath a mount that was detached
        try:
            unmount(mountpoint)
        except OSError:
            unmount(mountpoint, lazy=True)
    if not session.close(CLOSE_TIMEOUT_S):
        log.warning("files are still open in the detached mount; they end with this process", mountpoint=str(mountpoint))
