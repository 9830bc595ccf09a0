"""Serving with the chosen transport.

Where native was only `auto`'s choice (`mounting.transports`) and its session cannot be made,
libfuse gets its chance, and the reason says what went wrong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from acpfs.config import Settings, Transport
from acpfs.errors import MachineError
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import Lane
from acpfs.logger import get_logger
from acpfs.mounting.transports import TransportChoice, has_libfuse

log = get_logger(__name__)


class Serve(Protocol):
    """What every transport offers: mount, say ready, serve until unmounted or cancelled."""

    def __call__(
        self, fs: FileSystem, settings: Settings, ready: Callable[[], None]
    ) -> Awaitable[None]: ...


async def serve(
    choice: TransportChoice,
    fs: FileSystem,
    settings: Settings,
    ready: Callable[[TransportChoice], None],
    load: Callable[[Transport], Serve],
) -> None:
    """Serve with the chosen transport; with libfuse where native was only `auto`'s choice and its
    session cannot be made.

    `ready` is told what serves. `load`: the serve function of a transport, which is imported only
    then.

    Raises:
        MachineError: it cannot be mounted.
    """
    mounted = False

    def tell() -> None:
        nonlocal mounted
        mounted = True
        ready(choice)

    try:
        await load(choice.transport)(fs, settings, tell)
        return
    except (MachineError, OSError) as error:
        if (
            mounted
            or choice.forced
            or choice.transport is not Transport.NATIVE
            or not has_libfuse()
        ):
            raise
        log.warning("the native transport could not be used; libfuse is tried", error=str(error))
        choice = TransportChoice(Transport.LIBFUSE, f"the native transport failed: {error}")
    fs.offer_lanes(Lane.LIBFUSE, passthrough=False)
    await load(choice.transport)(fs, settings, tell)
