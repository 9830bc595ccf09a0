"""A launcher's connection to the meeting of launchers. What is at its other end is a double."""

from __future__ import annotations

import pytest
import trio

from acpfs.training.coordinator.launchers import NODE_LOST
from acpfs.training.coordinator.meeting import Meeting
from acpfs.training.launcher.options import Options
from acpfs.training.launcher.together import Together
from acpfs.training.messages import WIRE_VERSION, Header, Launcher, Over, Sent
from acpfs.training.records import NewerError
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


NEWER = f"sends has version {WIRE_VERSION + 1}, this acpfs knows {WIRE_VERSION}: all ranks and"


@pytest.mark.clause("S526", "S575")
def test_a_newer_launcher_is_told_why_it_may_not_meet() -> None:
    """Its connection was closed, and it called again for minutes."""

    async def call() -> Sent:
        meeting = Meeting("job", None)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, meeting.serve, listeners)
            link = TrioLink(await trio.open_tcp_stream("127.0.0.1", port))
            header = Header("job", 0, 0, "launcher 1", WIRE_VERSION + 1)
            sent = Sent(header, Launcher("1", "node", "127.0.0.1", 1, 1))
            await link.send(sent)
            answer = await link.receive()
            await link.close()
            nursery.cancel_scope.cancel()
        return answer

    answer = trio.run(call).message
    assert isinstance(answer, Over)
    assert answer.status == NODE_LOST
    assert f"what launcher 1 {NEWER}" in answer.text


class Newer(Silent):
    """A meeting of a newer acpfs."""

    async def receive(self) -> Sent:
        raise NewerError(f"what meeting {NEWER}")


@pytest.mark.clause("S526", "S575")
def test_a_launcher_ends_where_the_meeting_is_newer() -> None:
    async def call() -> list[object]:
        together = Together(Options(("rank.py",), endpoint="127.0.0.1:1"))
        heard = together._heard
        async with trio.open_nursery() as nursery:
            nursery.start_soon(together._talk, Newer(), Launcher("0", "node", "127.0.0.1", 1, 1))
            found: list[object] = [await heard.receive()]
            nursery.cancel_scope.cancel()
        return found

    (over,) = trio.run(call)
    assert isinstance(over, Over)
    assert NEWER in over.text
