"""The supervisor: restarts, hangs, reload, giving up, its own death, the service manager's store."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.supervisor.restarts import AT_ONCE, DELAY_MAX_S, EARLY_S, Restarts
from tests.rig.mounts import REPOSITORY, AcpfsMount, CommandError, is_mounted, wait_gone

pytestmark = pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse")
WATCHDOG_S = 90.0


def test_back_off_and_giving_up():
    restarts = Restarts(8)
    assert [restarts.delay_s(0.1) for _ in range(AT_ONCE)] == [0.0] * AT_ONCE
    delays = [restarts.delay_s(0.1) for _ in range(4)]
    assert delays == sorted(set(delays))
    assert delays[-1] <= DELAY_MAX_S
    assert restarts.delay_s(0.1) is None


def test_a_worker_that_served_for_a_while_is_replaced_at_once_however_often():
    restarts = Restarts(3)
    assert [restarts.delay_s(EARLY_S) for _ in range(20)] == [0.0] * 20


@pytest.fixture
def mount(tmp_path: Path, transport: str) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S) as made:
        yield made


@pytest.mark.clause("S82")
@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_dead_supervisor_is_replaced_and_the_session_lives_on(mount: AcpfsMount):
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        worker, supervisor = mount.pid, mount.supervisor
        os.kill(supervisor, signal.SIGKILL)
        wait_gone(supervisor)
        file.write(b"two ")
        assert mount.pid == worker
        mount.wait_status(lambda _status: mount.supervisor != supervisor)
        os.kill(worker, signal.SIGKILL)
        file.write(b"three")
    assert mount.pid != worker
    mount.umount()
    assert (mount.backing / "f").read_bytes() == b"one two three"
    assert mount.leaks() == []


@pytest.mark.clause("S82")
@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_worker_that_dies_while_the_next_supervisor_starts_is_replaced(mount: AcpfsMount):
    """The session is in the new supervisor's channel by then, the worker that put it there is no more."""
    with open(mount.path / "f", "wb", buffering=0) as file:
        for number in range(4):
            worker, supervisor = mount.pid, mount.supervisor
            os.kill(supervisor, signal.SIGKILL)
            while mount.supervisor == supervisor:  # known as soon as it has been given the session, long before it has begun
                os.sched_yield()
            os.kill(worker, signal.SIGKILL)
            wait_gone(worker)
            file.write(b"%d" % number)
            mount.wait_status(lambda status, dead=worker: status["worker"]["pid"] != dead)
    assert (mount.path / "f").read_bytes() == b"0123"
    mount.umount()
    assert (mount.backing / "f").read_bytes() == b"0123"


@pytest.mark.mount
@pytest.mark.transports("native")
def test_reload_while_a_file_is_written(mount: AcpfsMount):
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        before = mount.status()["worker"]
        after = mount.ctl("reload")
        file.write(b"two")
    assert (after["number"], after["last_end"]) == (before["number"] + 1, "reload")
    assert after["pid"] != before["pid"]
    assert after["pause_s"] < 1.0
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.mount
@pytest.mark.transports("native")
def test_new_code_that_refuses_leaves_the_old_one_at_work(tmp_path: Path, transport: str):
    """The new code is a copy that knows only older states."""
    code = tmp_path / "code"
    shutil.copytree(REPOSITORY / "acpfs", code / "acpfs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "backing").mkdir()
    environment = {"PYTHONPATH": str(code)}
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S, environment=environment) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            state = code / "acpfs/ram/state.py"
            text = state.read_text()
            state.write_text(text.replace("STATE_VERSION = 1", "STATE_VERSION = 0"))
            assert state.read_text() != text
            with pytest.raises(CommandError, match=r"reload refused: the state in .* has version 1, this acpfs knows 0"):
                mount.ctl("reload")
            file.write(b"two")
        assert (mount.path / "f").read_bytes() == b"one two"
        state.write_text(text)
        assert mount.ctl("reload")["last_end"] == "reload"
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.mount
@pytest.mark.transports("native")
def test_settings_changed_in_use_outlive_the_worker(mount: AcpfsMount):
    mount.ctl("set", "bandwidth=5M")
    wait_gone(mount.kill_worker())
    assert mount.ctl("config")["bandwidth"] == 5 << 20


@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_hung_worker_says_where_it_hangs_and_is_replaced(tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACPFS_HANG_TIMEOUT_S", "3")
    (tmp_path / "backing").mkdir()
    log = tmp_path / "acpfs.log"
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S, log_file=str(log)) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            os.kill(mount.pid, signal.SIGSTOP)
            started = time.monotonic()
            os.mkdir(mount.path / "d")
            assert time.monotonic() - started < 15
            file.write(b"two")
        assert mount.status()["worker"]["last_end"] == "hung"
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"


HANG = """

def hang_here():
    import os, threading
    if os.path.exists(FLAG):
        os.unlink(FLAG)
        threading.Event().wait()
"""
PLACES = {
    "event loop": ("acpfs/supervisor/worker.py", "            await trio.sleep(FREEZE_INTERVAL_S)\n", "            hang_here()\n"),
    "reader": ("acpfs/filesystem/filesystem.py", "        assert self._space is not None\n", "        hang_here()\n"),
}


