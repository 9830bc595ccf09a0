"""A connection of the coordinator: what waits to be sent, and the bound on it. One receives, one task sends."""

from __future__ import annotations

import trio

from acpfs.training.messages import Sent
from acpfs.training.wire import LinkClosedError, TrioLink

WAITING_MAX = 2000
"""Messages. A member that takes none (it is stopped, its network hangs) is cut off behind them; it is lost by its silence long before."""
FIRST_WORD_S = 10.0
LAST_WORD_S = 5.0


class Connection:
    """Somebody who said who they are, or is about to."""

    def __init__(self, link: TrioLink) -> None:
        self._link = link
        self._in: trio.MemorySendChannel[bytes]
        self._out: trio.MemoryReceiveChannel[bytes]
        self._in, self._out = trio.open_memory_channel(WAITING_MAX)
        self._scope = trio.CancelScope()

    def post(self, framed: bytes) -> None:
        """Have it sent; never waits."""
        try:
            self._in.send_nowait(framed)
        except trio.WouldBlock:
            self._scope.cancel()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it ended; whoever receives on it tells so

    def cut(self) -> None:
        """End it when what was posted is sent, or cannot be."""
        self._in.close()
        self._scope.deadline = trio.current_time() + LAST_WORD_S

    async def receive(self) -> Sent:
        """The next message; see `TrioLink.receive`."""
        return await self._link.receive()

    async def send_all(self) -> None:
        """The sending task. Ends with the connection, which it closes."""
        with self._scope, self._out:
            try:
                async for framed in self._out:
                    await self._link.send_frame(framed)
            except LinkClosedError:
                pass  # the receiving task tells so
        await self._link.close()
