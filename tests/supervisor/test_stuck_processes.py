"""A worker killed while a call on the backing directory hangs: the process never ends, and the next
worker serves all the same.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import urllib.request

import pytest

from acpfs.descriptors import readable
from acpfs.supervisor import stuck_processes
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import CommandError, MakeMount
from tests.rig.ports import free_port

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
STILL_THERE_S = 1.0


def has_ended(pidfd: int, timeout_s: float = 0) -> bool:
    return readable(pidfd, timeout_s)


@pytest.mark.clause("S81", "S83")
@pytest.mark.parametrize("op", ["write", "rename", "fsync", "lookup"])
@pytest.mark.transports("native-direct", "native-passthrough")
def test_a_killed_worker_that_cannot_end_is_replaced(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, op: str
) -> None:
    (fault_fs.source / "there").write_bytes(b"there")
    mount = make_mount(fault_fs.path, transport)
    (mount.path / "before").write_bytes(b"before")
    mount.flush()
    fault_fs.freeze([op], **({"glob": "other"} if op == "lookup" else {}))
    (mount.path / "f").write_bytes(os.urandom(100_000))
    os.replace(mount.path / "before", mount.path / "after")
    if op == "lookup":
        with subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os, sys; os.path.exists(sys.argv[1])",
                str(mount.path / "other"),
            ]
        ) as asker:
            fault_fs.wait_frozen()
            asker.kill()
    fault_fs.wait_frozen()
    pidfd = os.pidfd_open(mount.pid)
    try:
        mount.kill_worker()
        with open(mount.path / "f", "ab") as file:
            file.write(b"more")
        assert (mount.path / "f").read_bytes()[-4:] == b"more"
        status = mount.wait_status(lambda status: status["worker"]["number"] == 2)
        assert not has_ended(pidfd, STILL_THERE_S), "nothing was stuck: the test proves nothing"
        assert status["queue_length"] >= 1
        fault_fs.thaw()
        assert has_ended(pidfd, 60)
    finally:
        os.close(pidfd)
    mount.flush()
    assert {p.name for p in fault_fs.source.iterdir() if p.is_file()} >= {"f", "after", "there"}
    shown = {p.name: p.read_bytes() for p in mount.path.iterdir()}
    assert {name: (fault_fs.source / name).read_bytes() for name in shown} == shown
    mount.umount()
    assert mount.leaks() == []


@pytest.mark.clause("S620")
@pytest.mark.transports("native")
def test_the_metrics_are_the_next_workers_whatever_cannot_end(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(CommandError, match="metrics cannot be served on port"),
    ):
        make_mount(fault_fs.path, transport, metrics_port=port)
    mount = make_mount(fault_fs.path, transport, metrics_port=port)
    assert served(port)
    fault_fs.freeze(["write"])
    (mount.path / "f").write_bytes(b"f" * 100_000)
    fault_fs.wait_frozen()
    pidfd = os.pidfd_open(mount.pid)
    mount.kill_worker()
    mount.wait_status(lambda status: status["worker"]["number"] == 2)
    assert served(port)
    assert not has_ended(pidfd, STILL_THERE_S), "nothing was stuck: the test proves nothing"
    fault_fs.thaw()
    assert has_ended(pidfd, 60)
    os.close(pidfd)
    mount.ctl("reload")
    assert served(port)
    mount.umount()
    assert (fault_fs.source / "f").stat().st_size == 100_000


def served(port: int) -> bool:
    """Whether metrics are to be had there."""
    try:
        return (
            b"acpfs_ram_budget_bytes"
            in urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60).read()
        )
    except (OSError, http.client.HTTPException):  # nobody is there, or ends just now
        return False


@pytest.mark.clause("S83")
@pytest.mark.transports("libfuse", "native")
def test_the_next_worker_asks_nothing_of_a_backing_directory_that_hangs(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """With libfuse the library asks for the attributes of the mount point, under which the backing
    directory lies: those are answered.
    """

    mount = make_mount(fault_fs.path, transport)
    (mount.path / "before").write_bytes(b"before")
    mount.flush()
    assert os.listdir(mount.path) == ["before"]
    content = os.urandom(100_000)
    fault_fs.freeze(["statfs", "write", "fsync", "rename"])
    fault_fs.freeze(["lookup"], glob="*.acpfs/mirrors*")
    (mount.path / "f").write_bytes(content)
    fault_fs.wait_frozen()
    mount.kill_worker()
    mount.wait_status(
        lambda status: status["worker"]["number"] == 2 and status["worker"]["pause_s"] > 0
    )
    assert (mount.path / "f").read_bytes() == content
    (mount.path / "g").write_bytes(b"new")
    fault_fs.thaw()
    mount.flush()
    assert {p.name: p.read_bytes() for p in fault_fs.source.iterdir() if p.is_file()} == {
        "before": b"before",
        "f": content,
        "g": b"new",
    }
    mount.umount()
    assert mount.leaks() == []


def test_a_living_process_is_not_stuck() -> None:
    program = "print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end = stuck_processes.thread_end(process.pid)
        assert not stuck_processes.is_stuck(process.pid)
        process.kill()
        if end >= 0:
            assert has_ended(end, 60)
            os.close(end)
