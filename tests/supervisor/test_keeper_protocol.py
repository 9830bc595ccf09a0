"""The keeper's dialogue, without a mount: supervisors are connections that this test holds, a session is an eventfd."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acpfs.errors import ExitCode
from acpfs.supervisor import channel, keeper_client
from acpfs.supervisor.instances import OUTLIVED, next_generation, outlived
from acpfs.supervisor.local_sockets import connected
from tests.rig.keeper import KeeperProcess, until

MOUNTPOINT, BACKING = "/mnt/none", "/shared/none"


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    made = KeeperProcess(tmp_path / "run")
    yield made
    made.end()


def settings_of(keeper: KeeperProcess, **more: object) -> dict[str, Any]:
    return {"mountpoint": MOUNTPOINT, "backing": BACKING, "runtime_dir": str(keeper.runtime), "on_failure": "stop", **more}


class SupervisorDouble:
    """Tells a keeper of a mount, as `KeeperClient` does; a process of its own holds the connection, and may have a child that does too."""

    def __init__(self, keeper: KeeperProcess, *, lineage: dict[str, Any] | None = None, **settings: object) -> None:
        end = connected(keeper.runtime / keeper_client.SOCKET, 10.0)
        assert end is not None
        self.session = os.eventfd(7)
        self.end = end
        state = {"facts": {"session": "token"}, "workers": 1, "settings": settings_of(keeper, **settings), **(lineage or {})}
        pidfd = os.pidfd_open(os.getpid())
        channel.send(end, {"hold": MOUNTPOINT, "session": "token"}, [pidfd])
        os.close(pidfd)
        channel.send(end, {"keep": [["session", 1]]}, [self.session])
        channel.send(end, {"state": state})
        channel.send(end, {"whole": ["session"]})
        until(lambda: bool(keeper.held() and keeper.held()[0]["descriptors"] == 1))

    def close(self) -> None:
        self.end.close()
        os.close(self.session)


def taken(keeper: KeeperProcess, instance: str = "", backing: str = BACKING) -> keeper_client.Taken:
    return keeper_client.take(settings_of(keeper, backing=backing), instance)


def give_back(got: keeper_client.Taken) -> None:
    assert got.end is not None
    got.end.close()
    for fd in (fd for fds in got.kept.values() for fd in fds):
        os.close(fd)


@pytest.mark.clause("S372")
def test_it_gives_the_mount_to_one_and_only_when_nobody_is_left(keeper: KeeperProcess) -> None:
    double = SupervisorDouble(keeper)
    assert "lives" in taken(keeper).refused
    copy = double.end.dup()  # as a worker has it
    double.close()
    assert "lives" in taken(keeper).refused
    copy.close()
    until(lambda: keeper.phase() == "alone")
    assert BACKING in taken(keeper, backing="/other").refused
    first = taken(keeper)
    assert os.eventfd_read(first.kept["session"][0]) == 7
    assert (first.state["workers"], first.state["facts"]) == (1, {"session": "token"})
    assert "another supervisor" in taken(keeper).refused
    since = keeper.held()[0]["alone_s"]
    give_back(first)  # it ended before it served
    until(lambda: keeper.phase() == "alone")
    assert keeper.held()[0]["alone_s"] > since  # nobody served it in between
    second = taken(keeper)
    assert second.state["died_at"] == first.state["died_at"]
    give_back(second)


@pytest.mark.clause("S371")
def test_the_mounts_end_is_the_keepers_too_and_an_older_connection_has_no_say(keeper: KeeperProcess) -> None:
    old, new = SupervisorDouble(keeper), SupervisorDouble(keeper)
    channel.send(old.end, {"forget": True})
    channel.send(old.end, {"keep": [["session", 0]]})
    old.close()
    assert keeper.phase() == "served"
    channel.send(new.end, {"forget": True})
    until(lambda: keeper.held() == [])
    new.close()


@pytest.mark.clause("S371")
def test_what_it_does_not_understand_ends_that_connection_and_nothing_else(keeper: KeeperProcess) -> None:
    double = SupervisorDouble(keeper)
    for message in (b"", b"nonsense", b"[1]", b'{"take": "/mnt/none"}', b'{"hold": 1}', b'{"keep": 1}'):
        end = connected(keeper.runtime / keeper_client.SOCKET, 10.0)
        assert end is not None
        end.send(message)
        end.close()
    assert keeper.phase() == "served"
    double.close()


@pytest.mark.clause("S373")
def test_nobody_comes_in_time(keeper: KeeperProcess) -> None:
    double = SupervisorDouble(keeper, keeper_wait_s=0.5)
    double.close()
    until(lambda: keeper.held() == [])
    assert taken(keeper).refused


@pytest.mark.clause("S373")
def test_who_was_given_the_mount_and_never_serves_does_not_keep_it_for_ever(keeper: KeeperProcess) -> None:
    SupervisorDouble(keeper, keeper_wait_s=2).close()
    until(lambda: keeper.phase() == "alone")
    got = taken(keeper)
    until(lambda: keeper.held() == [])
    give_back(got)


@pytest.mark.clause("S374")
def test_who_had_an_earlier_generation_does_not_get_it_back(keeper: KeeperProcess) -> None:
    lineage = next_generation(next_generation({}, "old"), "new")
    assert (outlived(lineage, "old"), outlived(lineage, "new"), outlived(lineage, "third"), outlived(lineage, "")) == (OUTLIVED, "", "", "")
    SupervisorDouble(keeper, lineage=lineage).close()
    until(lambda: keeper.phase() == "alone")
    assert taken(keeper, "old").refused == OUTLIVED
    got = taken(keeper, "new")
    assert got.refused == ""
    assert outlived(next_generation(got.state, "old"), "new") == OUTLIVED  # whoever has it last
    give_back(got)


@pytest.mark.clause("S376")
def test_only_its_owner_and_root_are_heard(keeper: KeeperProcess) -> None:
    path = keeper.runtime / keeper_client.SOCKET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    if os.getuid() != 0:
        pytest.skip("needs root to be somebody else")
    double = SupervisorDouble(keeper)
    path.chmod(0o666)
    for directory in path.parents[:4]:
        directory.chmod(directory.stat().st_mode | 0o111)
    program = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"end.connect({os.fspath(path)!r})\n"
        "try: end.send(b'{\"list\": true}'); sys.exit(len(end.recv(1000)) > 0)\n"
        "except (BrokenPipeError, ConnectionResetError): sys.exit(0)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
    double.close()


@pytest.mark.clause("S371")
def test_a_second_keeper_is_refused_and_one_after_a_kill_is_not(keeper: KeeperProcess) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "acpfs.supervisor.keeper", str(keeper.runtime)]
    assert subprocess.run(words, env=environment, check=False, timeout=60, capture_output=True).returncode == ExitCode.REFUSED
    keeper.restart()
    assert keeper.held() == []


@pytest.mark.clause("S371")
def test_a_keeper_that_hangs_holds_nobody_up(keeper: KeeperProcess) -> None:
    """Messages go unread until there is no room; the supervisor then gives the connection up."""
    lost = threading.Event()
    client = keeper_client.KeeperClient(lambda _end, _heard: None, lambda end: end.close(), lambda fds: None if fds else lost.set())
    keeper.process.send_signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        client.look(settings_of(keeper), {}, {"facts": {}}, os.pidfd_open(os.getpid()))
        while not lost.is_set() and time.monotonic() - begun < 60:
            client.store_state({"facts": "x" * 4096})
        assert lost.is_set()
        assert list(client.connection) == []
    finally:
        keeper.process.send_signal(signal.SIGCONT)
