"""The keeper: all processes of a mount are killed, and the next daemon goes on with it; training
does not notice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from acpfs.cli.ctl import command as ctl
from acpfs.descriptors import readable
from acpfs.errors import ExitCode
from tests.rig.keeper import KeeperProcess, Launcher, until
from tests.rig.mounts import AcpfsMount, is_mounted, kinds_at, wait_gone

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
WATCHDOG_S = 1200.0
TURNS = int(os.environ.get("ACPFS_KILLS", "20"))
PIECE = b"p" * 4096


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.end()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    made = KeeperProcess(tmp_path / "mnt.run")
    yield made
    made.end()


@pytest.fixture
def mount(tmp_path: Path, transport: str, keeper: KeeperProcess) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S
    ) as made:
        made.wait_status(lambda status: status["worker"]["keeper"])
        yield made
        if is_mounted(made.path):
            made.umount()  # while there is a keeper


LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
for lock in (lambda kind: fcntl.flock(file, kind), lambda kind: fcntl.lockf(file, kind, 10, 20)):
    try:
        lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free", flush=True)
    except BlockingIOError:
        print("locked", flush=True)
if sys.argv[2] == "wait":
    fcntl.lockf(file, fcntl.LOCK_EX, 10, 20)
    print("got it", flush=True)
    fcntl.flock(file, fcntl.LOCK_EX)
    print("got it", flush=True)
"""


class Locks:
    """A flock and a range lock of this process, and another process that waits for both from before
    the first kill.
    """

    def __init__(self, path: Path) -> None:
        # closed by `end`
        self._path = path
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 10, 20)
        self._waits = subprocess.Popen(
            [sys.executable, "-c", LOCKER, path, "wait"], stdout=subprocess.PIPE, bufsize=0
        )
        self._says("locked", "locked")

    def hold(self) -> None:
        words = [sys.executable, "-c", LOCKER, str(self._path), "look"]
        assert subprocess.run(
            words, capture_output=True, timeout=60, check=True
        ).stdout.split() == [b"locked", b"locked"]
        assert self._waits.stdout is not None
        assert not readable(self._waits.stdout.fileno(), 0)

    def end(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 10, 20)
        self._says("got it")
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._says("got it")
        with self._waits:
            assert self._waits.wait(60) == 0
        self._file.close()

    def _says(self, *lines: str) -> None:
        assert self._waits.stdout is not None
        for line in lines:
            assert readable(self._waits.stdout.fileno(), 60)
            assert self._waits.stdout.readline().decode().strip() == line


class Writer:
    """A thread that never stops writing."""

    def __init__(self, path: Path) -> None:
        self.written = 0
        self._stop = threading.Event()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by `end`
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        while not self._stop.is_set():
            self.written += self._file.write(PIECE)
            self._stop.wait(0.0005)

    def end(self) -> int:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._file.close()
        return self.written


def kill_and_go_on(mount: AcpfsMount, keeper: KeeperProcess, launcher: Launcher) -> None:
    """SIGKILL of all processes of the mount, and the next `acpfs mount`."""
    mount.kill_processes()
    hanging = mount.living()  # the one that holds writers, say: in a call that is answered later
    until(lambda: keeper.phase() == "alone")
    assert launcher.mount(mount) == 0, mount.log.read_text()[-2000:]
    for pid in hanging:
        wait_gone(pid)
    mount.note_worker()


@pytest.mark.clause("S370")
@pytest.mark.transports("native-passthrough")
def test_all_processes_are_killed_and_open_files_go_on(
    mount: AcpfsMount, keeper: KeeperProcess, launcher: Launcher
) -> None:
    go_on_after_kills(mount, keeper, launcher, 2)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.clause("S370")
@pytest.mark.transports("native-direct", "native-passthrough")
def test_all_processes_are_killed_again_and_again(
    mount: AcpfsMount, keeper: KeeperProcess, launcher: Launcher
) -> None:
    go_on_after_kills(mount, keeper, launcher, TURNS)


