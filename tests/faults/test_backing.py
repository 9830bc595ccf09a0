"""What the backing directory may do, and what applications, status and the data have of it: the
table in docs/OPERATIONS.md, row by row.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from acpfs.backing.health import STUCK_VARIABLE
from acpfs.errors import ExitCode
from acpfs.worker.worker import ANCHOR_VARIABLE
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, CommandError, MakeMount, wait_gone
from tests.rig.processes import Child
from tests.rig.storage.servers import until

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount]
SOON = {STUCK_VARIABLE: "3", ANCHOR_VARIABLE: "0.5"}
QUICK: dict[str, Any] = {
    "retry_delay_min": 0.05,
    "retry_delay_max": 0.3,
    "attr_timeout": 0.1,
    "environment": SOON,
}


@dataclass
class Row:
    """One fault: which calls meet it, and what status says meanwhile."""

    name: str
    action: str
    ops: list[str]
    words: dict[str, object] = field(default_factory=dict)
    shows: str = ""
    """An errno in the queue, or a state of the backing directory's health."""
    parks: bool = False


PASSING = ["EIO", "ENOSPC", "EDQUOT", "ESTALE", "ETIMEDOUT", "ENOTCONN"]
TABLE = [
    *(Row(f"{error}-write", "fail", ["write"], {"errno": error}, error) for error in PASSING),
    *(
        Row(f"EIO-{op}", "fail", [op], {"errno": "EIO"}, "EIO")
        for op in ("fsync", "rename", "fsyncdir")
    ),
    *(
        Row(f"{error}-create", "fail", ["create"], {"errno": error}, error, parks=True)
        for error in ("EROFS", "EACCES", "EPERM")
    ),
    Row("slow", "delay", ["write", "create"], {"seconds": 2.5}, "slow"),
    Row("hung", "freeze", ["writes"], {}, "stuck"),
    Row("torn", "tear", ["write"], {"probability": 0.5, "seed": 3, "times": 12}),
    Row("short", "short", ["write"], {"probability": 0.5, "seed": 3}),
    Row(
        "answer-lost",
        "lose",
        ["rename", "mkdir", "unlink"],
        {"probability": 0.5, "seed": 3, "times": 12},
    ),
]


@dataclass
class Ground:
    """One mount for all rows of the table: each of them has to leave it as it was."""

    mount: AcpfsMount
    faults: FaultFs


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, transport: str) -> Iterator[Ground]:
    base = tmp_path_factory.mktemp("table")
    with FaultFs(base / "disk", base / "backing") as faults:
        with AcpfsMount(faults.path, base / "mnt", transport, watchdog_s=1800, **QUICK) as mount:
            yield Ground(mount, faults)
        assert mount.leaks() == []


@clause("S23", "S24", "S3", "S7")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_nothing_is_lost_nor_wrongly_persisted(ground: Ground, row: Row) -> None:
    mount = ground.mount
    faults = ground.faults
    shown = mount.path / row.name
    below = faults.source / row.name
    shown.mkdir()
    (shown / "old").write_bytes(b"old")
    mount.flush()
    rule = faults.rule(row.action, ops=row.ops, **row.words)
    try:
        contents = {f"f{number}": os.urandom(20_000 * number + 1) for number in range(4)} | {
            "old": b"rewritten"
        }
        for name, data in contents.items():
            (shown / name).write_bytes(data)
        (shown / "tmp").write_bytes(b"t")
        (shown / "tmp").rename(shown / "latest")
        contents["latest"] = b"t"
        if row.shows:
            mount.wait_status(
                lambda s: (
                    any(q["last_error"] == row.shows for q in s["queue"])
                    or s["backing_health"]["state"] == row.shows
                )
            )
            assert {p.name for p in below.iterdir()} <= {"tmp", *contents}
            assert (below / "old").read_bytes() in (b"old", b"rewritten")
        assert all((shown / name).read_bytes() == data for name, data in contents.items())
        assert "latest" in os.listdir(shown)
        if row.parks:
            mount.wait_status(lambda s: s["parked"] > 0)
            assert (
                mount.run("acpfs-ctl", str(mount.path), "flush", check=False).returncode
                == ExitCode.FAILED
            )
    finally:
        faults.clear(rule)
    if row.parks:
        mount.run("acpfs-ctl", str(mount.path), "retry", row.name)
    mount.flush()
    assert {name: (below / name).read_bytes() for name in contents} == contents
    assert all(verdict["status"] == "ok" for verdict in mount.ctl("verify"))
    status = mount.status()
    assert (status["queue_length"], status["parked"], status["ram"]["dirty_bytes"]) == (0, 0, 0)


