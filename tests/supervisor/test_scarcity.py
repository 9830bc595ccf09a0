"""A supervisor that may open nothing more for a while: what it could not do then it does later, and
the mount lives on.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acpfs.errors import ExitCode
from tests.rig.mounts import AcpfsMount, wait_gone
from tests.supervisor.test_session_end import in_foreground
from tests.supervisor.test_told_to_end import DATA, STALLED, check_kept

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.clause("S81"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
WAIT_S = 120.0


@pytest.fixture
def mount(tmp_path: Path, transport: str) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport) as made:
        yield made


@contextlib.contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """The process may open nothing more."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def template_of(supervisor: int) -> int:
    """0: it has none."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and f"\nPPid:\t{supervisor}\n" in (
                process / "status"
            ).read_text(errors="replace"):
                return int(process.name)  # workers are the template's
    return 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_worker_that_cannot_be_started_yet_is_started_later(mount: AcpfsMount) -> None:
    supervisor = mount.supervisor
    worker = mount.pid
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        before = descriptors(supervisor)
        with no_descriptors(supervisor):
            os.kill(worker, signal.SIGKILL)
            wait_until(
                lambda: descriptors(supervisor) < before and is_asleep(supervisor)
            )  # it knows, and could do nothing
        file.write(b"two")
    assert mount.supervisor == supervisor
    mount.umount()
    assert (mount.backing / "f").read_bytes() == b"one two"


def test_a_template_that_cannot_be_started_yet_is_started_later(mount: AcpfsMount) -> None:
    """Without one, no worker ever follows the one that dies next."""
    supervisor = mount.supervisor
    template = template_of(mount.supervisor)
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        before = descriptors(supervisor)
        with no_descriptors(supervisor):
            os.kill(template, signal.SIGKILL)
            wait_until(lambda: descriptors(supervisor) < before and is_asleep(supervisor))
        wait_until(lambda: template_of(supervisor) not in (0, template))
        wait_gone(mount.kill_worker())
        file.write(b"two")
    mount.umount()
    assert (mount.backing / "f").read_bytes() == b"one two"


@pytest.mark.clause("S488")
def test_a_template_of_a_time_with_few_descriptors_does_not_keep_that_limit(
    mount: AcpfsMount,
) -> None:
    """It takes what workers get: what comes beyond the limit is closed on its way."""
    supervisor = mount.supervisor
    template = template_of(mount.supervisor)
    limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    few = descriptors(supervisor) + 64
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (few, limits[1]))
    os.kill(template, signal.SIGKILL)
    wait_until(lambda: template_of(supervisor) not in (0, template))
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
    following = template_of(supervisor)
    wait_until(lambda: resource.prlimit(following, resource.RLIMIT_NOFILE)[0] == limits[1])
    wait_gone(mount.kill_worker())
    assert resource.prlimit(mount.pid, resource.RLIMIT_NOFILE)[0] == limits[1]


@pytest.mark.clause("S21", "S22")
def test_who_is_to_end_and_can_start_no_worker_ends_and_says_what_it_leaves(
    tmp_path: Path, transport: str
) -> None:
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport)
    with in_foreground(mount, *STALLED, "--drain-timeout", "2") as daemon:
        (mount.path / "f").write_bytes(DATA)
        before = descriptors(daemon.pid)
        (_soft, hard) = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (1, hard))
        mount.kill_worker()
        wait_until(lambda: descriptors(daemon.pid) < before and is_asleep(daemon.pid))
        used = {int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd")}
        resource.prlimit(
            daemon.pid, resource.RLIMIT_NOFILE, (min({*range(1 << 10)} - used), hard)
        )  # what it closes it can use
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(WAIT_S) == ExitCode.TIMEOUT
        last = mount.log.read_text().splitlines()[-1]
        assert (
            f"acpfs: {mount.path}: no worker could be started that drains: Too many open files; "
            "what is not persisted" in last
        )
        assert (
            "stays in the RAM tier /" in last
        )  # it has one descriptor now, and SQLite needs two to know how much
        assert f"`acpfs mount {mount.backing} {mount.path}` drains it" in last
        check_kept(mount)


PIDS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
"""Where control groups limit processes: version 1, version 2."""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that limits processes and threads; those in it have to leave before its
    end.
    """
    for parent in PIDS:
        made = parent / f"acpfs-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            made.mkdir()
            if (made / "pids.max").exists():
                break
            made.rmdir()
    else:
        pytest.skip("no control group limits processes here")
    yield made
    (made / "pids.max").write_text("max")

    def is_away() -> bool:
        """Who ends just now is in it for a moment yet."""
        for pid in (made / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (made.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            made.rmdir()
        return not made.exists()

    wait_until(is_away)


def enter(group: Path, mount: AcpfsMount) -> None:
    """With all its processes, and those that they start from now on."""
    for pid in mount.living():
        (group / "cgroup.procs").write_text(str(pid))


def leave_room(group: Path, count: int) -> None:
    """For so many more processes and threads."""
    now = int((group / "pids.current").read_text())
    (group / "pids.max").write_text(str(now + count))


@pytest.mark.transports("native", "libfuse")
@pytest.mark.clause("S440")
def test_a_machine_without_a_thread_left_is_a_pause(
    tmp_path: Path, transport: str, group: Path
) -> None:
    """What is read for the first time comes through several threads: the first that there was not
    ended eight workers in a row.
    """
    (tmp_path / "backing").mkdir()
    names = [f"cold{number}" for number in range(16)]
    for name in names:
        (tmp_path / "backing" / name).write_bytes(os.urandom(8 << 20))
    log = tmp_path / "log"
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, log_file=log) as mount:
        worker = mount.pid
        enter(group, mount)
        leave_room(group, 0)
        for name in names:
            assert (mount.path / name).read_bytes() == (mount.backing / name).read_bytes()
            (mount.path / f"saved {name}").write_bytes(b"x" * 100_000)
        wait_until(lambda: "no thread left: what needs one waits" in log.read_text())
        (group / "pids.max").write_text("max")
        wait_until(lambda: "the machine has threads again" in log.read_text())
        mount.flush()
        assert mount.pid == worker
        assert "bug in a file system call" not in log.read_text()
        assert all((mount.backing / f"saved {name}").stat().st_size == 100_000 for name in names)


@pytest.mark.clause("S440", "S441")
def test_no_process_and_then_no_thread_for_the_next_worker_is_a_pause(
    tmp_path: Path, transport: str, group: Path
) -> None:
    """Neither is a death that counts: beside that of the first worker, one that did would be the
    end of the mount.
    """
    (tmp_path / "backing").mkdir()
    log = tmp_path / "log"
    two_deaths = {"ACPFS_EARLY_DEATHS_MAX": "2"}
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, environment=two_deaths, log_file=log
    ) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            enter(group, mount)
            (group / "pids.max").write_text("1")
            os.kill(mount.pid, signal.SIGKILL)
            wait_until(lambda: "the machine had no processes left" in log.read_text())
            leave_room(group, 2)  # the worker, and the thread that tries again for the others
            wait_until(lambda: "no thread left: what needs one waits" in log.read_text())
            (group / "pids.max").write_text("max")
            file.write(b"two")
        status = mount.status()
        assert status["worker"]["last_end"] == "the machine had no processes left"
        mount.umount()
        assert (mount.backing / "f").read_bytes() == b"one two"
