"""A standby that nobody needs ends, though connections to it stand: a network that is cut says
nothing of their ends.

The coordinator is in this process, over real connections, and its time is the test's: minutes pass
when the test says so.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from acpfs.training.coordinator.exiting import started_at
from acpfs.training.coordinator.lingering import ORPHANED_S
from acpfs.training.coordinator.server import Coordinator, Settings
from acpfs.training.messages import Beat, Gate, Header, Hello, Message, Phase, Sent
from acpfs.training.wire import LinkClosedError, TrioLink

pytestmark = pytest.mark.clause("T158")
JOB = "job"
HERE = "node0"
ELSEWHERE = "node1"
LONG_S = 3 * int(ORPHANED_S)


class Standby:
    """One, with a rank that is connected to it."""

    def __init__(
        self, clock: trio.testing.MockClock, link: TrioLink, coordinator: Coordinator
    ) -> None:
        self._clock = clock
        self._link = link
        self._coordinator = coordinator
        self.ended = trio.Event()

    async def say(self, message: Message) -> None:
        await self._link.send(Sent(Header(JOB, 0, 0, "rank 0"), message))

    async def lives_for(self, seconds: int, *, beats: bool = False) -> int:
        """How many of these it lived."""
        for second in range(seconds):
            if self.ended.is_set():
                return second
            if beats:
                await self.say(Beat(second, second, Phase.COMPUTING))
                while (
                    self._coordinator.status()["ranks"][0].get("done") != second
                ):  # the kernel may be slower than the clock
                    await trio.testing.wait_all_tasks_blocked(0.002)
            self._clock.jump(1)
            await trio.testing.wait_all_tasks_blocked(0.002)
        return seconds

    async def take(self) -> None:
        """Whatever it says, until it ends: that somebody should vote."""
        try:
            while True:
                await self._link.receive()
        except LinkClosedError:
            return


@asynccontextmanager
async def standby(
    clock: trio.testing.MockClock, directory: Path, node: str
) -> AsyncIterator[Standby]:
    """`node`: of the rank, which is this process."""
    coordinator = Coordinator(Settings(JOB, 1, directory, HERE, tls=False))
    announce, announced = trio.open_memory_channel[str](1)
    async with trio.open_nursery() as nursery, announce, announced:

        async def run() -> None:
            await coordinator.run(announce)
            found.ended.set()

        nursery.start_soon(run)
        host, _, port = (await announced.receive()).rpartition(":")
        link = TrioLink(await trio.open_tcp_stream(host, int(port)))
        found = Standby(clock, link, coordinator)
        await found.say(
            Hello(
                0, 3, node, os.getpid(), started_at(os.getpid()), Gate.EXPLICIT, {"all": (0, 1, 2)}
            )
        )
        nursery.start_soon(found.take)
        await trio.testing.wait_all_tasks_blocked(0.01)
        while coordinator.status()["connected"] != 1:
            await trio.testing.wait_all_tasks_blocked(0.01)
        yield found
        nursery.cancel_scope.cancel()
        await link.close()


def test_it_ends_when_it_hears_nobody_and_nobody_of_its_node_needs_it(tmp_path: Path) -> None:
    clock = trio.testing.MockClock()

    async def lived() -> int:
        async with standby(clock, tmp_path, ELSEWHERE) as one:
            return await one.lives_for(LONG_S)

    assert ORPHANED_S < trio.run(lived, clock=clock) < LONG_S


def test_it_stays_while_it_hears_somebody(tmp_path: Path) -> None:
    clock = trio.testing.MockClock()

    async def lived() -> tuple[int, int]:
        async with standby(clock, tmp_path, ELSEWHERE) as one:
            return await one.lives_for(LONG_S, beats=True), await one.lives_for(LONG_S)

    heard, unheard = trio.run(lived, clock=clock)
    assert heard == LONG_S
    assert ORPHANED_S < unheard < LONG_S


def test_it_stays_while_a_process_of_its_node_may_need_it(tmp_path: Path) -> None:
    clock = trio.testing.MockClock()

    async def lived() -> int:
        async with standby(clock, tmp_path, HERE) as one:
            return await one.lives_for(LONG_S)

    assert trio.run(lived, clock=clock) == LONG_S