@clause("S25", "S53")
def test_an_fsync_that_failed_for_the_only_copy_is_not_tried_until_it_says_yes(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """The kernel takes the pages that it could not write for written, and says so the second
    time.
    """
    mount = make_mount(fault_fs.path, transport, ram="64M", **QUICK)
    fault_fs.fail("EIO", ["fsync"], glob=".acpfs/staging/*", times=1)
    data = os.urandom(1 << 20) * 96
    (mount.path / "big").write_bytes(
        data
    )  # more than RAM takes: its bytes are in the staging file alone
    status = mount.wait_status(lambda s: s["parked"])
    assert [(entry["name"], entry["last_error"]) for entry in status["queue"]] == [("big", "EIO")]
    assert any(
        "bytes that are nowhere else" in log.read_text()
        for log in (mount.log, *(mount.runtime_dir / "logs").glob("*.log"))
    )
    killed = mount.kill_worker()  # the next one must know as well
    mount.wait_status(lambda s: s["worker"]["pid"] != killed)
    # libfuse: the mount is made anew, and the old one, or none, is there until then
    until(lambda: os.path.exists(mount.path / "big"), "the file, in the mount that is made anew")
    assert (
        mount.run("acpfs-ctl", str(mount.path), "flush", check=False).returncode == ExitCode.FAILED
    )
    assert not (fault_fs.source / "big").exists()
    assert (mount.path / "big").stat().st_size == len(data)
    with pytest.raises(OSError, match="Input/output error"):  # close tells of what is parked there
        (mount.path / "big").write_bytes(b"written anew")
    mount.flush()
    assert (fault_fs.source / "big").read_bytes() == b"written anew"
    mount.umount()
    assert mount.leaks() == []


@clause("S74")
def test_a_server_that_dies_and_comes_back(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "d").mkdir()
    (mount.path / "d" / "before").write_bytes(b"b")
    mount.flush()
    fault_fs.abort()  # its mount is taken away: the bare mount point shows
    data = os.urandom(300_000)
    (mount.path / "d" / "f").write_bytes(data)
    mount.wait_status(
        lambda s: "never used" in (s["backing_health"]["problem"] or "")
    )  # before that it is there and answers nothing
    assert "nothing is drained to it" in mount.run("acpfs-ctl", str(mount.path), "status").stdout
    assert (mount.path / "d" / "f").read_bytes() == data
    assert os.listdir(fault_fs.path) == [], "drained into the bare mount point"
    with FaultFs(fault_fs.source, fault_fs.path):
        mount.flush()
        assert (fault_fs.source / "d" / "f").read_bytes() == data
        status = mount.status()
        assert (status["backing_health"]["problem"], status["counters"]["backing_reopened"]) == (
            None,
            1,
        )
        (mount.path / "d" / "g").write_bytes(b"g")
        mount.flush()
        assert (fault_fs.source / "d" / "g").read_bytes() == b"g"
        mount.umount()


@clause("S74")
def test_unmounted_underneath_while_it_is_used(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    """umount -l: the descriptor still leads to the file system, the path to the bare directory."""
    backing = tmp_path / "backing"
    backing.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(backing)], check=True)
    subprocess.run(["mount", "--bind", str(backing), str(backing)], check=True)
    keep = tmp_path / "keep"
    keep.mkdir()
    try:
        subprocess.run(["mount", "--bind", str(backing), str(keep)], check=True)
        mount = make_mount(backing, transport, **QUICK)
        subprocess.run(["umount", "-l", str(backing)], check=True)
        subprocess.run(["umount", "-l", str(backing)], check=True)
        (mount.path / "f").write_bytes(b"x")
        mount.wait_status(lambda s: s["backing_health"]["problem"] and not s["queue_length"])
        for verb in ("flush", "verify"):
            done = mount.run("acpfs-ctl", str(mount.path), verb, check=False)
            assert (done.returncode, "a directory that acpfs has never used" in done.stderr) == (
                ExitCode.FAILED,
                True,
            )
        assert os.listdir(backing) == []
        assert (keep / "f").read_bytes() == b"x"
        subprocess.run(["mount", "--bind", str(keep), str(backing)], check=True)
        mount.wait_status(lambda s: not s["backing_health"]["problem"])
        mount.umount()
        mount.abort()
    finally:
        for path in (backing, backing, keep):
            subprocess.run(["umount", "-l", str(path)], check=False, stderr=subprocess.DEVNULL)


@clause("S74")
def test_a_mount_over_the_bare_directory_is_refused_while_something_is_kept(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(backing)], check=True)
    keep = tmp_path / "keep"
    keep.mkdir()
    try:
        subprocess.run(["mount", "--bind", str(backing), str(keep)], check=True)
        mount = make_mount(backing, transport, bandwidth=1)
        (mount.path / "kept").write_bytes(os.urandom(100_000))
        mount.kill()
        subprocess.run(["umount", "-l", str(backing)], check=True)
        with pytest.raises(CommandError) as refused:
            mount.start(bandwidth=0)
        assert refused.value.code == ExitCode.REFUSED
        assert "is its file system mounted?" in refused.value.stderr
        assert os.listdir(backing) == []
        subprocess.run(["mount", "--bind", str(keep), str(backing)], check=True)
        mount.start()
        mount.flush()
        assert (keep / "kept").stat().st_size == 100_000
        mount.umount()
        mount.abort()
    finally:
        for path in (backing, keep):
            subprocess.run(["umount", "-l", str(path)], check=False, stderr=subprocess.DEVNULL)


