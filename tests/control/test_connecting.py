"""Connecting where as many as may have come and not been let in yet."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.control.connecting import connect_within
from tests.rig.storage.servers import until

WAIT_S = 60


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket that has been taken up to its backlog, and its address."""
    address = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address)
        listener.listen(0)
        while True:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            try:
                one.connect(address)
            except BlockingIOError:
                break
        yield listener, address


def test_whoever_may_wait_is_let_in_when_there_is_room(full: tuple[socket.socket, str]) -> None:
    listener, address = full
    tid: list[int] = []
    with socket.socket(socket.AF_UNIX) as end:

        def connect() -> None:
            tid.append(threading.get_native_id())
            connect_within(end, address, WAIT_S)

        thread = threading.Thread(target=connect)
        thread.start()
        until(lambda: bool(tid) and _sleeps(tid[0]), "it waits")
        listener.accept()[0].close()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert end.getpeername() == address
        assert end.getblocking()
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) == bytes(16)


def _sleeps(tid: int) -> bool:
    """It has nothing else to wait for than connect(2)."""
    stat = Path(f"/proc/self/task/{tid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("wait_s", [0, 1])
def test_nobody_waits_for_longer(full: tuple[socket.socket, str], wait_s: int) -> None:
    with socket.socket(socket.AF_UNIX) as end, pytest.raises(BlockingIOError):
        connect_within(end, full[1], wait_s)


@pytest.mark.parametrize("wait_s", [0, 1])
def test_a_socket_that_nobody_listens_at_is_said_to_be_one(tmp_path: Path, wait_s: int) -> None:
    address = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as bound, socket.socket(socket.AF_UNIX) as end:
        bound.bind(address)
        with pytest.raises(ConnectionRefusedError):
            connect_within(end, address, wait_s)
