"""The native transport as the worker sees it: mount, serve until unmounted or cancelled, unmount.

Trio only supervises here: requests are served by threads of their own (`reader`), so a busy event loop never delays a call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog
import trio

from acpfs.config import Settings
from acpfs.errors import MachineError
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.steps import settled
from acpfs.transport.native.mount import MountOptions, mount, unmount
from acpfs.transport.native.negotiate import ALL_FEATURES, ProtocolError
from acpfs.transport.native.session import Session

CLOSE_TIMEOUT_S = 5.0

log = structlog.get_logger(__name__)


async def serve(fs: FileSystem, settings: Settings, ready: Callable[[], None], *, feature_mask: int = ALL_FEATURES) -> None:
    """Mount, say `ready`, and serve until the mount point is unmounted or the task cancelled.

    `feature_mask`: INIT features whose bit is 0 are treated as not offered by the kernel.

    Raises:
        MachineError: FUSE is not permitted here, or the kernel is too old.
    """
    session = await trio.to_thread.run_sync(_begin, fs, settings, feature_mask)
    session.start()
    try:
        ready()
        await settled(session.ended)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_finish, session, settings.mountpoint)


def _begin(fs: FileSystem, settings: Settings, feature_mask: int) -> Session:
    fd = mount(settings.mountpoint, MountOptions("acpfs", settings.allow_other))
    try:
        return Session.begin(fs, fd, feature_mask=feature_mask)
    except (ProtocolError, OSError) as error:
        unmount(settings.mountpoint, lazy=True)
        raise MachineError(f"cannot mount on {settings.mountpoint}: {error}") from error


def _finish(session: Session, mountpoint: Path) -> None:
    """Unmount; in a thread, because the kernel asks the file system while it unmounts."""
    if not session.ended.done():
        try:
            unmount(mountpoint)
        except OSError:
            unmount(mountpoint, lazy=True)
    if not session.close(CLOSE_TIMEOUT_S):
        log.warning("files are still open in the detached mount; they end with this process", mountpoint=str(mountpoint))
