"""The supervisor: restarts, hangs, reload, giving up, its own death, the service manager's
store.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
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
from acpfs.ram.state import HELD_VERSION, STATE_VERSION
from acpfs.supervisor.restarts import AT_ONCE, DELAY_MAX_S, EARLY_S, Restarts
from tests.rig.hanging_code import code_that_hangs, flag_of
from tests.rig.mounts import (
    REPOSITORY,
    AcpfsMount,
    CommandError,
    MakeMount,
    is_mounted,
    kinds_at,
    wait_gone,
)
from tests.rig.processes import stop_processes

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
WATCHDOG_S = 600.0
HANG_S = "10"
"""Ten beats: a worker that lives must not be taken for one that hangs on a busy machine."""


def test_back_off_and_giving_up() -> None:
    restarts = Restarts(8)
    assert [restarts.delay_s(0.1) for _ in range(AT_ONCE)] == [0.0] * AT_ONCE
    delays = [delay_s for _ in range(4) if (delay_s := restarts.delay_s(0.1)) is not None]
    assert len(delays) == 4
    assert delays == sorted(set(delays))
    assert delays[-1] <= DELAY_MAX_S
    assert restarts.delay_s(0.1) is None


def test_a_worker_that_served_for_a_while_is_replaced_at_once_however_often() -> None:
    restarts = Restarts(3)
    assert [restarts.delay_s(EARLY_S) for _ in range(20)] == [0.0] * 20


@pytest.fixture
def mount(tmp_path: Path, transport: str) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S
    ) as made:
        yield made


@pytest.mark.clause("S82")
@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_dead_supervisor_is_replaced_and_the_session_lives_on(mount: AcpfsMount) -> None:
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        worker = mount.pid
        supervisor = mount.supervisor
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
def test_a_worker_that_dies_while_the_next_supervisor_starts_is_replaced(mount: AcpfsMount) -> None:
    """The session is in the new supervisor's channel by then, the worker that put it there is no
    more.
    """
    with open(mount.path / "f", "wb", buffering=0) as file:
        for number in range(4):
            worker = mount.pid
            supervisor = mount.supervisor
            os.kill(supervisor, signal.SIGKILL)
            while (
                mount.supervisor == supervisor
            ):  # known as soon as it has been given the session, long before it has begun
                os.sched_yield()
            os.kill(worker, signal.SIGKILL)
            wait_gone(worker)
            file.write(b"%d" % number)
            mount.wait_status(lambda status, dead=worker: status["worker"]["pid"] != dead)
    assert (mount.path / "f").read_bytes() == b"0123"
    mount.umount()
    assert (mount.backing / "f").read_bytes() == b"0123"


@pytest.mark.clause("S82")
@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_supervisor_that_cannot_be_started_yet_is_started_later(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    """The worker may not open anything more for a while, and so has no channel to give to a
    supervisor.
    """
    log = tmp_path / "acpfs.log"
    mount.umount()
    mount.start(log_file=str(log))
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        worker = mount.pid
        supervisor = mount.supervisor
        limits = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (1, limits[1]))
        os.kill(supervisor, signal.SIGKILL)
        wait_logged(log, "no other supervisor can be started")
        resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)
        mount.wait_status(lambda _status: mount.supervisor != supervisor)
        os.kill(worker, signal.SIGKILL)
        file.write(b"two")
    mount.umount()
    assert (mount.backing / "f").read_bytes() == b"one two"


def wait_logged(log: Path, text: str, timeout_s: float = 60.0) -> None:
    """Until a log says so."""
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"never logged: {text}")
        threading.Event().wait(0.02)


@pytest.mark.mount
@pytest.mark.transports("native")
def test_reload_while_a_file_is_written(mount: AcpfsMount) -> None:
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        before = mount.status()["worker"]
        after = mount.ctl("reload")
        file.write(b"two")
    assert (after["number"], after["last_end"]) == (before["number"] + 1, "reload")
    assert after["pid"] != before["pid"]
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"one two"
    with pytest.raises(CommandError, match="in time") as late:
        mount.ctl("reload", "--timeout", "0")
    assert late.value.code == ExitCode.TIMEOUT
    mount.wait_status(lambda status: status["worker"]["number"] == after["number"] + 1)


@pytest.mark.mount
@pytest.mark.transports("native")
def test_new_code_that_refuses_leaves_the_old_one_at_work(tmp_path: Path, transport: str) -> None:
    """The new code is a copy that knows only older states."""
    code = tmp_path / "code"
    shutil.copytree(
        REPOSITORY / "acpfs", code / "acpfs", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "backing").mkdir()
    environment = {"PYTHONPATH": str(code)}
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        transport,
        watchdog_s=WATCHDOG_S,
        environment=environment,
    ) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            state = code / "acpfs/ram/state.py"
            text = state.read_text()
            before = STATE_VERSION - 1
            older = text.replace(f"STATE_VERSION = {STATE_VERSION}", f"STATE_VERSION = {before}")
            state.write_text(
                older.replace(f"HELD_VERSION = {HELD_VERSION}", f"HELD_VERSION = {before}")
            )
            assert state.read_text() != text
            with pytest.raises(
                CommandError,
                match=rf"reload refused: .* has version {STATE_VERSION}, this acpfs knows {before}",
            ):
                mount.ctl("reload")
            file.write(b"two")
        assert (mount.path / "f").read_bytes() == b"one two"
        state.write_text(text)
        later = (
            time.time() + 10
        )  # bytecode of the other text is as long, and may be of the same second
        os.utime(state, (later, later))
        assert mount.ctl("reload")["last_end"] == "reload"
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.clause("S130")
@pytest.mark.mount
@pytest.mark.transports("native")
def test_settings_changed_in_use_outlive_worker_and_supervisor(mount: AcpfsMount) -> None:
    mount.ctl("set", "bandwidth=5M")
    supervisor = mount.supervisor
    os.kill(supervisor, signal.SIGKILL)
    mount.wait_status(lambda _status: mount.supervisor != supervisor)
    wait_gone(mount.kill_worker())
    assert mount.ctl("config")["bandwidth"] == 5 << 20


@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_hung_worker_says_where_it_hangs_and_is_replaced(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_HANG_TIMEOUT_S", HANG_S)
    (tmp_path / "backing").mkdir()
    log = tmp_path / "acpfs.log"
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S, log_file=str(log)
    ) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            stop_processes([mount.pid])
            os.mkdir(mount.path / "d")  # or the watchdog ends it with an error
            file.write(b"two")
        assert mount.status()["worker"]["last_end"] == "hung"
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"


PLACES = {
    "event loop": (
        "acpfs/worker/worker.py",
        "            await trio.sleep(FREEZE_INTERVAL_S)\n",
        "            hang_here()\n",
    ),
    "reader": (
        "acpfs/filesystem/backing_space.py",
        "        assert self._known is not None\n",
        "        hang_here()\n",
    ),
}


@pytest.mark.mount
@pytest.mark.transports("native")
@pytest.mark.parametrize("place", PLACES)
def test_the_stacks_of_a_hung_worker_are_in_the_log(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A copy of the code has a place that hangs once, when told."""
    monkeypatch.setenv("ACPFS_HANG_TIMEOUT_S", HANG_S)
    code = code_that_hangs(tmp_path, PLACES[place])
    flag = flag_of(tmp_path)
    log = tmp_path / "acpfs.log"
    (tmp_path / "backing").mkdir()
    words: dict[str, Any] = {
        "watchdog_s": WATCHDOG_S,
        "log_file": str(log),
        "environment": {"PYTHONPATH": str(code)},
    }
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, **words) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            flag.touch()
            os.statvfs(mount.path)
            file.write(b"two")
            assert (
                mount.wait_status(lambda status: status["worker"]["number"] >= 2)["worker"][
                    "last_end"
                ]
                == "hung"
            )
        assert "in hang_here" in log.read_text()
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.clause("S81")
@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_worker_that_ends_by_a_bug_can_be_asked_for_again(tmp_path: Path, transport: str) -> None:
    """The first one of the mount, of a copy of the code that raises once, when told: what the next
    one serves at stays.
    """
    code = tmp_path / "code"
    flag = tmp_path / "raise"
    shutil.copytree(
        REPOSITORY / "acpfs", code / "acpfs", ignore=shutil.ignore_patterns("__pycache__")
    )
    worker = code / "acpfs/worker/worker.py"
    after = "            await trio.sleep(FREEZE_INTERVAL_S)\n"
    text = worker.read_text()
    assert text.count(after) == 1
    worker.write_text(
        text.replace(
            after,
            f"{after}            if os.path.exists({str(flag)!r}): os.unlink({str(flag)!r}); "
            "int('a bug')\n",
        )
    )
    (tmp_path / "backing").mkdir()
    words: dict[str, Any] = {"watchdog_s": WATCHDOG_S, "environment": {"PYTHONPATH": str(code)}}
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, **words) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            pidfd = os.pidfd_open(mount.pid)
            flag.touch()
            assert readable(pidfd, 120)
            os.close(pidfd)
            file.write(b"two")
        assert mount.wait_status(lambda status: status["worker"]["number"] == 2)
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"


