"""What survives what: hanging backing directory, fsync modes, umount, SIGTERM, kill -9, flush and
wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from pathlib import Path

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import CommandError, MakeMount, is_mounted
from tests.rig.processes import Child

clause = pytest.mark.clause
every_lane = pytest.mark.every_lane
pytestmark = [pytest.mark.mount]


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    directory = tmp_path / "backing"
    directory.mkdir()
    return directory


# -- S3, S4: hanging


@clause("S3", "S4", "S43")
@every_lane
def test_everything_hangs_below_and_nobody_notices(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, attr_timeout=0.1, patience=0.1)
    run = mount.path / "run"
    run.mkdir()
    (run / "old").write_bytes(b"old")
    mount.flush()
    os.listdir(run)
    fault_fs.freeze()

    def work() -> None:
        data = os.urandom(5_000_000)
        (run / "ck").mkdir()
        (run / "ck" / "model.pt").write_bytes(data)
        assert (run / "ck" / "model.pt").read_bytes() == data
        assert os.listdir(run / "ck") == ["model.pt"]
        os.rename(run / "ck" / "model.pt", run / "ck" / "final.pt")
        (run / "passing").write_bytes(b"x")
        os.unlink(run / "passing")
        assert (run / "old").read_bytes() == b"old"
        os.unlink(run / "old")
        assert sorted(os.listdir(run)) == ["ck"]
        os.statvfs(run)
        with open(run / "latest", "w") as file:
            file.write("ck")
            file.flush()
            os.fsync(file.fileno())

    try:
        Child(work).result()  # who waits for the storage never comes back
        status = mount.wait_status(lambda s: s["backing_health"]["state"] != "ok")
        assert status["queue_length"] > 0
    finally:
        fault_fs.thaw()
    mount.flush()
    assert (fault_fs.source / "run" / "latest").read_text() == "ck"
    assert sorted(os.listdir(fault_fs.source / "run")) == ["ck", "latest"]


@clause("S3")
@every_lane
def test_a_save_makes_no_backing_call_before_close_returns(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, attr_timeout=60, max_dirty_age=0, heartbeat=60)
    (mount.path / "run").mkdir()
    mount.flush()
    os.listdir(mount.path / "run")
    fault_fs.freeze()
    try:
        fault_fs.set(trace=True)
        with open(mount.path / "run" / "model.pt", "wb", buffering=0) as file:
            file.writelines(bytes(100_000) for _ in range(20))
            calls = fault_fs.state()["calls"]
        assert [call for call in calls if "run" in call or ".acpfs" in call] == [], (
            "calls before close"
        )
    finally:
        fault_fs.thaw()
    mount.flush()


# -- S13 … S18: close and fsync


@clause("S13", "S7")
@every_lane
def test_what_is_not_closed_is_not_in_the_backing_directory(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport, max_dirty_age=0)
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"half")
        (mount.path / "other").write_bytes(b"closed")
        mount.wait_drained()
        assert sorted(os.listdir(backing)) == [".acpfs", "other"]
        file.write(b" whole")
    mount.flush()
    assert (backing / "f").read_bytes() == b"half whole"


@clause("S15", "S14")
@every_lane
def test_ordered_fsync_does_not_wait(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, max_dirty_age=0)
    fault_fs.freeze(["writes"])
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"as of fsync")
        os.fsync(file.fileno())  # one that waits never comes back
        file.write(b" and later")
        fault_fs.thaw()
        mount.wait_drained()
        assert (fault_fs.source / "f").read_bytes() == b"as of fsync"


@clause("S16")
@every_lane
def test_durable_fsync_waits_until_it_is_persisted(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, fsync="durable")
    rule = fault_fs.freeze(["fsync"])

    def save() -> str:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"durable")
            os.fsync(file.fileno())
            return (fault_fs.source / "f").read_text()

    child = Child(save)
    fault_fs.wait_frozen()
    assert child.running()
    fault_fs.clear(rule)
    assert child.result() == "durable"


@clause("S16")
def test_durable_fsync_of_a_directory_waits_too(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, fsync="durable")
    (mount.path / "d").mkdir()
    (mount.path / "d" / "f").write_bytes(b"x")
    fd = os.open(mount.path / "d", os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
    assert (fault_fs.source / "d" / "f").read_bytes() == b"x"


@clause("S17")
@pytest.mark.parametrize("flag", [os.O_SYNC, os.O_DSYNC], ids=["O_SYNC", "O_DSYNC"])
@every_lane
def test_sync_writes_are_durable_in_every_mode(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, flag: int
) -> None:
    mount = make_mount(fault_fs.path, transport)
    fd = os.open(mount.path / "f", os.O_CREAT | os.O_WRONLY | flag, 0o644)
    os.write(fd, b"one")
    assert (fault_fs.source / "f").read_bytes() == b"one"
    os.write(fd, b"two")
    assert (fault_fs.source / "f").read_bytes() == b"onetwo"
    os.close(fd)


@clause("S393")
@pytest.mark.parametrize("flag", [os.RWF_SYNC, os.RWF_DSYNC], ids=["RWF_SYNC", "RWF_DSYNC"])
@every_lane
def test_a_single_write_is_durable_where_somebody_tells(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, flag: int
) -> None:
    mount = make_mount(fault_fs.path, transport, max_dirty_age=0)
    fd = os.open(mount.path / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    os.pwrite(fd, b"one", 0)
    if transport == "native-direct":
        os.pwritev(fd, [b"two"], 3, flag)
        assert (fault_fs.source / "f").read_bytes() == b"onetwo"
    fault_fs.freeze(["writes"])
    try:
        os.pwrite(fd, b"three", 6)
        if transport != "native-direct":
            os.pwritev(fd, [b"four"], 11, flag)  # else it would wait
    finally:
        fault_fs.thaw()
    os.close(fd)


@clause("S394")
@every_lane
def test_a_sync_of_the_file_system_says_nothing_of_the_drain(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport)
    os.listdir(mount.path)
    fault_fs.freeze(["writes"])
    try:
        (mount.path / "f").write_bytes(b"x")
        fd = os.open(mount.path, os.O_RDONLY | os.O_DIRECTORY)
        assert ctypes.CDLL(None).syncfs(fd) == 0
        os.close(fd)
        assert [entry["name"] for entry in mount.status()["queue"]] == ["f"]
    finally:
        fault_fs.thaw()


@clause("S18")
def test_directory_says_what_fsync_means_below_it(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, max_dirty_age=0)
    (mount.path / "safe" / "sub").mkdir(parents=True)
    (mount.path / "safe" / "fast").mkdir()
    os.setxattr(mount.path / "safe", "user.acpfs.fsync", b"durable")
    os.setxattr(mount.path / "safe" / "fast", "user.acpfs.fsync", b"ordered")
    with pytest.raises(OSError) as caught:
        os.setxattr(mount.path / "safe", "user.acpfs.fsync", b"sometimes")
    assert caught.value.errno == errno.EINVAL
    with open(mount.path / "safe" / "sub" / "f", "wb", buffering=0) as file:
        file.write(b"x")
        os.fsync(file.fileno())
        assert (fault_fs.source / "safe" / "sub" / "f").read_bytes() == b"x"
    mount.flush()
    fault_fs.freeze(["writes"])
    with open(mount.path / "safe" / "fast" / "f", "wb", buffering=0) as file:
        file.write(b"x")
        os.fsync(file.fileno())
    fault_fs.thaw()


# -- S19: flush and wait


@clause("S19")
def test_flush_and_wait_answer_when_it_is_persisted(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport)
    fault_fs.slow(0.1, ["fsync"])
    for number in range(10):
        (mount.path / f"f{number}").write_bytes(b"x" * number)
    assert mount.run("acpfs-ctl", "wait", str(mount.path / "f3"), "--timeout", "30").returncode == 0
    assert (fault_fs.source / "f3").read_bytes() == b"xxx"
    mount.flush()
    assert sorted(os.listdir(fault_fs.source)) == [".acpfs", *(f"f{n}" for n in range(10))]


@clause("S19")
def test_flush_and_wait_keep_to_their_time(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport)
    fault_fs.freeze(["writes"])
    try:
        (mount.path / "f").write_bytes(b"x")
        for words in (["flush", "--timeout", "0.5"], ["wait", "f", "--timeout", "0.5"]):
            done = mount.run("acpfs-ctl", str(mount.path), *words, check=False)
            assert done.returncode == 4, done
            assert "f" in done.stdout + done.stderr
    finally:
        fault_fs.thaw()


# -- S20, S21, S22: the end of a daemon


@clause("S20")
def test_umount_drains(transport: str, make_mount: MakeMount, fault_fs: FaultFs) -> None:
    mount = make_mount(fault_fs.path, transport)
    fault_fs.slow(0.05, ["fsync"])
    for number in range(30):
        (mount.path / f"f{number}").write_bytes(os.urandom(10_000))
    mount.umount()
    assert not is_mounted(mount.path)
    assert len(os.listdir(fault_fs.source)) == 31
    assert mount.leaks() == []


@clause("S20")
def test_umount_that_runs_out_of_time_says_what_is_left(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport)
    fault_fs.freeze(["writes"])
    try:
        (mount.path / "precious").write_bytes(b"x")
        with pytest.raises(CommandError) as caught:
            mount.umount(timeout_s=0.5)
        assert caught.value.code == 4
        assert "precious" in caught.value.stdout + caught.value.stderr
    finally:
        fault_fs.thaw()
    if is_mounted(mount.path):
        mount.umount()
    else:
        mount.start()
        mount.flush()
    assert (fault_fs.source / "precious").read_bytes() == b"x"


@clause("S20")
def test_umount_of_a_busy_mount_is_refused(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    with open(mount.path / "f", "wb") as file:
        file.write(b"x")
        with pytest.raises(CommandError):
            mount.umount(timeout_s=5)
        assert is_mounted(mount.path)
    mount.umount()
    assert (backing / "f").read_bytes() == b"x"


@clause("S21")
def test_sigterm_drains(transport: str, make_mount: MakeMount, fault_fs: FaultFs) -> None:
    mount = make_mount(fault_fs.path, transport)
    fault_fs.slow(0.05, ["fsync"])
    for number in range(30):
        (mount.path / f"f{number}").write_bytes(os.urandom(10_000))
    mount.terminate()
    assert not is_mounted(mount.path)
    assert len(os.listdir(fault_fs.source)) == 31


@clause("S21", "S22")
def test_what_sigterm_leaves_is_drained_by_the_next_mount(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, drain_timeout=0.5)
    fault_fs.freeze(["writes"])
    (mount.path / "d").mkdir()
    (mount.path / "d" / "precious").write_bytes(b"x" * 100_000)
    pid = mount.pid
    os.kill(pid, signal.SIGTERM)
    mount.wait_unmounted()
    fault_fs.thaw()
    mount.wait_ended(pid)
    mount.start()
    assert (mount.path / "d" / "precious").read_bytes() == b"x" * 100_000
    mount.flush()
    assert (fault_fs.source / "d" / "precious").read_bytes() == b"x" * 100_000


@clause("S22")
@every_lane
def test_what_a_killed_daemon_left_is_shown_and_drained(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport)
    (mount.path / "persisted").write_bytes(b"p")
    mount.flush()
    rule = fault_fs.fail(
        "EIO", ["fsync"]
    )  # a process that hangs in a FUSE file system's call cannot even be killed
    contents = {f"f{number}": os.urandom(30_000) for number in range(20)}
    (mount.path / "d").mkdir()
    for name, data in contents.items():
        (mount.path / "d" / name).write_bytes(data)
    os.rename(mount.path / "d", mount.path / "e")
    os.symlink("e", mount.path / "s")
    os.unlink(mount.path / "persisted")
    mount.kill()
    fault_fs.clear(rule)
    mount.start()
    assert sorted(os.listdir(mount.path)) == ["e", "s"]
    assert {p.name: p.read_bytes() for p in (mount.path / "e").iterdir()} == contents
    mount.flush()
    assert {p.name: p.read_bytes() for p in (fault_fs.source / "e").iterdir()} == contents
    assert not (fault_fs.source / "persisted").exists()
    mount.umount()
    assert mount.leaks() == []


@clause("S22")
@every_lane
def test_a_file_whose_writer_was_lost_waits_for_a_decision(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, max_dirty_age=0)
    os.listdir(mount.path)

    def write_and_wait() -> None:
        fd = os.open(mount.path / "half", os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(fd, b"half")
        os.write(told, b"x")
        os.read(never, 1)

    heard, told = os.pipe()
    never, end = os.pipe()
    child = Child(write_and_wait)
    os.read(heard, 1)
    mount.kill()
    os.close(end)
    for fd in (heard, told, never):
        os.close(fd)
    child.kill()
    mount.start()
    assert mount.wait_status(lambda s: s["interrupted"] == 1)
    assert (mount.path / "half").read_bytes() == b"half"
    (mount.path / "other").write_bytes(b"x")
    mount.flush("other")
    assert not (fault_fs.source / "half").exists()
    mount.run("acpfs-ctl", "retry", str(mount.path / "half"))
    mount.flush()
    assert (fault_fs.source / "half").read_bytes() == b"half"
