"""Connections between members and coordinators in virtual time: each is in order, takes its time,
may stand still, and may be cut.

What a cut finds on its way is lost. Across connections words come in any order. A TCP connection
doubles nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

import trio

from acpfs.training.messages import Sent
from acpfs.training.wire import Frames, LinkClosedError, LinkTimeoutError, frame

DELAY_S = 0.02
LATE_S = 1.5
LATE_SHARE = 0.02
"""Of words, which take up to `LATE_S`."""


class Way:
    """One direction of a connection."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._coming: deque[tuple[float, Sent]] = deque()
        self._last = 0.0
        self.held_until = 0.0
        self.closed = False
        self.news = trio.Event()
        self.on_news: Callable[[], object] = int

    def put(self, sent: Sent) -> None:
        if self.closed:
            raise LinkClosedError("cut")
        most = LATE_S if self._chance.random() < LATE_SHARE else DELAY_S
        self._last = max(self._last, trio.current_time() + self._chance.uniform(0.0, most))
        self._coming.append((self._last, sent))
        self._ring()

    def cut(self, *, loses: bool) -> None:
        """From either side. `loses`: what is on its way, too; otherwise it still comes."""
        self.closed = True
        if loses:
            self._coming.clear()
        self._ring()

    def _ring(self) -> None:
        self.news.set()
        self.news = trio.Event()
        self.on_news()

    @property
    def next_at(self) -> float:
        """When there is something to take."""
        if self._coming:
            return max(self._coming[0][0], self.held_until)
        return self.held_until if self.closed else float("inf")

    def take(self) -> Sent | None:
        """What has come; None: nothing yet.

        Raises:
            LinkClosedError: nothing will.
        """
        if self.next_at > trio.current_time():
            return None
        if self._coming:
            return self._coming.popleft()[1]
        raise LinkClosedError("closed")


class Ends:
    """A connection; its two ends have the same ways the other way round."""

    def __init__(self, chance: random.Random) -> None:
        self.there = Way(chance)
        self.back = Way(chance)

    @property
    def ways(self) -> Iterable[Way]:
        return (self.there, self.back)

    def cut(self, *, loses: bool = True) -> None:
        for way in self.ways:
            way.cut(loses=loses)

    def hold(self, until: float) -> None:
        """Nothing comes through until then, and nobody is told."""
        for way in self.ways:
            way.held_until = max(way.held_until, until)

    @property
    def is_cut(self) -> bool:
        return self.there.closed


class TrioEnd:
    """As `TrioLink`."""

    def __init__(self, ends: Ends, reads: Way, writes: Way) -> None:
        self._ends = ends
        self._reads = reads
        self._writes = writes
        self._frames = Frames()

    async def send(self, sent: Sent) -> None:
        await self.send_frame(frame(sent))

    async def send_frame(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        for sent in self._frames.take(data):
            self._writes.put(sent)

    async def receive(self) -> Sent:
        while (sent := self._reads.take()) is None:
            news = self._reads.news
            with trio.move_on_at(self._reads.next_at):
                await news.wait()
        await trio.lowlevel.checkpoint()
        return sent

    async def close(self) -> None:
        self._ends.cut(loses=False)


class MemberEnd:
    """As `SocketLink`, for the member, which never waits in it."""

    buffered = False

    def __init__(self, ends: Ends) -> None:
        self.ends = ends

    def send(self, sent: Sent) -> None:
        self.ends.there.put(sent)

    def receive(self, _timeout_s: float) -> Sent:
        sent = self.ends.back.take()
        if sent is None:
            raise LinkTimeoutError("nothing yet")
        return sent

    def close(self) -> None:
        self.ends.cut(loses=False)

    def farewell(self, _timeout_s: float) -> None:
        self.close()
