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

from tests.rig.mounts import AcpfsMount, wait_gone

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.clause("S81"),
    pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"),
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
            if process.name.isdigit() and f"\nPPid:\t{supervisor}\n" in (process / "status").read_text():
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
            wait_until(lambda: descriptors(supervisor) < before and is_asleep(supervisor))  # it knows, and could do nothing
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
