"""A worker killed while a call on the backing directory hangs: the process never ends, and the next worker serves all the same."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from acpfs.supervisor import remains
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"),
]
Make = Callable[..., AcpfsMount]
STILL_THERE_S = 1.0


def has_ended(pidfd: int, timeout_s: float = 0) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


@pytest.mark.clause("S81", "S83")
@pytest.mark.parametrize("op", ["write", "rename", "fsync", "lookup"])
@pytest.mark.transports("native-direct", "native-passthrough")
def test_a_killed_worker_that_cannot_end_is_replaced(transport: str, make_mount: Make, fault_fs: FaultFs, op: str) -> None:
    (fault_fs.source / "there").write_bytes(b"there")
    mount = make_mount(fault_fs.path, transport)
    (mount.path / "before").write_bytes(b"before")
    mount.flush()
    fault_fs.freeze([op], **({"glob": "other"} if op == "lookup" else {}))
    (mount.path / "f").write_bytes(os.urandom(100_000))
    os.replace(mount.path / "before", mount.path / "after")
    if op == "lookup":
        with subprocess.Popen([sys.executable, "-c", "import os, sys; os.path.exists(sys.argv[1])", str(mount.path / "other")]) as asker:
            fault_fs.wait_frozen()
            asker.kill()
    fault_fs.wait_frozen()
    pidfd = os.pidfd_open(mount.pid)
    try:
        mount.kill_worker()
        started = time.monotonic()
        with open(mount.path / "f", "ab") as file:
            file.write(b"more")
        assert (mount.path / "f").read_bytes()[-4:] == b"more"
        assert time.monotonic() - started < 5
        status = mount.wait_status(lambda status: status["worker"]["number"] == 2)
        assert not has_ended(pidfd, STILL_THERE_S), "nothing was stuck: the test proves nothing"
        assert status["queue_length"] >= 1
        fault_fs.thaw()
        assert has_ended(pidfd, 20)
    finally:
        os.close(pidfd)
    mount.flush()
    assert {p.name for p in fault_fs.source.iterdir() if p.is_file()} >= {"f", "after", "there"}
    shown = {p.name: p.read_bytes() for p in mount.path.iterdir()}
    assert {name: (fault_fs.source / name).read_bytes() for name in shown} == shown
    mount.umount()
    assert mount.leaks() == []


def test_a_living_process_is_not_stuck() -> None:
    program = "print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end = remains.main_thread_end(process.pid)
        assert not remains.is_stuck(process.pid)
        process.kill()
        if end >= 0:
            assert has_ended(end, 10)
            os.close(end)
