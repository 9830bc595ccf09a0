"""The keeper's dialogue, without a mount: supervisors are connections that this test holds, a
session is an eventfd.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acpfs.descriptors import readable
from acpfs.errors import ExitCode
from acpfs.supervisor import channel, keeper_client
from acpfs.supervisor.instances import OUTLIVED, next_generation, outlived
from acpfs.supervisor.keeper import OTHERS_MAX
from acpfs.supervisor.local_sockets import connected
from tests.rig.keeper import KeeperProcess, until
from tests.rig.processes import stop_processes

MOUNTPOINT = "/mnt/none"
BACKING = "/shared/none"


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    made = KeeperProcess(tmp_path / "run")
    yield made
    made.end()


def settings_of(keeper: KeeperProcess, **more: object) -> dict[str, Any]:
    return {
        "mountpoint": MOUNTPOINT,
        "backing": BACKING,
        "runtime_dir": str(keeper.runtime),
        "on_failure": "stop",
        **more,
    }


class SupervisorDouble:
    """Tells a keeper of a mount, as `KeeperClient` does: with the pidfd of a process of its own,
    and this one's connection.
    """

    def __init__(
        self, keeper: KeeperProcess, *, lineage: dict[str, Any] | None = None, **settings: object
    ) -> None:
        end = connected(keeper.runtime / keeper_client.SOCKET, 10.0)
        assert end is not None
        self.session = os.eventfd(7)
        self.end = end
        state = {
            "facts": {"session": "token"},
            "workers": 1,
            "settings": settings_of(keeper, **settings),
            **(lineage or {}),
        }
        self.process = subprocess.Popen(["sleep", "1000"])
        pidfd = os.pidfd_open(self.process.pid)
        channel.send(end, {"hold": MOUNTPOINT, "session": "token"}, [pidfd])
        os.close(pidfd)
        channel.send(end, {"keep": [["session", 1]]}, [self.session])
        channel.send(end, {"state": state})
        channel.send(end, {"whole": ["session"]})
        until(lambda: any(held["descriptors"] == 1 for held in keeper.held()))

    def close(self) -> None:
        """It ends."""
        self.process.kill()
        self.process.wait()
        self.end.close()
        os.close(self.session)


class Taker:
    """A process that asks for the mount, is given it, and lives until it is killed."""

    PROGRAM = """
