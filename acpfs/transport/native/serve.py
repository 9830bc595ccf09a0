"""The native transport as the worker sees it: mount, and serve a session whose descriptor the
supervisor keeps until it ends.

Trio only supervises here: requests are served by threads of their own (`reader`), so a busy event
loop never delays a call. The mount is the supervisor's: it is left when the worker is cancelled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from acpfs.config import Settings
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.steps import settled
from acpfs.logger import get_logger
from acpfs.ram.kept import Kept
from acpfs.runtime.threads import THREADS
from acpfs.transport.native.device import clones
from acpfs.transport.native.holding import Holding
from acpfs.transport.native.mount import MountOptions, mount
from acpfs.transport.native.negotiate import ALL_FEATURES, Negotiated
from acpfs.transport.native.reader import reader_count
from acpfs.transport.native.session import Session

CLOSE_TIMEOUT_S = 5.0
MASK_VARIABLE = "ACPFS_FUSE_FEATURE_MASK"
"""For tests and for diagnosis: what an older kernel, or one without passthrough, would be like."""

log = get_logger(__name__)


def _mask() -> int:
    return int(os.environ.get(MASK_VARIABLE, str(ALL_FEATURES)), 0)


def make_session(settings: Settings) -> list[int]:
    """Mount; the session's descriptor and clones of it, for `serve_kept`.

    Nobody has answered INIT yet.

    Raises:
        MachineError: FUSE is not permitted here.
    """
    return clones(
        mount(
            settings.mountpoint,
            MountOptions(os.fspath(settings.backing), allow_other=settings.allow_other),
        ),
        reader_count(),
    )


async def serve_kept(
    fs: FileSystem,
    kept: Kept,
    fds: Sequence[int],
    negotiated: Negotiated | None,
    ready: Callable[[Session], None],
    *,
    holding: Holding | None = None,
) -> None:
    """Serve a session over descriptors that another process keeps too, until the mount ends or the
    task is cancelled.

    `fds`: the session's descriptor, and clones of it if any are kept: what was read through a clone
    fails when its last copy is closed. `negotiated` is what the session of an earlier worker had;
    None: nobody has answered INIT yet. Cancelling leaves the threads to the end of the process:
    requests under way are resent to the next worker.

    Raises:
        ProtocolError: the kernel is too old.
        OSError, MemoryError: the machine has no memory or descriptor left for a reader.
    """
    if negotiated is None:
        session = await THREADS.run_sync(
            partial(Session.begin, fs, kept, fds, feature_mask=_mask(), holding=holding)
        )
    else:
        session = await THREADS.run_sync(
            partial(Session.take_over, fs, kept, fds, negotiated, holding=holding)
        )
    session.start()
    ready(session)
    await settled(session.ended)
    if (error := session.ended.exception()) is not None:
        raise error  # its mount goes on: the next worker answers what this one had read
    await THREADS.run_sync(session.close, CLOSE_TIMEOUT_S)
