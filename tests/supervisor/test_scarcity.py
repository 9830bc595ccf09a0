"""A supervisor that may open nothing more for a while: what it could not do then it does later, and the mount lives on."""

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
            if (
                process.name.isdigit()
                and f"\nPPid:\t{supervisor}\n" in (process / "status").read_text()
            ):
                return int(process.name)  # workers are the template's
    return 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_worker_that_cannot_be_started_yet_is_started_later(mount: AcpfsMount) -> None:
    supervisor, worker = mount.supervisor, mount.pid
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
    supervisor, template = mount.supervisor, template_of(mount.supervisor)
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


@pytest.mark.clause("S21", "S22")
def test_who_is_to_end_and_can_start_no_worker_ends_and_says_what_it_leaves(
    tmp_path: Path, transport: str
) -> None:
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport)
    with in_foreground(mount, *STALLED, "--drain-timeout", "2") as daemon:
        (mount.path / "f").write_bytes(DATA)
        before, (_soft, hard) = (
            descriptors(daemon.pid),
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE),
        )
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
            f"acpfs: {mount.path}: no worker could be started that drains: Too many open files; what is not persisted"
            in last
        )
        assert (
            "stays in the RAM tier /" in last
        )  # it has one descriptor now, and SQLite needs two to know how much
        assert f"`acpfs mount {mount.backing} {mount.path}` drains it" in last
        check_kept(mount)