def go_on_after_kills(
    mount: AcpfsMount, keeper: KeeperProcess, launcher: Launcher, turns: int
) -> None:
    """A writer that never stops, a half-written file, one without a name, a mapping, locks: all go
    on, with the right bytes.
    """
    (mount.path / "mapped").write_bytes(bytes(1 << 20))
    with (
        open(mount.path / "gone", "w+b", buffering=0) as gone,
        open(mount.path / "mapped", "r+b") as mapped,
    ):
        gone.write(b"nameless")
        os.unlink(mount.path / "gone")
        memory = mmap.mmap(mapped.fileno(), 1 << 20)
        locks = Locks(mount.path / "locked")
        writer = Writer(mount.path / "log")
        for turn in range(turns):
            with open(mount.path / f"half-{turn}", "wb", buffering=0) as half:
                half.write(b"one ")
                before = writer.written
                inode = os.fstat(half.fileno()).st_ino
                memory[turn * 4096 : turn * 4096 + 4] = b"here"
                kill_and_go_on(mount, keeper, launcher)
                assert half.write(b"two") == 3
                assert os.fstat(half.fileno()).st_ino == inode
            assert memory[turn * 4096 : turn * 4096 + 4] == b"here"
            until(lambda: writer.written > before)  # noqa: B023 - asked before the next turn
            locks.hold()
            status = mount.status()
            assert status["worker"]["keeper"]
            assert "keeper held" in status["worker"]["last_end"]
            assert (mount.path / f"half-{turn}").read_bytes() == b"one two"
            print(f"without a daemon {status['worker']['pause_s']:.3f} s")
        written = writer.end()
        locks.end()
        assert os.pread(gone.fileno(), 100, 0) == b"nameless"
        memory.flush()
        memory.close()
    mount.flush()
    assert (mount.backing / "log").stat().st_size == written
    assert set((mount.backing / "log").read_bytes()) == {ord("p")}
    assert all((mount.backing / f"half-{turn}").read_bytes() == b"one two" for turn in range(turns))
    assert (mount.backing / "mapped").read_bytes()[: turns * 4096] == (
        b"here" + bytes(4092)
    ) * turns
    assert mount.ask("doctor") == {"items": []}
    mount.umount()
    assert keeper.held() == []
    assert mount.leaks() == []


@pytest.mark.long
@pytest.mark.clause("S371")
@pytest.mark.transports("native-passthrough")
def test_a_keeper_that_dies_costs_nothing_and_the_next_is_told_all(
    mount: AcpfsMount, keeper: KeeperProcess, launcher: Launcher
) -> None:
    writer = Writer(mount.path / "log")
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        keeper.end()
        mount.wait_status(lambda status: not status["worker"]["keeper"])
        mount.kill_worker()  # while there is none
        file.write(b"two ")
        keeper.restart()
        mount.wait_status(lambda status: status["worker"]["keeper"])
        supervisor = mount.supervisor
        os.kill(supervisor, signal.SIGKILL)  # the worker's next one tells it too
        until(lambda: mount.supervisor != supervisor)
        mount.wait_status(lambda status: status["worker"]["keeper"])
        kill_and_go_on(mount, keeper, launcher)
        file.write(b"three")
    written = writer.end()
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"one two three"
    assert (mount.backing / "log").stat().st_size == written


@pytest.mark.clause("S371")
@pytest.mark.transports("native")
def test_without_a_keeper_the_mount_begins_anew_and_says_so(
    mount: AcpfsMount, keeper: KeeperProcess
) -> None:
    (mount.path / "f").write_bytes(b"saved")
    keeper.end()
    mount.wait_status(lambda status: not status["worker"]["keeper"])
    mount.kill_processes()
    words = [str(mount.backing), str(mount.path), "--transport", "native", "--ram", "512M"]
    done = mount.run("acpfs", "mount", *words)
    assert "no keeper held it" in done.stderr
    assert (mount.path / "f").read_bytes() == b"saved"


