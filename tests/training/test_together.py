"""A launcher's connection to the meeting of launchers. What is at its other end is a double."""

from __future__ import annotations

import pytest
import trio

from acpfs.training.launcher.options import Options
from acpfs.training.launcher.together import Together
from acpfs.training.messages import Launcher, Sent
from acpfs.training.wire import TrioLink


class Silent(TrioLink):
    """Takes everything, says nothing."""

    def __init__(self) -> None:
        self.introduced = trio.Event()
        self.closed = False

    async def send(self, sent: Sent) -> None:
        self.introduced.set()

    async def receive(self) -> Sent:
        await trio.sleep_forever()
        raise AssertionError

    async def close(self) -> None:
        self.closed = True


@pytest.mark.clause("T72")
def test_a_launcher_that_ends_leaves_the_meeting_at_once() -> None:
    """While one is connected the meeting goes on, and the launcher that has it run waits for its
    end.
    """

    async def call(link: Silent) -> None:
        together = Together(Options(("rank.py",), endpoint="127.0.0.1:1"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(together._talk, link, Launcher("0", "node", "127.0.0.1", 1, 1))
            await link.introduced.wait()
            nursery.cancel_scope.cancel()

    link = Silent()
    trio.run(call, link)
    assert link.closed
