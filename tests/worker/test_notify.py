"""The notify protocol, against a socket of our own; descriptors in the store; signs of life."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from acpfs.supervisor import channel
from acpfs.supervisor.service import ALIVE, Service, inherited
from acpfs.worker import notify
from acpfs.worker.link import BEAT_INTERVAL_S, Link
from acpfs.worker.notify import Busy, ServiceManager
from tests.rig.runtime import REAL


@pytest.fixture
def manager_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(120)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
        yield receiver


@pytest.fixture
def link() -> Iterator[tuple[Link, socket.socket]]:
    """A worker's link, and the supervisor's end of it."""
    ours, theirs = channel.pair()
    with ours, theirs:
        yield Link(theirs, {"supervisor": os.getpid()}, {}, REAL), ours


def said(receiver: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in receiver.recv(65536).decode().splitlines())


def test_what_the_worker_has_to_say(link: tuple[Link, socket.socket]) -> None:
    manager = ServiceManager(link[0])
    manager.ready("/b on /m")
    assert channel.receive(link[1])[0] == {"notify": "READY=1\nSTATUS=/b on /m"}
    manager.status("draining")
    assert channel.receive(link[1])[0] == {"notify": "STATUS=draining"}
    manager.stopping("draining", 600)
    assert channel.receive(link[1])[0] == {
        "notify": "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=610000000"
    }


def test_the_service_manager_is_told(manager_socket: socket.socket) -> None:
    Service().notify("READY=1\nSTATUS=x")
    assert said(manager_socket) == {"READY": "1", "STATUS": "x"}


@pytest.mark.clause("S338")
def test_a_service_manager_that_reads_nothing_holds_nobody_up(
    manager_socket: socket.socket,
) -> None:
    service = Service()
    for _ in range(2000):  # more than any queue of datagrams has room for
        service.notify(ALIVE)
    service.notify("STOPPING=1")
    assert said(manager_socket) == {"WATCHDOG": "1"}


def test_signs_of_life_only_while_there_is_life(link: tuple[Link, socket.socket]) -> None:
    answers = iter([True, False, True, True])
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def main() -> None:
        with trio.move_on_after(3 * BEAT_INTERVAL_S + 0.5):
            await notify.beat(link[0], lambda: next(answers), lambda _now: 7.0)

    trio.run(main, clock=clock)
    assert [channel.receive(link[1])[0] for _ in range(3)] == [{"beat": 7.0}] * 3
    link[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        channel.receive(link[1])


def test_how_long_a_thread_has_been_with_one_request() -> None:
    current = [0, 0]
    busy = Busy(lambda: current)
    assert busy.longest_s(10.0) == 0.0
    current[:] = [5, 6]
    assert [busy.longest_s(11.0), busy.longest_s(13.0)] == [0.0, 2.0]
    current[:] = [7, 6]
    assert busy.longest_s(14.0) == 3.0
    current[:] = [8, 0]
    assert busy.longest_s(15.0) == 0.0


@pytest.mark.parametrize(
    ("name", "value"), [("WATCHDOG_USEC", "0"), ("WATCHDOG_USEC", "soon"), ("WATCHDOG_PID", "1")]
)
def test_nobody_watches(
    manager_socket: socket.socket, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    monkeypatch.setenv(name, value)
    assert Service().watchdog_s == 0


def test_the_watchdog_wants_to_be_fed_twice_per_interval(
    manager_socket: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    assert Service().watchdog_s == 10.0


def test_descriptors_go_into_the_store_and_out(manager_socket: socket.socket) -> None:
    service = Service()
    with open(os.devnull, "rb") as file:
        service.store("session", [file.fileno(), file.fileno()])
    assert said(manager_socket) == {"FDSTOREREMOVE": "1", "FDNAME": "acpfs-session"}
    for _ in range(2):
        text, fds, _flags, _address = socket.recv_fds(manager_socket, 1000, 4)
        assert text == b"FDSTORE=1\nFDNAME=acpfs-session\nFDPOLL=0"
        (fd,) = fds
        os.close(fd)
    service.forget()
    assert said(manager_socket) == {"FDSTOREREMOVE": "1", "FDNAME": "acpfs-session"}


def test_descriptors_for_another_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDNAMES", "acpfs-session")
    assert inherited() == ({}, {})


def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    service = Service()
    service.notify("READY=1")
    service.store("session", [0])
    service.forget()