@clause("S23")
def test_a_file_system_that_is_really_full(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "none", str(backing)], check=True)
    try:
        (backing / "ballast").write_bytes(bytes(3 << 20))
        mount = make_mount(backing, transport, **QUICK)
        data = os.urandom(2 << 20)
        (mount.path / "f").write_bytes(data)
        mount.wait_status(lambda s: any(q["last_error"] == "ENOSPC" for q in s["queue"]))
        assert (mount.path / "f").read_bytes() == data
        (
            mount.path / "ballast"
        ).unlink()  # room is made through the mount, behind what waits for it
        (backing / "ballast").unlink(missing_ok=True)
        mount.flush()
        assert (backing / "f").read_bytes() == data
        mount.umount()
    finally:
        subprocess.run(["umount", "-l", str(backing)], check=False)


@clause("S26")
@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_damage_behind_our_back_is_found_and_said(
    transport: str, make_mount: MakeMount, tmp_path: Path, damage: str
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, **QUICK)
    (mount.path / "f").write_bytes(os.urandom(50_000))
    mount.flush()
    if damage == "truncated":
        os.truncate(backing / "f", 10_000)
    else:
        os.unlink(backing / "f")
    rows = mount.run("acpfs-ctl", str(mount.path), "verify", check=False)
    assert rows.returncode == ExitCode.FAILED
    assert ("mismatch" if damage == "truncated" else "missing") in rows.stdout


@clause("S23")
def test_threads_that_hang_are_bounded_and_all_come_back(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK, streams=4)
    (mount.path / "warm").write_bytes(b"w")
    mount.flush()
    pid = mount.pid
    threads = len(os.listdir(f"/proc/{pid}/task"))
    fault_fs.freeze(["writes"])
    for number in range(100):
        (mount.path / f"f{number}").write_bytes(b"x")
    fault_fs.wait_frozen()  # the kernel lets one create at a time into a directory
    status = mount.wait_status(lambda s: s["backing_health"]["state"] == "stuck")
    assert status["backing_health"]["calls_stuck"] >= 1
    assert len(os.listdir(f"/proc/{pid}/task")) <= threads + 32 + 4 * 4 + 4 + 16
    fault_fs.thaw()
    mount.flush()
    assert len(list(fault_fs.source.glob("f*"))) == 100
    mount.wait_status(lambda s: s["backing_health"]["state"] == "ok")


@clause("S496")
@pytest.mark.transports("native-direct", "libfuse")
def test_writers_that_wait_for_the_storage_hold_up_nobody_else(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """More of them than there are threads that take requests from the kernel."""
    mount = make_mount(fault_fs.path, transport, **QUICK, ram="8M")
    mib = 1 << 20
    count = 2 + len(os.sched_getaffinity(0)) + 2
    (mount.path / "other").write_bytes(b"o")
    mount.flush()
    with (mount.path / "big").open("wb", buffering=0) as file:
        for number in range(16):
            file.write(bytes([number]) * mib)
        worker = mount.pid
        fault_fs.freeze(["write"])

        def write(number: int) -> None:
            fd = os.open(mount.path / "big", os.O_WRONLY)
            os.pwrite(fd, b"piece", number * mib + 5)
            os.close(fd)

        children = [Child(partial(write, number)) for number in range(count)]
        fault_fs.wait_frozen()
        if transport != "libfuse":
            mount.wait_status(
                lambda s: [one["call"] for one in s["waiting_calls"]].count("write") == count
            )
        assert (mount.path / "other").read_bytes() == b"o"
        (mount.path / "new").write_bytes(b"n" * 4096)
        assert os.stat(mount.path / "new").st_size == 4096
        assert mount.pid == worker
        fault_fs.thaw()
        for child in children:
            child.result()
    mount.flush()
    stored = (fault_fs.source / "big").read_bytes()
    assert [stored[number * mib + 5 :][:5] for number in range(count)] == [b"piece"] * count
    assert stored[:5] == bytes(5)


@clause("S240")
@pytest.mark.transports("native-direct", "native-passthrough")
@pytest.mark.parametrize("listed", [True, False])
def test_a_save_goes_on_after_a_change_of_workers_while_the_storage_hangs(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, listed: bool
) -> None:
    (fault_fs.path / "save/step-0").mkdir(parents=True)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    save = mount.path / "save"
    (save / "step-1").mkdir()
    (save / "step-1" / "shard").write_bytes(b"1")
    if listed:
        assert sorted(os.listdir(save)) == ["step-0", "step-1"]
    mount.flush()
    fault_fs.freeze(
        glob="save*"
    )  # nothing is under way there, and a process that waits for FUSE cannot be killed
    wait_gone(mount.kill_worker())
    (save / "step-2").mkdir()
    (save / "step-2" / "shard").write_bytes(b"2")
    (save / "latest").write_bytes(b"2")
    assert sorted(os.listdir(save)) == ["latest", "step-0", "step-1", "step-2"]
    fault_fs.thaw()
    fault_fs.clear()
    mount.flush()
    assert (fault_fs.source / "save/latest").read_bytes() == b"2"
    assert (fault_fs.source / "save/step-2/shard").read_bytes() == b"2"
    mount.umount()
