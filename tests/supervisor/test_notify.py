"""The notify protocol, against a socket of our own."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from acpfs.supervisor.notify import ServiceManager


@pytest.fixture
def manager_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
        yield receiver


def said(receiver: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in receiver.recv(65536).decode().splitlines())


def test_ready_status_and_stopping(manager_socket: socket.socket):
    manager = ServiceManager()
    manager.ready("/b on /m")
    assert said(manager_socket) == {"READY": "1", "STATUS": "/b on /m", "MAINPID": str(os.getpid())}
    manager.status("draining")
    assert said(manager_socket) == {"STATUS": "draining"}
    manager.stopping("draining", 600)
    assert said(manager_socket) == {"STOPPING": "1", "STATUS": "draining", "EXTEND_TIMEOUT_USEC": "610000000"}
    manager.close()


def test_the_watchdog_is_fed_at_half_its_interval_while_the_worker_lives(manager_socket: socket.socket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    manager, answers = ServiceManager(), iter([True, False, True])
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def main() -> None:
        with trio.move_on_after(25):
            await manager.feed_watchdog(lambda: next(answers))

    trio.run(main, clock=clock)
    manager.close()
    assert [said(manager_socket), said(manager_socket)] == [{"WATCHDOG": "1"}, {"WATCHDOG": "1"}]
    manager_socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager_socket.recv(10)


@pytest.mark.parametrize(("name", "value"), [("WATCHDOG_USEC", "0"), ("WATCHDOG_USEC", "soon"), ("WATCHDOG_PID", "1")])
def test_nobody_watches(manager_socket: socket.socket, monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    monkeypatch.setenv(name, value)
    manager = ServiceManager()
    assert manager.watchdog_interval_s() is None
    manager.close()


def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    manager = ServiceManager()
    manager.ready("x")
    trio.run(manager.feed_watchdog, lambda: True)
    manager.close()
