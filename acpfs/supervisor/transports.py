"""Which transport serves a mount. Imports only the one that is used: the libfuse one needs a library that the native one does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from acpfs.config import Settings, Transport
from acpfs.filesystem.filesystem import FileSystem


class Serve(Protocol):
    """What every transport offers: mount, say ready, serve until unmounted or cancelled."""

    def __call__(self, fs: FileSystem, settings: Settings, ready: Callable[[], None]) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and why it is the one."""

    transport: Transport
    reason: str


def choose(wanted: Transport) -> Choice:
    """The transport to use. `auto` is libfuse as long as the native one has not passed every suite."""
    if wanted is not Transport.AUTO:
        return Choice(wanted, "asked for")
    return Choice(Transport.LIBFUSE, "the default")


def load(transport: Transport) -> Serve:
    """Its serve function."""
    if transport is Transport.NATIVE:
        from acpfs.transport.native.serve import serve as native

        return native
    from acpfs.transport.libfuse import serve as libfuse

    return libfuse
