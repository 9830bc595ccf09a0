"""The waiting calls of `acpfs.client` for trio programs: the blocking ones in a thread, ended at
once when the caller is cancelled.

    async with asynchronous.persisted_checkpoints("/mnt/acp/run1") as safe:
        async for checkpoint in safe:
            ...

Not imported by `acpfs.client`, which needs nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import trio

from acpfs.client import persistence, watching
from acpfs.client.persistence import Durability, StrPath
from acpfs.client.watching import SafeCheckpoint
from acpfs.control.client import Line


async def wait_persisted(
    path: StrPath, timeout_s: float | None = None, *, count: int | None = None
) -> None:
    """As `acpfs.client.wait_persisted`."""
    await _in_thread(partial(persistence.wait_persisted, path, timeout_s, count=count))


async def wait_copied(path: StrPath, timeout_s: float | None = None) -> Durability:
    """As `acpfs.client.wait_copied`."""
    done: Durability = await _in_thread(partial(persistence.wait_copied, path, timeout_s))
    return done


async def wait_verified(path: StrPath, timeout_s: float | None = None) -> None:
    """As `acpfs.client.wait_verified`."""
    await _in_thread(partial(persistence.wait_verified, path, timeout_s))


async def flush(mountpoint: StrPath, timeout_s: float | None = None) -> None:
    """As `acpfs.client.flush`."""
    await _in_thread(partial(persistence.flush, mountpoint, timeout_s))


@asynccontextmanager
async def persisted_checkpoints(
    directory: StrPath, *, count: int | None = None, settle_s: float | None = None
) -> AsyncIterator[trio.MemoryReceiveChannel[SafeCheckpoint]]:
    """A channel of the checkpoints that become safe, as `acpfs.client.persisted_checkpoints`;
    inside it nothing is missed.
    """
    send, receive = trio.open_memory_channel[SafeCheckpoint](math.inf)
    token = trio.lowlevel.current_trio_token()

    def put(checkpoint: SafeCheckpoint) -> None:
        with suppress(
            trio.BrokenResourceError
        ):  # whoever closed the channel wants to hear no more; raised here it would end trio's loop
            send.send_nowait(checkpoint)

    def tell(checkpoint: SafeCheckpoint) -> None:
        token.run_sync_soon(put, checkpoint)

    watch = watching.on_persisted(directory, tell, count=count, settle_s=settle_s)
    try:
        yield receive
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(watch.cancel)


async def _in_thread(call: Callable[..., Any]) -> Any:
    line = Line()
    try:
        return await trio.to_thread.run_sync(partial(call, line=line), abandon_on_cancel=True)
    finally:
        line.cut()
