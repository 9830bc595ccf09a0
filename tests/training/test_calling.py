"""Connections to coordinators that nobody needs end: seen from the other side, while whoever made
them still holds the error.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.errors import AcpfsError, RefusedError
from acpfs.training import boot
from acpfs.training.calling import Calling
from acpfs.training.credentials import Credentials, connect
from acpfs.training.policy import Policy
from acpfs.training.wire import SocketLink
from tests.training.gasp_job import until

ENDS_S = 120.0
clause = pytest.mark.clause


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(ENDS_S)
        yield made


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()
    return f"{host}:{port}"


def assert_ends(listening: socket.socket) -> None:
    """The next connection is closed by who made it."""
    accepted, _ = listening.accept()
    with accepted:
        accepted.settimeout(ENDS_S)
        assert accepted.recv(100) == b""


@clause("T157")
def test_where_a_second_coordinator_does_not_answer_the_connection_to_the_first_one_ends(
    listening: socket.socket, tmp_path: Path
) -> None:
    with socket.socket() as gone:
        gone.bind(
            ("127.0.0.1", 0)
        )  # nobody listens there, and the number is nobody else's meanwhile
        with pytest.raises(RefusedError) as held:
            boot._connect(
                tmp_path, {0: address_of(listening), 1: address_of(gone)}, Policy(tls=False)
            )
    assert_ends(listening)
    assert held.value.__cause__ is not None


@clause("T157")
def test_a_coordinator_that_answered_and_was_not_taken_any_more(listening: socket.socket) -> None:
    calling = Calling(lambda address: connect(address, None))
    woken = threading.Event()
    calling.call(1, address_of(listening), woken.set)
    assert woken.wait(ENDS_S)
    calling.close()
    assert_ends(listening)


@clause("T157")
def test_a_coordinator_that_answers_behind_the_end(listening: socket.socket) -> None:
    called = threading.Event()
    ended = threading.Event()
    made: list[SocketLink] = []

    def call(address: str) -> SocketLink:
        called.set()
        assert ended.wait(ENDS_S)
        made.append(connect(address, None))
        return made[0]

    calling = Calling(call)
    calling.call(1, address_of(listening), lambda: None)
    assert called.wait(ENDS_S)
    calling.close()
    ended.set()
    until(lambda: made)
    assert_ends(listening)


@clause("T157")
def test_where_the_jobs_certificate_cannot_be_read_the_connection_ends(
    listening: socket.socket, tmp_path: Path
) -> None:
    """It is made first, and then spoken TLS over."""
    with pytest.raises((AcpfsError, OSError)) as held:
        connect(address_of(listening), Credentials(tmp_path / "nothing"))
    assert_ends(listening)
    assert held.value.__traceback__ is not None