DIES_ONCE = """

def _dies_once():
    if os.path.exists(FLAG):
        os.unlink(FLAG)
        os.kill(os.getpid(), 9)
"""
FALLTHROUGH = "acpfs/supervisor/fallthrough.py"
MOUNTS = "acpfs/ram/mounts.py"
DEATHS = {
    "at the end": [
        (
            FALLTHROUGH,
            '    log.error(\n        "bypassed: new opens are native"',
            "    _dies_once()\n{}",
        )
    ],
    "before it is noted": [
        (FALLTHROUGH, "    if found.aside:\n        _write(", "    _dies_once()\n{}")
    ],
    "on a bare directory": [
        (
            MOUNTS,
            "_MOVE_MOUNT_BENEATH = 0x200",
            "_MOVE_MOUNT_BENEATH = 0x400",
        ),
        (FALLTHROUGH, "    if not lies:\n", "    _dies_once()\n{}"),
    ],
}
"""Where, and what is made of the code for that: a backing directory over a network but for the
first, and a kernel before 6.5.
"""


@pytest.mark.clause("S70", "S81")
@pytest.mark.mount
@pytest.mark.transports("native")
@pytest.mark.parametrize("where", DEATHS)
def test_a_worker_that_dies_as_the_mount_is_bypassed(
    tmp_path: Path, transport: str, where: str
) -> None:
    """Of a copy of the code that kills itself there: the next one knows, and leaves to applications
    what lies beneath.
    """
    code = tmp_path / "code"
    flag = tmp_path / "dies"
    shutil.copytree(
        REPOSITORY / "acpfs", code / "acpfs", ignore=shutil.ignore_patterns("__pycache__")
    )
    network = (
        [(FALLTHROUGH, "_LASTING = frozenset(", "_LASTING = frozenset() and frozenset(")]
        if where != "at the end"
        else []
    )
    for name, before, after in [*DEATHS[where], *network]:
        text = (code / name).read_text()
        assert text.count(before) == 1, before
        (code / name).write_text(text.replace(before, after.replace("{}", before)))
    with open(code / FALLTHROUGH, "a") as module:
        module.write(DIES_ONCE.replace("FLAG", repr(str(flag))))
    flag.touch()
    (tmp_path / "backing").mkdir()
    words: dict[str, Any] = {"watchdog_s": WATCHDOG_S, "environment": {"PYTHONPATH": str(code)}}
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, **words) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            with contextlib.suppress(CommandError):
                mount.ctl("bypass", "--reason", "a test")
            status = mount.wait_status(lambda status: status["worker"]["number"] == 2)
            assert (status["state"], status["bypass_reason"]) == ("bypassed", "a test")
            assert not flag.exists()
            file.write(b"two")
            pid = mount.pid
        mount.wait_ended(pid)
        (mount.path / "native").write_bytes(b"n")
        assert (mount.backing / "native").read_bytes() == b"n"
        mount.run("acpfs", "umount", str(mount.path))
        assert (mount.backing / "f").read_bytes() == b"one two"
        assert mount.leaks() == []


