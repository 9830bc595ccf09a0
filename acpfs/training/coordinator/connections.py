"""Connections of the coordinator: what waits to be sent, the bound on it, and who is connected.

One task receives, one sends.

Knows nothing of what messages mean. Everything runs in trio's thread, and nothing here waits but
`receive` and `send_all`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import trio

from acpfs.training.messages import Header, Message, Sent
from acpfs.training.wire import LinkClosedError, TrioLink, frame

WAITING_MAX = 2000
"""Messages.

A member that takes none (it is stopped, its network hangs) is cut off behind them; it is lost by
its silence long before.
"""
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


class Dated(Protocol):
    """What says under which generation and term messages go out."""

    generation: int
    term: int


class Connected:
    """Who is connected to one coordinator, and how messages go to them: to whoever is there, and
    never waiting.
    """

    def __init__(self, job: str, number: int, dated: Dated) -> None:
        self._job = job
        self._name = f"coordinator {number}"
        self._dated = dated
        self.members: dict[int, Connection] = {}
        self.others: dict[int, Connection] = {}
        """Coordinators and watchers; a watcher has a negative number of its own."""

    def framed(self, message: Message, term: int | None = None) -> bytes:
        """A frame, to be posted to as many as there are.

        `term`: where it is not the state machine's yet.
        """
        own = self._dated.term if term is None else term
        return frame(Sent(Header(self._job, self._dated.generation, own, self._name), message))

    def to_members(
        self, message: Message, ranks: Iterable[int] | None = None, term: int | None = None
    ) -> None:
        """To these ranks, or to all."""
        sent = self.framed(message, term)
        for rank in tuple(self.members) if ranks is None else ranks:
            if rank in self.members:
                self.members[rank].post(sent)

    def to_others(self, message: Message) -> None:
        """To coordinators and watchers."""
        sent = self.framed(message)
        for connection in self.others.values():
            connection.post(sent)

    def to_all(self, message: Message, term: int | None = None) -> None:
        """To members first."""
        sent = self.framed(message, term)
        for connection in (*self.members.values(), *self.others.values()):
            connection.post(sent)

    def cut(self) -> None:
        """End all connections when what was posted is sent."""
        for connection in (*self.members.values(), *self.others.values()):
            connection.cut()