@pytest.mark.long
@pytest.mark.clause("S372")
@pytest.mark.transports("native")
def test_two_that_come_at_once_are_told_apart(mount: AcpfsMount, keeper: KeeperProcess) -> None:
    other = [Launcher(), Launcher()]
    try:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            mount.kill_processes()
            until(lambda: keeper.phase() == "alone")
            codes: list[int] = []
            both = [
                threading.Thread(target=lambda one=one: codes.append(one.mount(mount)))
                for one in other
            ]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join(120)
            assert sorted(codes) == [ExitCode.OK, ExitCode.REFUSED]
            file.write(b"two")
    finally:
        for one in other:
            one.end()
    mount.note_worker()
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.long
@pytest.mark.clause("S373")
@pytest.mark.transports("native")
@pytest.mark.parametrize("on_failure", ["native", "stop"])
def test_nobody_comes_in_time(
    tmp_path: Path,
    transport: str,
    keeper: KeeperProcess,
    on_failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "backing").mkdir()
    mount = AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        transport,
        watchdog_s=WATCHDOG_S,
        on_failure=on_failure,
        keeper_wait=10,
    )
    with mount:
        mount.wait_status(lambda status: status["worker"]["keeper"])
        (mount.path / "saved").write_bytes(b"x")
        mount.flush()
        file = os.open(mount.path / "f", os.O_RDWR | os.O_CREAT)
        mount.kill_processes()
        until(lambda: keeper.phase() == "alone")
        monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(mount.runtime_dir))
        shown = CliRunner().invoke(
            ctl, [str(mount.path), "status", "--json"]
        )  # in this process: to fork would wait for a daemon
        assert json.loads(shown.output).get("state") == "held", shown.output
        with pytest.raises(OSError) as caught:  # it waits, and then it is told
            os.write(file, b"y")
        assert caught.value.errno in (errno.ECONNABORTED, errno.ENOTCONN)
        with contextlib.suppress(OSError):
            os.close(file)
        until(lambda: keeper.held() == [])
        if on_failure == "native":
            assert (mount.path / "saved").read_bytes() == b"x"
            assert kinds_at(mount.path)[-1] != "fuse.acpfs"
        else:
            with pytest.raises(OSError) as caught:
                os.stat(mount.path / "saved")
            assert caught.value.errno == errno.ENOTCONN
            mount.detach()
        mount.start()
        assert (mount.path / "saved").read_bytes() == b"x"
        mount.ctl("discard", str(mount.path / "f"))  # it lost its writer


@pytest.mark.long
@pytest.mark.clause("S370")
@pytest.mark.transports("native")
def test_what_is_unmounted_meanwhile_is_held_no_more(
    mount: AcpfsMount, keeper: KeeperProcess, launcher: Launcher
) -> None:
    mount.kill_processes()
    until(lambda: keeper.phase() == "alone")
    mount.detach()
    until(lambda: keeper.held() == [])  # what the kernel has ended is not held
    assert launcher.mount(mount) == 0
    mount.note_worker()
    (mount.path / "f").write_bytes(b"x")


@pytest.mark.clause("S370")
@pytest.mark.transports("native")
def test_a_process_that_is_killed_in_a_call_keeps_nobody_from_mounting(
    mount: AcpfsMount, keeper: KeeperProcess, launcher: Launcher
) -> None:
    program = "import os, sys\nprint(flush=True)\nwhile True: os.statvfs(sys.argv[1])"
    environment = {**os.environ, "ACPFS_RUNTIME_DIR": str(mount.runtime_dir)}
    callers = [
        subprocess.Popen(
            [sys.executable, "-c", program, mount.path], stdout=subprocess.PIPE, env=environment
        )
        for _ in range(4)
    ]
    for caller in callers:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"\n"
    kill_and_go_on(mount, keeper, launcher)
    for caller in callers:
        with caller:
            assert caller.wait(60) == -signal.SIGKILL
    (mount.path / "f").write_bytes(b"saved")
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"saved"