@pytest.mark.mount
@pytest.mark.transports("native")
def test_a_worker_that_cannot_live_falls_through(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_EARLY_DEATHS_MAX", "3")
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S
    ) as mount:
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


@pytest.mark.clause("S81")
@pytest.mark.mount
@pytest.mark.transports("libfuse")
@pytest.mark.parametrize("on_failure", ["native", "stop"])
def test_a_libfuse_mount_is_made_anew_and_loses_nothing(
    make_mount: MakeMount, tmp_path: Path, transport: str, on_failure: str
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, bandwidth="1", on_failure=on_failure)
    content = os.urandom(1 << 20)
    (mount.path / "f").write_bytes(content)
    wait_gone(mount.kill_worker())
    mount.wait_status(
        lambda status: status["worker"]["number"] == 2 and can_be_read(mount.path / "f")
    )
    assert (mount.path / "f").read_bytes() == content
    mount.ctl("set", "bandwidth=0")
    mount.umount()
    assert (mount.backing / "f").read_bytes() == content


@pytest.mark.clause("S70")
@pytest.mark.mount
@pytest.mark.transports("libfuse")
def test_a_bypassed_libfuse_mount_is_not_made_anew_and_loses_nothing(mount: AcpfsMount) -> None:
    mount.ctl("set", "bandwidth=1")
    content = os.urandom(1 << 20)
    (mount.path / "f").write_bytes(content)
    mount.ctl("bypass", "--reason", "a test")
    mount.kill_worker()
    status = mount.wait_status(lambda status: status["worker"]["number"] == 2)
    assert status["bypass_reason"] == "a test"
    assert "fuse.acpfs" not in kinds_at(mount.path)
    (mount.path / "native").write_bytes(b"n")
    supervisor = mount.supervisor
    mount.ctl("set", "bandwidth=0")
    mount.wait_ended(supervisor)
    assert (mount.path / "f").read_bytes() == content
    assert (mount.backing / "native").read_bytes() == b"n"
    mount.run("acpfs", "umount", str(mount.path))


