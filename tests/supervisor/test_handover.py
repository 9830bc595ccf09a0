"""One supervisor gives its mount to another, of another installation: open files go on, and the old
one goes on where the new one fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acpfs.control import registry
from acpfs.errors import ExitCode
from acpfs.supervisor.handover import door_of, knock
from acpfs.supervisor.mount_state import RECORD_VERSION
from tests.rig.mounts import REPOSITORY, AcpfsMount, CommandError, wait_gone
from tests.rig.namespaces import namespace

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
WATCHDOG_S = 600.0
TURNS = int(os.environ.get("ACPFS_TAKE_OVERS", "3"))
OTHER_VERSION = "0.0.1.other"
PIECE = b"p" * 4096


def copy_package(root: Path) -> None:
    """With its bytecode, which else each process would have to make; but what others are just
    writing of that comes and goes.
    """
    shutil.copytree(REPOSITORY / "acpfs", root / "acpfs", ignore=shutil.ignore_patterns("*.pyc.*"))


@pytest.fixture(scope="module")
def other_installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package once more, in another directory and with another version."""
    root = tmp_path_factory.mktemp("other")
    copy_package(root)
    (root / "acpfs/__init__.py").write_text(
        f'"""Another version."""\n\n__version__ = "{OTHER_VERSION}"\n'
    )
    return root


@pytest.fixture
def mount(tmp_path: Path, transport: str, other_installation: Path) -> Iterator[AcpfsMount]:
    """Made by the other version."""
    (tmp_path / "backing").mkdir()
    environment = {"PYTHONPATH": str(other_installation)}
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        transport,
        watchdog_s=WATCHDOG_S,
        environment=environment,
    ) as made:
        yield made