import json, sys
from acpfs.supervisor import keeper_client
got = keeper_client.take(json.loads(sys.argv[1]), "")
print(json.dumps([got.refused, got.state]), flush=True)
sys.stdin.read()
"""

    def __init__(self, keeper: KeeperProcess) -> None:
        words = [sys.executable, "-c", self.PROGRAM, json.dumps(settings_of(keeper))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdout is not None
        self.refused, self.state = json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        with self._process:
            self._process.kill()


def descriptors_of(keeper: KeeperProcess, kind: str = "anon_inode") -> int:
    """How many it has of a kind; eventfds and pidfds are what it is told to hold here."""
    keeper.held()  # it has come to what was said before
    count = 0
    for entry in Path(f"/proc/{keeper.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # one that asked is gone
            count += os.readlink(entry).startswith(kind)
    return count


def is_ended(end: socket.socket) -> bool:
    return readable(end, 60) and end.recv(100) == b""


def connection_to(keeper: KeeperProcess) -> socket.socket:
    end = connected(keeper.runtime / keeper_client.SOCKET, 60.0)
    assert end is not None
    return end


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
    # it has a copy
    copy = double.end.dup()
    worker = subprocess.Popen(["sleep", "1000"])
    pidfd = os.pidfd_open(worker.pid)
    channel.send(double.end, {"worker": True}, [pidfd])
    os.close(pidfd)
    double.close()
    assert "lives" in taken(keeper).refused
    worker.kill()
    worker.wait()
    copy.close()
    until(lambda: keeper.phase() == "alone")
    assert BACKING in taken(keeper, backing="/other").refused
    first = Taker(keeper)
    assert first.refused == ""
    assert "another supervisor" in taken(keeper).refused
    since = keeper.held()[0]["alone_s"]
    first.kill()  # before it served
    until(lambda: keeper.phase() == "alone")
    assert keeper.held()[0]["alone_s"] > since  # nobody served it in between
    second = taken(keeper)
    assert os.eventfd_read(second.kept["session"][0]) == 7
    assert (second.state["workers"], second.state["facts"]) == (1, {"session": "token"})
    assert second.state["died_at"] == first.state["died_at"]
    give_back(second)


@pytest.mark.clause("S372")
def test_a_supervisor_that_gives_the_connection_up_and_lives_keeps_its_mount(
    keeper: KeeperProcess,
) -> None:
    """As it does when the keeper hangs for a while: it serves on, and tells the keeper again
    later.
    """
    double = SupervisorDouble(keeper)
    double.end.close()

    def is_held_no_more() -> bool:
        phase = keeper.phase()
        assert phase in ("served", "")
        return phase == ""

    until(is_held_no_more)  # what it does next is not told
    again = SupervisorDouble(keeper)
    assert keeper.phase() == "served"
    again.close()
    double.close()


@pytest.mark.clause("S377")
def test_descriptors_of_what_is_not_carried_out_are_closed(keeper: KeeperProcess) -> None:
    double = SupervisorDouble(keeper)
    before = descriptors_of(keeper)
    wrong = [
        b"",
        b"nonsense",
        b"[1]",
        b'{"take": "/mnt/none"}',
        b'{"hold": 1}',
        b'{"keep": [["a", 1]]}',
        b'{"list": true}',
    ]
    for message in [*wrong, b'{"hold": "/mnt/other", "session": "x"}']:
        end = connection_to(keeper)
        socket.send_fds(end, [message], [double.session] * 5)
        end.close()
        until(lambda: descriptors_of(keeper) <= before)
    assert keeper.phase() == "served"
    double.close()


@pytest.mark.clause("S377")
def test_what_its_supervisor_says_wrongly_leaves_nothing_open_and_ends_nothing(
    keeper: KeeperProcess,
) -> None:
    before = descriptors_of(keeper)
    wrong: list[dict[str, Any]] = [
        {"keep": [["more", 2]]},
        {"keep": [["more", 0]]},
        {"keep": 1},
        {"whole": 1},
        {"state": 1},
    ]
    for message in wrong:
        double = SupervisorDouble(keeper)
        channel.send(double.end, message, [double.session])
        assert is_ended(double.end)  # it is not heard any more: it tells everything anew
        assert all(held["descriptors"] == 1 for held in keeper.held())
        assert keeper.phase() != "alone"
        double.close()
        until(lambda: keeper.phase() != "served")
    double = SupervisorDouble(keeper)
    channel.send(double.end, {"forget": True})
    until(lambda: keeper.held() == [])
    double.close()
    until(lambda: descriptors_of(keeper) == before)


@pytest.mark.clause("S377")
def test_connections_that_say_nothing_take_no_descriptor_from_mounts(keeper: KeeperProcess) -> None:
    double = SupervisorDouble(keeper)
    silent = [connection_to(keeper) for _ in range(OTHERS_MAX + 20)]
    until(
        lambda: descriptors_of(keeper, "socket") <= OTHERS_MAX + 3
    )  # the door, the mount's, and whoever asks
    assert is_ended(silent[0])  # the oldest
    assert keeper.phase() == "served"  # whoever comes now is heard
    channel.send(double.end, {"keep": [["more", 1]]}, [double.session])
    until(lambda: keeper.held()[0]["descriptors"] == 2)
    double.close()
    for end in silent:
        end.close()


@pytest.mark.clause("S371")
def test_the_mounts_end_is_the_keepers_too_and_an_older_connection_has_no_say(
    keeper: KeeperProcess,
) -> None:
    old = SupervisorDouble(keeper)
    new = SupervisorDouble(keeper)
    channel.send(old.end, {"forget": True})
    channel.send(old.end, {"keep": [["session", 0]]})
    old.close()
    assert keeper.phase() == "served"
    channel.send(new.end, {"forget": True})
    until(lambda: keeper.held() == [])
    new.close()


@pytest.mark.clause("S371")
def test_what_it_does_not_understand_ends_that_connection_and_nothing_else(
    keeper: KeeperProcess,
) -> None:
    double = SupervisorDouble(keeper)
    for message in (
        b"",
        b"nonsense",
        b"[1]",
        b'{"take": "/mnt/none"}',
        b'{"hold": 1}',
        b'{"keep": 1}',
    ):
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
def test_who_was_given_the_mount_and_never_serves_does_not_keep_it_for_ever(
    keeper: KeeperProcess,
) -> None:
    got = keeper_client.Taken("not asked yet")
    for wait_s in (
        2,
        8,
        32,
    ):  # where this machine stands still for so long, nothing is left to be given
        if got.refused:
            SupervisorDouble(keeper, keeper_wait_s=wait_s).close()
            until(lambda: keeper.phase() in ("alone", ""))
            got = taken(keeper)
    until(lambda: keeper.held() == [])
    give_back(got)


@pytest.mark.clause("S374")
def test_who_had_an_earlier_generation_does_not_get_it_back(keeper: KeeperProcess) -> None:
    lineage = next_generation(next_generation({}, "old"), "new")
    assert (
        outlived(lineage, "old"),
        outlived(lineage, "new"),
        outlived(lineage, "third"),
        outlived(lineage, ""),
    ) == (OUTLIVED, "", "", "")
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
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); end = "
        "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
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
    assert (
        subprocess.run(
            words, env=environment, check=False, timeout=60, capture_output=True
        ).returncode
        == ExitCode.REFUSED
    )
    keeper.restart()
    assert keeper.held() == []


@pytest.mark.clause("S371")
def test_a_keeper_that_hangs_holds_nobody_up(keeper: KeeperProcess) -> None:
    """Messages go unread until there is no room; the supervisor then gives the connection up."""
    lost = threading.Event()
    client = keeper_client.KeeperClient(
        lambda _end, _heard: None, lambda end: end.close(), lambda fds: None if fds else lost.set()
    )
    stop_processes([keeper.process.pid])
    try:
        begun = time.monotonic()
        client.look(settings_of(keeper), {}, {"facts": {}}, os.pidfd_open(os.getpid()))
        while not lost.is_set() and time.monotonic() - begun < 60:
            client.store_state({"facts": "x" * 4096})
        assert lost.is_set()
        assert list(client.connection) == []
    finally:
        keeper.process.send_signal(signal.SIGCONT)