def can_be_read(path: Path) -> bool:
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
        self.socket.settimeout(120)
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

    def state(self) -> bytes:
        """What the supervisor keeps beside its descriptors."""
        return b"".join(
            os.pread(fd, 1 << 16, 0) for name, fd in self.stored if name == "acpfs-state"
        )

    def start(self, mount: AcpfsMount) -> subprocess.Popen[bytes]:
        """Start the service, with what is in the store."""
        count = len(self.stored)
        program = (
            f"import os,sys; names={':'.join(name for name, _ in self.stored)!r}; "
            f"fds={[fd for _, fd in self.stored]!r}\n"
            "high=[os.dup2(fd, 500+n) for n, fd in enumerate(fds)]\n"
            "for n, fd in enumerate(high): os.dup2(fd, 3+n, inheritable=True); os.close(fd)\n"
            "if fds: os.environ.update(LISTEN_FDS=str(len(fds)), LISTEN_PID=str(os.getpid()), "
            "LISTEN_FDNAMES=names)\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'acpfs.cli.main', *sys.argv[1:]])"
        )
        env = {
            **os.environ,
            "NOTIFY_SOCKET": str(self.path),
            "ACPFS_RUNTIME_DIR": str(mount.runtime_dir),
            "PYTHONPATH": str(REPOSITORY),
        }
        words = [
            "mount",
            str(mount.backing),
            str(mount.path),
            "--foreground",
            "--ram",
            "64M",
            "--transport",
            "native",
        ]
        with open(mount.log, "ab") as log:
            assert count < 60
            return subprocess.Popen(
                [sys.executable, "-c", program, *words],
                env=env,
                stderr=log,
                pass_fds=[fd for _, fd in self.stored],
            )


@pytest.mark.clause("S82", "S130")
@pytest.mark.mount
def test_the_session_outlives_the_whole_service_in_the_store(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "mnt").mkdir()
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native", watchdog_s=WATCHDOG_S)
    manager = ManagerDouble(tmp_path / "notify")
    mount.watch()
    try:
        first = manager.start(mount)
        manager.wait("READY")
        program = (
            "import sys; f = open(sys.argv[1], 'wb', 0); f.write(b'one '); print(1, flush=True); "
            "input(); f.write(b'two')"
        )
        # not in this process: to start another one while nobody serves would wait for a close of
        # its copies of open files
        with subprocess.Popen(
            [sys.executable, "-c", program, str(mount.path / "f")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"1\n"
            mount.ctl("set", "ram=48M")
            while b'"ram": 50331648' not in manager.state():
                manager.wait("FDSTORE")
            for pid in (
                mount.living()
            ):  # as a service manager ends all of a service when its main process has died
                with contextlib.suppress(ProcessLookupError):  # the template ends by itself
                    os.kill(pid, signal.SIGKILL)
            first.wait(60)
            second = manager.start(mount)
            writer.communicate(b"go\n", timeout=60)
            assert writer.returncode == 0
        manager.wait("READY")
        assert mount.ctl("config")["ram"] == 48 << 20
        second.terminate()
        manager.wait("STOPPING")
        assert second.wait(60) == 0
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