@pytest.mark.mount
@pytest.mark.transports("native")
@pytest.mark.parametrize("place", PLACES)
def test_the_stacks_of_a_hung_worker_are_in_the_log(tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch, place: str):
    """A copy of the code has a place that hangs once, when told."""
    monkeypatch.setenv("ACPFS_HANG_TIMEOUT_S", "3")
    code, flag, log = tmp_path / "code", tmp_path / "hang", tmp_path / "acpfs.log"
    shutil.copytree(REPOSITORY / "acpfs", code / "acpfs", ignore=shutil.ignore_patterns("__pycache__"))
    name, after, call = PLACES[place]
    text = (code / name).read_text()
    assert text.count(after) == 1
    (code / name).write_text(text.replace(after, after + call) + HANG.replace("FLAG", repr(str(flag))))
    (tmp_path / "backing").mkdir()
    words = {"watchdog_s": WATCHDOG_S, "log_file": str(log), "environment": {"PYTHONPATH": str(code)}}
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, **words) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            flag.touch()
            os.statvfs(mount.path)
            file.write(b"two")
            assert mount.wait_status(lambda status: status["worker"]["number"] == 2)["worker"]["last_end"] == "hung"
        assert "in hang_here" in log.read_text()
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_worker_that_cannot_live_falls_through(tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACPFS_EARLY_DEATHS_MAX", "3")
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S) as mount:
        (mount.path / "kept").write_text("x")
        mount.flush()
        supervisor = mount.supervisor
        with contextlib.suppress(Exception):  # the last question is asked when nobody is left
            while True:
                wait_gone(mount.kill_worker())
        wait_gone(supervisor)
        (mount.path / "native").write_text("y")
        assert (mount.backing / "native").read_text() == "y"
        assert (mount.path / "kept").read_text() == "x"
        mount.start()
        assert sorted(os.listdir(mount.path)) == ["kept", "native"]


@pytest.mark.mount
@pytest.mark.transports("libfuse")
def test_a_libfuse_mount_is_made_anew_and_loses_nothing(mount: AcpfsMount):
    mount.ctl("set", "bandwidth=256K")
    content = os.urandom(1 << 20)
    (mount.path / "f").write_bytes(content)
    wait_gone(mount.kill_worker())
    mount.wait_status(lambda status: status["worker"]["number"] == 2 and readable(mount.path / "f"))
    assert (mount.path / "f").read_bytes() == content
    mount.ctl("set", "bandwidth=0")
    mount.umount()
    assert (mount.backing / "f").read_bytes() == content


def readable(path: Path) -> bool:
    """Between two libfuse mounts what lies beneath is seen."""
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


class ManagerDouble:
    """A service manager as far as notifications and the store of descriptors go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(30)
        self.stored: list[tuple[str, int]] = []

    def wait(self, word: str) -> None:
        """Until it is told that."""
        while True:
            text, fds, _flags, _address = socket.recv_fds(self.socket, 65536, 16)
            lines = dict(line.split("=", 1) for line in text.decode().splitlines())
            if "FDSTORE" in lines:
                self.stored += [(lines["FDNAME"], fd) for fd in fds]
            if "FDSTOREREMOVE" in lines:
                for name, fd in [entry for entry in self.stored if entry[0] == lines["FDNAME"]]:
                    os.close(fd)
                    self.stored.remove((name, fd))
            if word in lines:
                return

    def start(self, mount: AcpfsMount) -> subprocess.Popen[bytes]:
        """Start the service, with what is in the store."""
        count = len(self.stored)
        program = (
            f"import os,sys; names={':'.join(name for name, _ in self.stored)!r}; fds={[fd for _, fd in self.stored]!r}\n"
            "high=[os.dup2(fd, 500+n) for n, fd in enumerate(fds)]\n"
            "for n, fd in enumerate(high): os.dup2(fd, 3+n, inheritable=True); os.close(fd)\n"
            "if fds: os.environ.update(LISTEN_FDS=str(len(fds)), LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES=names)\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'acpfs.cli.main', *sys.argv[1:]])"
        )
        env = {**os.environ, "NOTIFY_SOCKET": str(self.path), "ACPFS_RUNTIME_DIR": str(mount.runtime_dir), "PYTHONPATH": str(REPOSITORY)}
        words = ["mount", str(mount.backing), str(mount.path), "--foreground", "--ram", "64M", "--transport", "native"]
        with open(mount.log, "ab") as log:
            assert count < 60
            return subprocess.Popen([sys.executable, "-c", program, *words], env=env, stderr=log, pass_fds=[fd for _, fd in self.stored])


@pytest.mark.mount
def test_the_session_outlives_the_whole_service_in_the_store(tmp_path: Path):
    (tmp_path / "backing").mkdir()
    (tmp_path / "mnt").mkdir()
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native", watchdog_s=WATCHDOG_S)
    manager = ManagerDouble(tmp_path / "notify")
    mount.watch()
    try:
        first = manager.start(mount)
        manager.wait("READY")
        program = "import sys; f = open(sys.argv[1], 'wb', 0); f.write(b'one '); print(1, flush=True); input(); f.write(b'two')"
        # not in this process: to start another one while nobody serves would wait for a close of its copies of open files
        with subprocess.Popen(
            [sys.executable, "-c", program, str(mount.path / "f")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"1\n"
            for pid in mount.living():  # as a service manager ends all of a service when its main process has died
                os.kill(pid, signal.SIGKILL)
            first.wait(20)
            second = manager.start(mount)
            writer.communicate(b"go\n", timeout=40)
            assert writer.returncode == 0
        manager.wait("READY")
        second.terminate()
        manager.wait("STOPPING")
        assert second.wait(30) == 0
        assert not is_mounted(mount.path)
        assert (mount.backing / "f").read_bytes() == b"one two"
        with contextlib.suppress(TimeoutError):
            manager.socket.settimeout(0.5)
            manager.wait("nothing more")
        assert manager.stored == []
    finally:
        mount.abort()
        manager.socket.close()
        for _name, fd in manager.stored:
            os.close(fd)