def take_over(
    mount: AcpfsMount, installation: Path = REPOSITORY, *words: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`acpfs mount --take-over` of that installation."""
    mount._environment["PYTHONPATH"] = str(installation)
    done = mount.run(
        "acpfs",
        "mount",
        str(mount.backing),
        str(mount.path),
        "--take-over",
        *words,
        timeout_s=60,
        check=check,
    )
    if done.returncode == 0:
        mount.note_worker()
    return done


def until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody announces."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


Foreground = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def foreground(mount: AcpfsMount) -> Iterator[Foreground]:
    """Makes daemons in the foreground that take the mount over, with more words if need be; ends
    those that are left.
    """
    program = "import sys; from acpfs.cli.main import main; sys.argv[0] = 'acpfs'; sys.exit(main())"
    words = [
        "mount",
        str(mount.backing),
        str(mount.path),
        "--take-over",
        "--foreground",
        "--transport",
        "native",
        "--ram",
        "512M",
    ]
    mount._environment["PYTHONPATH"] = str(REPOSITORY)
    with contextlib.ExitStack() as made:

        def end(process: subprocess.Popen[bytes]) -> None:
            process.kill()
            process.wait(60)

        def start(
            *more: str, installation: Path = REPOSITORY, environment: dict[str, str] | None = None
        ) -> subprocess.Popen[bytes]:
            variables = {
                "ACPFS_RUNTIME_DIR": str(mount.runtime_dir),
                "PYTHONPATH": str(installation),
            }
            variables = {**os.environ, **variables, **(environment or {})}
            with open(mount.log, "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-c", program, *words, *more],
                    env=variables,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            made.callback(end, process)
            return process

        yield start


def record_of(mount: AcpfsMount) -> registry.MountRecord:
    return registry.find(
        registry.normalised(str(mount.path)), registry.records([mount.runtime_dir])
    )


@pytest.mark.clause("S300")
@pytest.mark.transports("native-passthrough")
def test_open_files_go_on_with_the_other_version(mount: AcpfsMount) -> None:
    go_on_with(mount, [REPOSITORY])


@pytest.mark.clause("S301", "S526")
@pytest.mark.transports("native")
def test_what_a_newer_supervisor_says_is_refused_and_that_one_goes_on(
    tmp_path: Path, transport: str
) -> None:
    copy_package(tmp_path / "newer")
    module = tmp_path / "newer/acpfs/supervisor/mount_state.py"
    text = module.read_text()
    ours = f"RECORD_VERSION = {RECORD_VERSION}"
    module.write_text(text.replace(ours, f"RECORD_VERSION = {RECORD_VERSION + 1}"))
    assert module.read_text() != text
    (tmp_path / "backing").mkdir()
    newer = {"PYTHONPATH": str(tmp_path / "newer")}
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S, environment=newer
    ) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            supervisor = mount.supervisor
            refused = take_over(mount, check=False)
            assert refused.returncode == ExitCode.REFUSED
            known = f"version {RECORD_VERSION + 1}, this acpfs knows {RECORD_VERSION}"
            assert known in refused.stderr
            assert "Traceback" not in refused.stderr
            assert mount.supervisor == supervisor
            file.write(b"two")
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.long
@pytest.mark.clause("S300")
@pytest.mark.transports("native-direct", "native-passthrough")
def test_open_files_go_on_there_and_back(mount: AcpfsMount, other_installation: Path) -> None:
    go_on_with(mount, [REPOSITORY, other_installation] * TURNS)


def go_on_with(mount: AcpfsMount, installations: list[Path]) -> None:
    """A writer never stops, and what it has written is there."""
    stop = threading.Event()
    written = [0]
    with (
        open(mount.path / "log", "wb", buffering=0) as file,
        open(mount.path / "gone", "w+b", buffering=0) as gone,
    ):
        gone.write(b"nameless")
        os.unlink(mount.path / "gone")

        def write() -> None:
            while not stop.is_set():
                written[0] += file.write(PIECE)
                stop.wait(0.001)

        writer = threading.Thread(target=write, name="writer", daemon=True)
        writer.start()
        try:
            for installation in installations:
                supervisor = mount.supervisor
                worker = mount.pid
                before = written[0]
                take_over(mount, installation)
                # asked before the next turn
                until(lambda: mount.supervisor != supervisor)  # noqa: B023
                wait_gone(supervisor)
                wait_gone(worker)
                status = mount.status()
                assert status["worker"]["last_end"] == "taken over by another supervisor"
                assert (record_of(mount).version == OTHER_VERSION) == (installation != REPOSITORY)
                until(lambda: written[0] > before)  # noqa: B023 - the same
                print(f"pause {status['worker']['pause_s']:.3f} s")
        finally:
            stop.set()
            writer.join(60)
        assert not writer.is_alive()
        assert os.pread(gone.fileno(), 100, 0) == b"nameless"
    mount.flush()
    assert (mount.backing / "log").stat().st_size == written[0]
    assert set((mount.backing / "log").read_bytes()) == {ord("p")}
    assert mount.ask("doctor") == {"items": []}
    mount.umount()
    assert mount.leaks() == []
    assert list((mount.runtime_dir / "sockets").iterdir()) == []


@pytest.mark.long
@pytest.mark.clause("S300")
@pytest.mark.transports("native")
def test_it_can_be_asked_again_at_any_time(mount: AcpfsMount) -> None:
    """The socket of the one that serves is always there, whoever ends when."""
    for _ in range(4):
        supervisor = mount.supervisor
        take_over(mount)
        wait_gone(supervisor)
        end = knock(door_of({"runtime_dir": str(mount.runtime_dir), "mountpoint": str(mount.path)}))
        assert end is not None
        end.close()


@pytest.mark.long
@pytest.mark.clause("S300")
@pytest.mark.transports("native")
def test_without_a_mount_it_mounts(tmp_path: Path, transport: str) -> None:
    (tmp_path / "backing").mkdir()
    mount = AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S, take_over=True
    )
    with mount:
        (mount.path / "f").write_bytes(b"x")
        mount.kill()
        mount.start()
        assert (mount.path / "f").read_bytes() == b"x"


STEP = 'self.link.step("restoring what is known of files")'
FAILS = "raise ZeroDivisionError"
BROKEN = {
    "cannot be loaded": ("worker/daemon.py", "GC_THRESHOLDS = ", FAILS),
    "cannot take the state": ("worker/worker.py", STEP, FAILS),
    "is killed": (
        "worker/worker.py",
        STEP,
        "os.kill(self.link.supervisor_pid, 9); os.kill(os.getpid(), 9)",
    ),
}
"""What becomes of the other version → (module, the line before which, what is done)."""


def spoilt(root: Path, module: str, line: str, done: str) -> Path:
    """This installation with something wrong."""
    copy_package(root)
    place = root / "acpfs" / module
    text = place.read_text()
    assert text.count(line) == 1
    place.write_text(text.replace(line, f"{done}; {line}"))
    return root


@pytest.mark.clause("S300", "S301")
@pytest.mark.transports("native")
@pytest.mark.parametrize(
    "how",
    [
        how if how == "cannot take the state" else pytest.param(how, marks=pytest.mark.long)
        for how in BROKEN
    ],
)
def test_a_version_that_does_not_come_to_serve_leaves_the_mount_to_the_old_one(
    mount: AcpfsMount, tmp_path: Path, how: str
) -> None:
    supervisor = mount.supervisor
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        with pytest.raises(CommandError) as caught:
            take_over(mount, spoilt(tmp_path / "spoilt", *BROKEN[how]))
        assert "Traceback" not in caught.value.stderr
        file.write(b"two ")
        assert mount.supervisor == supervisor
        file.write(b"three")
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"one two three"
    assert record_of(mount).version == OTHER_VERSION
    take_over(
        mount, REPOSITORY, "--streams", "3", "--drain-timeout", "77", "--fsync", "durable"
    )  # it can be asked again
    settings = mount.ask("config")
    assert (settings["streams"], settings["drain_timeout_s"], settings["fsync"]) == (
        3,
        77.0,
        "ordered",
    )
    wait_gone(supervisor)
    assert (mount.path / "f").read_bytes() == b"one two three"


@pytest.mark.long
@pytest.mark.clause("S301", "S82")
@pytest.mark.transports("native")
def test_a_supervisor_that_dies_before_its_worker_serves_is_replaced_by_that(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    module, line, _done = BROKEN["is killed"]
    supervisor = mount.supervisor
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        with pytest.raises(CommandError):
            take_over(
                mount,
                spoilt(tmp_path / "spoilt", module, line, "os.kill(self.link.supervisor_pid, 9)"),
            )
        wait_gone(supervisor)
        file.write(b"two")
    mount.wait_status(lambda status: status["worker"]["number"] == 2)
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"one two"
    assert record_of(mount).version != OTHER_VERSION


@pytest.mark.long
@pytest.mark.clause("S301")
@pytest.mark.transports("native")
def test_a_mount_of_another_backing_directory_is_not_given(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    mount._environment["PYTHONPATH"] = str(REPOSITORY)
    words = ["mount", str(tmp_path / "other"), str(mount.path), "--take-over"]
    done = mount.run("acpfs", *words, check=False)
    assert (done.returncode, "another backing directory" in done.stderr) == (ExitCode.REFUSED, True)
    (mount.path / "f").write_bytes(b"x")


@pytest.mark.long
@pytest.mark.clause("S301")
@pytest.mark.transports("libfuse")
def test_a_libfuse_mount_is_not_given(mount: AcpfsMount) -> None:
    done = take_over(mount, check=False)
    assert (done.returncode, "libfuse" in done.stderr) == (ExitCode.REFUSED, True)
    (mount.path / "f").write_bytes(b"x")


@pytest.mark.long
@pytest.mark.clause("S302")
@pytest.mark.transports("native")
def test_in_the_foreground_the_old_one_waits_to_be_ended(
    mount: AcpfsMount, foreground: Foreground
) -> None:
    """Who runs a container would start it again, and that would take the mount back.

    Its end is not the mount's.
    """
    old = foreground()
    until(lambda: mount.supervisor == old.pid)
    new = foreground()
    until(lambda: mount.supervisor == new.pid)
    assert old.poll() is None
    assert run_ready(mount, "--here") == ExitCode.OK
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        old.send_signal(signal.SIGTERM)
        assert old.wait(60) == 0
        file.write(b"two")
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"one two"
    new.send_signal(signal.SIGTERM)
    assert new.wait(60) == 0
    assert mount.leaks() == []


SERVED = "handover.tell_serving(self._kept.pop(PREDECESSOR))"
ENDS_THE_OLD_ONE = """import select
            old = os.pidfd_open(int(os.environ["ACPFS_TEST_OLD"]))
            os.kill(int(os.environ["ACPFS_TEST_OLD"]), 15)
            ends = select.poll()
            ends.register(old, select.POLLIN)
            ends.poll(2000)"""


@pytest.mark.clause("S302", "S380")
@pytest.mark.transports("native")
def test_an_old_one_that_is_ended_before_it_knows_that_the_new_one_serves_takes_nothing_along(
    mount: AcpfsMount, foreground: Foreground, tmp_path: Path
) -> None:
    """A probe may see the new one serve, and have the old one ended, before the old one is told."""
    old = foreground()
    until(lambda: mount.supervisor == old.pid)
    spoilt(
        tmp_path / "ends",
        "supervisor/supervisor.py",
        SERVED,
        f"{ENDS_THE_OLD_ONE}\n            pass",
    )
    new = foreground(installation=tmp_path / "ends", environment={"ACPFS_TEST_OLD": str(old.pid)})
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        assert old.wait(WATCHDOG_S) == 0
        until(lambda: mount.supervisor == new.pid)
        file.write(b"two")
    take_over(mount)  # the new one can be asked
    assert new.poll() is None
    mount.flush()
    assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.long
@pytest.mark.clause("S301", "S380")
@pytest.mark.transports("native")
def test_an_old_one_that_is_ended_while_the_new_one_fails_drains_and_unmounts(
    mount: AcpfsMount, foreground: Foreground, tmp_path: Path
) -> None:
    old = foreground()
    until(lambda: mount.supervisor == old.pid)
    module, line, fails = BROKEN["cannot take the state"]
    spoilt(
        tmp_path / "fails", module, line, 'os.kill(int(os.environ["ACPFS_TEST_OLD"]), 15); ' + fails
    )
    (mount.path / "f").write_bytes(b"one")
    new = foreground(installation=tmp_path / "fails", environment={"ACPFS_TEST_OLD": str(old.pid)})
    assert new.wait(WATCHDOG_S) == 1
    assert old.wait(WATCHDOG_S) == 0
    assert (mount.backing / "f").read_bytes() == b"one"
    assert mount.leaks() == []


def rests(mount: AcpfsMount) -> int:
    """How often a supervisor has begun to wait for its end."""
    return mount.log.read_text().count("this one only waits to be ended")


@pytest.mark.long
@pytest.mark.clause("S374")
@pytest.mark.transports("native")
def test_an_instance_that_is_started_again_does_not_take_the_mount_back(
    mount: AcpfsMount, foreground: Foreground
) -> None:
    """The old container crashes during a roll-out; when the new one is withdrawn, the old one
    mounts again.
    """
    old = foreground("--instance", "old")
    until(lambda: mount.supervisor == old.pid)
    new = foreground("--instance", "new")
    until(lambda: mount.supervisor == new.pid and rests(mount) == 1)
    old.kill()
    old.wait(60)
    again = foreground("--instance", "old")
    until(lambda: rests(mount) == 2)
    assert (mount.supervisor, again.poll()) == (new.pid, None)
    third = foreground("--instance", "third")
    until(lambda: mount.supervisor == third.pid)
    again.send_signal(signal.SIGTERM)
    assert again.wait(60) == 0
    assert (mount.path).is_dir()
    third.send_signal(signal.SIGTERM)
    assert third.wait(60) == 0
    assert new.wait(60) == 1  # nobody has the mount: it is to be started again


@pytest.mark.long
@pytest.mark.clause("S375")
@pytest.mark.transports("native")
@pytest.mark.parametrize("stopped", ["all", "worker"])
def test_who_is_stopped_before_it_serves_does_not_hold_the_mount_for_ever(
    tmp_path: Path, transport: str, stopped: str
) -> None:
    (tmp_path / "backing").mkdir()
    environment = {"ACPFS_HANG_TIMEOUT_S": "15", "ACPFS_START_TIMEOUT_S": "15"}
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        transport,
        watchdog_s=WATCHDOG_S,
        environment=environment,
    ) as mount:
        supervisor = mount.supervisor
        module, line, _done = BROKEN["is killed"]
        also = "os.kill(self.link.supervisor_pid, 19); " if stopped == "all" else ""
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            with pytest.raises(CommandError):
                take_over(
                    mount,
                    spoilt(tmp_path / "spoilt", module, line, f"{also}os.kill(os.getpid(), 19)"),
                )
            file.write(b"two")
        mount.wait_status(lambda status: status["worker"]["number"] == 2)
        assert mount.supervisor == supervisor
        mount.flush()
        assert (mount.backing / "f").read_bytes() == b"one two"


def run_ready(mount: AcpfsMount, *words: str) -> int:
    return mount.run("acpfs-ctl", str(mount.path), "ready", *words, check=False).returncode


@pytest.mark.clause("S302")
@pytest.mark.transports("native")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_probe_tells_whose_container_serves(mount: AcpfsMount) -> None:
    assert run_ready(mount, "--here") == ExitCode.OK
    program = (
        "import sys; from acpfs.cli.ctl import main; sys.argv[0] = 'acpfs-ctl'; sys.exit(main())"
    )
    command = namespace(sys.executable, "-c", program, str(mount.path), "ready", kept=mount.path)
    environment = {
        **os.environ,
        "ACPFS_RUNTIME_DIR": str(mount.runtime_dir),
        "PYTHONPATH": str(REPOSITORY),
    }
    done = [
        subprocess.run(
            [*command, *words], env=environment, check=False, timeout=60, capture_output=True
        )
        for words in ([], ["--here"])
    ]
    assert [one.returncode for one in done] == [ExitCode.OK, ExitCode.FAILED]
