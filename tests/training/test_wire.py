"""Frames: pieces of any size, bounds, an end in the middle; threads on one link; a fork does not
keep a connection open.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from acpfs.training.messages import Goodbye, Header, Sent, Stacks, Stop
from acpfs.training.records import MalformedError
from acpfs.training.wire import (
    FRAME_BYTES_MAX,
    Frames,
    LinkClosedError,
    LinkTimeoutError,
    SocketLink,
    TrioLink,
    frame,
)

HEADER = Header("job", 1, 1, "rank 0")


def sent(number: int) -> Sent:
    return Sent(HEADER, Stop((number,)))


@pytest.fixture
def links() -> Iterator[tuple[SocketLink, SocketLink]]:
    one, other = (SocketLink(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@given(st.lists(st.integers(1, 40), max_size=30))
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_size_are_the_same_messages(sizes: list[int]) -> None:
    data = b"".join(frame(sent(number)) for number in range(4))
    frames = Frames()
    found = []
    for size in sizes:
        found += frames.take(data[:size])
        data = data[size:]
    found += frames.take(data)
    assert found == [sent(number) for number in range(4)]
    assert not frames.inside


def test_a_frame_that_claims_too_much_is_refused_at_its_length() -> None:
    with pytest.raises(MalformedError, match="message of"):
        Frames().take(struct.pack(">I", FRAME_BYTES_MAX + 1))
    with pytest.raises(MalformedError, match="message of"):
        frame(Sent(HEADER, Stacks("x" * FRAME_BYTES_MAX)))


def test_a_link_between_threads(links: tuple[SocketLink, SocketLink]) -> None:
    one, other = links

    def send(start: int) -> None:
        for number in range(50):
            one.send(sent(start + number))

    threads = [threading.Thread(target=send, args=(start,)) for start in (0, 100)]
    for thread in threads:
        thread.start()
    found = [other.receive(120) for _ in range(100)]
    for thread in threads:
        thread.join()
    assert sorted(found, key=repr) == sorted(
        (sent(start + n) for start in (0, 100) for n in range(50)), key=repr
    )


def test_nothing_in_time_leaves_the_link_as_it_was(links: tuple[SocketLink, SocketLink]) -> None:
    one, other = links
    with pytest.raises(LinkTimeoutError):
        other.receive(0)
    one.send(sent(1))
    assert other.receive(120) == sent(1)


def test_an_end_is_told(links: tuple[SocketLink, SocketLink]) -> None:
    one, other = links
    one.send(sent(1))
    one.close()
    assert other.receive(120) == sent(1)
    with pytest.raises(LinkClosedError):
        other.receive(120)
    with pytest.raises(LinkClosedError):
        one.send(sent(2))


@pytest.fixture
def tcp_links() -> Iterator[tuple[SocketLink, SocketLink]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = SocketLink(socket.create_connection(listener.getsockname()))
        other = SocketLink(listener.accept()[0])
    yield one, other
    one.close()
    other.close()


def test_a_farewell_arrives_also_where_something_is_unread(
    tcp_links: tuple[SocketLink, SocketLink],
) -> None:
    one, other = tcp_links
    other.send(sent(1))
    one.send(Sent(HEADER, Goodbye()))
    leaving = threading.Thread(target=one.farewell, args=(60,))
    leaving.start()
    other.send(sent(2))
    assert other.receive(120).message == Goodbye()
    with pytest.raises(LinkClosedError, match="closed"):
        other.receive(120)
    other.close()
    leaving.join()


def test_close_wakes_the_thread_that_receives(links: tuple[SocketLink, SocketLink]) -> None:
    _, other = links
    told = []

    def receive() -> None:
        try:
            other.receive()
        except LinkClosedError as error:
            told.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    other.close()
    thread.join(120)
    assert told


def test_a_forked_child_does_not_keep_the_connection_open(
    links: tuple[SocketLink, SocketLink],
) -> None:
    one, other = links
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    try:
        one.close()
        with pytest.raises(LinkClosedError):
            other.receive(120)
    finally:
        os.close(release)
        os.close(hold)
        os.waitpid(child, 0)


def test_trio_and_thread_speak_to_each_other() -> None:
    ends = socket.socketpair()

    async def main() -> list[Sent]:
        link = TrioLink(trio.SocketStream(trio.socket.from_stdlib_socket(ends[1])))
        found = [await link.receive() for _ in range(3)]
        await link.send(Sent(HEADER, Goodbye()))
        with pytest.raises(LinkClosedError):
            await link.receive()
        await link.close()
        return found

    def member() -> None:
        link = SocketLink(ends[0])
        for number in range(3):
            link.send(sent(number))
        assert link.receive(120).message == Goodbye()
        link.close()

    thread = threading.Thread(target=member)
    thread.start()
    assert trio.run(main) == [sent(number) for number in range(3)]
    thread.join()
