"""The two layers as one: what the backing directory holds before, during and after; what others
change below; what `.acpfs` is.
"""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model.snapshot import differences, snapshot
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount
from tests.rig.syscalls import error_of

clause = pytest.mark.clause
every_lane = pytest.mark.every_lane
pytestmark = [pytest.mark.mount]


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    directory = tmp_path / "backing"
    directory.mkdir()
    return directory


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """For what becomes visible by a timeout of the kernel's, which nothing tells us of."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not become visible"
        os.sched_yield()


# -- S1, S2


@clause("S1")
@every_lane
def test_after_a_drain_both_sides_are_the_same(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    top = mount.path / "run"
    (top / "deep" / "er").mkdir(parents=True)
    (top / "deep" / "er" / "data").write_bytes(os.urandom(3_000_000))
    (top / "empty").touch()
    (top / "link").symlink_to("deep/er/data")
    os.link(top / "empty", top / "hard")
    os.mkfifo(top / "fifo")
    os.chmod(top / "empty", 0o4640)
    os.chown(top / "deep", 1000, 1001)
    os.setxattr(top / "deep" / "er" / "data", "user.note", b"kept")
    os.utime(top / "deep" / "er", ns=(10**18 + 1, 10**18 + 2))
    with open(top / "sparse", "wb") as file:
        file.truncate(50_000_000)
    mount.flush()
    assert differences(snapshot(mount.path), snapshot(backing)) == []
    assert sorted(os.listdir(backing)) == [".acpfs", "run"]
    subprocess.run(
        [
            "diff",
            "-r",
            "--no-dereference",
            "-x",
            "fifo",
            str(mount.path),
            str(backing / ""),
            "-x",
            ".acpfs",
        ],
        check=True,
    )


@clause("S1", "S46")
def test_mtimes_of_directories_are_the_mounts(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    (mount.path / "d").mkdir()
    for number in range(20):
        (mount.path / "d" / f"f{number}").write_bytes(b"x")
    os.unlink(mount.path / "d" / "f0")
    shown = (mount.path / "d").stat().st_mtime_ns
    mount.flush()
    assert (mount.path / "d").stat().st_mtime_ns == shown
    assert (backing / "d").stat().st_mtime_ns == shown


@clause("S2")
def test_the_directory_of_acpfs_does_not_exist_through_the_mount(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    own = mount.path / ".acpfs"
    other = mount.path / "other"
    other.touch()
    assert (backing / ".acpfs").is_dir()
    assert os.listdir(mount.path) == ["other"]
    assert not own.exists()
    assert error_of(os.listdir, own) == errno.ENOENT
    assert error_of(os.mkdir, own) == errno.EPERM
    assert error_of(own.write_bytes, b"") == errno.EPERM
    assert error_of(os.mkfifo, own) == errno.EPERM
    assert error_of(os.symlink, "x", own) == errno.EPERM
    assert error_of(os.link, other, own) == errno.EPERM
    assert error_of(os.rename, other, own) == errno.EPERM
    assert error_of(os.unlink, own) == errno.ENOENT
    assert error_of(os.rmdir, own) == errno.ENOENT
    assert error_of(os.rename, own, other) == errno.ENOENT


@clause("S2")
def test_only_the_top_level_name_is_special(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    (mount.path / "sub" / ".acpfs").mkdir(parents=True)
    (mount.path / "sub" / ".acpfs" / "f").write_bytes(b"mine")
    mount.flush()
    assert (backing / "sub" / ".acpfs" / "f").read_bytes() == b"mine"


@clause("S238")
def test_another_file_system_below_the_backing_directory(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    (backing / "ckpts").mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16M", "none", backing / "ckpts"], check=True
    )
    try:
        mount = make_mount(backing, transport)
        (mount.path / "ckpts/run").mkdir()
        (mount.path / "ckpts/run/shard").write_bytes(b"1")
        (mount.path / "latest").write_bytes(b"run")
        (mount.path / "f").write_bytes(b"2")
        assert error_of(os.rename, mount.path / "f", mount.path / "ckpts/f") == errno.EXDEV
        subprocess.run(["mv", mount.path / "f", mount.path / "ckpts/run"], check=True)
        assert os.listdir(mount.path / "ckpts") == ["run"]
        mount.flush()
        assert (backing / "latest").read_bytes() == b"run"
        assert {file.name: file.read_bytes() for file in (backing / "ckpts/run").iterdir()} == {
            "shard": b"1",
            "f": b"2",
        }
        subprocess.run(["rm", "-r", mount.path / "ckpts/run"], check=True)
        mount.flush()
        assert os.listdir(backing / "ckpts") == [".acpfs"]
        mount.umount()
    finally:
        subprocess.run(["umount", "-l", backing / "ckpts"], check=True)


@clause("S5")
def test_symlinks_in_the_backing_directory_are_not_followed_by_the_daemon(
    transport: str, make_mount: MakeMount, backing: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"untouched")
    mount = make_mount(backing, transport, attr_timeout=0.1)
    (mount.path / "d").mkdir()
    (mount.path / "d" / "victim").write_bytes(b"ours")
    mount.flush()
    # Somebody swaps the directory for a symlink behind our back, while we have something to commit
    # in it.
    fd = os.open(mount.path / "d" / "victim", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"ours, newer")
    (backing / "d").rename(backing / "d.away")
    (backing / "d").symlink_to(outside)
    os.close(fd)
    mount.run("acpfs-ctl", str(mount.path), "flush", "--timeout", "3", check=False)
    assert (outside / "victim").read_bytes() == b"untouched"
    assert os.listdir(outside) == ["victim"]
    (backing / "d").unlink()
    (backing / "d.away").rename(backing / "d")
    mount.run("acpfs-ctl", str(mount.path), "retry", "d/victim", check=False)
    mount.flush()


# -- S10, S11


@clause("S10")
def test_attributes_travel_with_content_and_content_keeps_its_order(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport)
    rule = fault_fs.freeze(["fsync"])
    (mount.path / "first").write_bytes(b"first")
    os.chmod(mount.path / "first", 0o640)  # rights keep their order (S450): nothing is in between
    (mount.path / "second").write_bytes(b"second")
    os.utime(mount.path / "first", ns=(1, 10**18))
    fault_fs.clear(rule)
    mount.flush()
    visible = [r for r in fault_fs.journal() if r["op"] == "set"]
    assert [r["path"] for r in visible] == ["first", "second"]
    assert (visible[0]["mode"] & 0o777, visible[0]["mtime_ns"]) == (0o640, 10**18), (
        "with its content, not later"
    )


# -- S11


@clause("S11")
def test_renames_and_links_reach_the_backing_directory_as_such(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(
        fault_fs.path, transport, heartbeat=60
    )  # else the node's record is written meanwhile
    (mount.path / "ck.tmp").mkdir()
    for number in range(5):
        (mount.path / "ck.tmp" / f"shard{number}").write_bytes(os.urandom(50_000))
    mount.flush()
    inodes = {p.name: p.stat().st_ino for p in (fault_fs.source / "ck.tmp").iterdir()}
    fault_fs.reset_counters()
    os.rename(mount.path / "ck.tmp", mount.path / "ck")
    os.link(mount.path / "ck" / "shard0", mount.path / "best")
    os.rename(mount.path / "ck" / "shard1", mount.path / "ck" / "moved")
    mount.flush()
    assert fault_fs.counters().get("write", 0) < 10, "no content is copied again"
    assert (fault_fs.source / "ck" / "shard4").stat().st_ino == inodes["shard4"]
    assert (fault_fs.source / "best").stat().st_ino == inodes["shard0"]
    assert (fault_fs.source / "ck" / "moved").stat().st_ino == inodes["shard1"]


@clause("S11")
def test_directory_renamed_while_its_files_are_in_ram(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport)
    os.listdir(mount.path)  # known from here on
    fault_fs.freeze(["writes"])
    (mount.path / "a" / "b").mkdir(parents=True)
    contents = {}
    for number in range(10):
        contents[f"f{number}"] = os.urandom(20_000)
        (mount.path / "a" / "b" / f"f{number}").write_bytes(contents[f"f{number}"])
    os.rename(mount.path / "a", mount.path / "c")
    os.rename(mount.path / "c" / "b", mount.path / "b")
    os.rmdir(mount.path / "c")
    for name, data in contents.items():
        assert (mount.path / "b" / name).read_bytes() == data
    fault_fs.thaw()
    mount.flush()
    assert {p.name: p.read_bytes() for p in (fault_fs.source / "b").iterdir()} == contents
    assert sorted(os.listdir(fault_fs.source)) == [".acpfs", "b"]


@clause("S9")
def test_what_is_created_and_deleted_meanwhile_costs_nothing(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport)
    (mount.path / "known").touch()
    mount.flush()
    os.listdir(mount.path)
    fault_fs.freeze(["writes"])
    (mount.path / "blocker").write_bytes(
        b"x"
    )  # holds the log's front back, so that nothing below is under way
    fault_fs.wait_frozen()
    fault_fs.reset_counters()
    (mount.path / "scratch").mkdir()
    for number in range(200):
        (mount.path / "scratch" / f"f{number}").write_bytes(b"y" * 10_000)
        os.unlink(mount.path / "scratch" / f"f{number}")
    (mount.path / "scratch").rmdir()
    fault_fs.thaw()
    mount.flush()
    assert not [r for r in fault_fs.journal() if "scratch" in r["path"]]
    assert fault_fs.counters().get("write", 0) < 60, "only what was under way"


# -- S12


@clause("S12")
@every_lane
def test_a_file_that_stays_open_is_committed_now_and_then(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, max_dirty_age=0.3)
    with open(mount.path / "train.log", "ab", buffering=0) as log:
        log.write(b"first line\n")
        eventually(lambda: (fault_fs.source / "train.log").exists())
        assert (fault_fs.source / "train.log").read_bytes() == b"first line\n"
        log.write(b"second line\n")
        eventually(
            lambda: (fault_fs.source / "train.log").read_bytes() == b"first line\nsecond line\n"
        )


@clause("S12", "S230", "S231", "S233")
@every_lane
def test_a_large_log_is_stored_in_two_files_that_take_turns(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport, max_dirty_age=0.3)
    stored = backing / "train.log"
    numbers = []
    begin = os.urandom(3 << 20)
    with open(mount.path / "train.log", "ab", buffering=0) as log:
        log.writelines(begin[start : start + (1 << 16)] for start in range(0, len(begin), 1 << 16))
        expected = begin
        for number in range(6):
            expected += b"line %d\n" % number
            log.write(b"line %d\n" % number)
            if number == 3:
                os.fsync(log.fileno())
            eventually(
                lambda expected=expected: stored.exists() and stored.read_bytes() == expected  # type: ignore[misc]
            )
            numbers.append(stored.stat().st_ino)
            mount.flush()
            assert mount.run("acpfs-ctl", str(mount.path), "verify", "train.log").returncode == 0
    assert len(set(numbers[2:])) == 2
    assert numbers[2:] == [numbers[2], numbers[3]] * 2
    mount.flush()
    assert stored.read_bytes() == expected
    mount.umount()
    staging = backing / ".acpfs" / "staging"
    assert [path for path in staging.rglob("*") if path.is_file()] == []


# -- S28, S29, S30


@clause("S30")
@every_lane
def test_files_that_were_there_before(transport: str, make_mount: MakeMount, backing: Path) -> None:
    (backing / "old" / "sub").mkdir(parents=True)
    data = os.urandom(2_000_000)
    (backing / "old" / "big").write_bytes(data)
    (backing / "old" / "sub" / "f").write_bytes(b"F")
    (backing / "old" / "s").symlink_to("sub/f")
    os.link(backing / "old" / "big", backing / "old" / "big2")
    mount = make_mount(backing, transport)
    old = mount.path / "old"
    assert (old / "big").read_bytes() == data
    assert (old / "s").read_bytes() == b"F"
    assert (old / "big").stat().st_nlink == (old / "big2").stat().st_nlink == 2
    with open(old / "big", "r+b") as file:
        file.seek(1_000_000)
        file.write(b"patched")
    expected = data[:1_000_000] + b"patched" + data[1_000_007:]
    assert (old / "big").read_bytes() == expected
    with open(old / "sub" / "f", "ab") as file:
        file.write(b"+")
    os.truncate(old / "big2", 1_500_000)
    os.rename(old / "sub", mount.path / "new")
    os.unlink(old / "s")
    mount.flush()
    assert (backing / "old" / "big").read_bytes() == expected[:1_500_000]
    assert (backing / "new" / "f").read_bytes() == b"F+"
    assert sorted(os.listdir(backing / "old")) == ["big", "big2"]


@clause("S28")
@every_lane
def test_changes_from_outside_become_visible(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    (backing / "d").mkdir()
    (backing / "d" / "f").write_bytes(b"one")
    mount = make_mount(backing, transport, attr_timeout=0.2)
    assert (mount.path / "d" / "f").read_bytes() == b"one"
    (backing / "d" / "f").write_bytes(b"changed outside")
    eventually(lambda: (mount.path / "d" / "f").read_bytes() == b"changed outside")
    (backing / "d" / "new").write_bytes(b"new")
    eventually(lambda: "new" in os.listdir(mount.path / "d"))
    eventually((mount.path / "d" / "new").exists)
    os.unlink(backing / "d" / "f")
    eventually(lambda: not (mount.path / "d" / "f").exists())
    (backing / "d").rename(backing / "e")
    eventually(lambda: os.listdir(mount.path) == ["e"])
    assert (mount.path / "e" / "new").read_bytes() == b"new"


@clause("S28")
@every_lane
def test_a_persisted_file_changed_outside_is_read_anew(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    """The RAM tier still has our content, and must not serve it any more."""
    mount = make_mount(backing, transport, attr_timeout=0.2)
    (mount.path / "f").write_bytes(b"ours")
    mount.flush()
    (backing / "f").write_bytes(b"theirs!")
    eventually(lambda: (mount.path / "f").read_bytes() == b"theirs!")
    os.truncate(backing / "f", 3)
    eventually(lambda: (mount.path / "f").read_bytes() == b"the")


@clause("S29")
def test_what_is_not_committed_yet_wins(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    (fault_fs.source / "f").write_bytes(b"below")
    mount = make_mount(fault_fs.path, transport, attr_timeout=0.1)
    assert (mount.path / "f").read_bytes() == b"below"
    fault_fs.freeze(["writes"])
    (mount.path / "f").write_bytes(b"above")
    (fault_fs.source / "f").write_bytes(b"changed below")
    (fault_fs.source / "g").touch()
    eventually((mount.path / "g").exists)
    assert (mount.path / "f").read_bytes() == b"above"
    fault_fs.thaw()
    mount.flush()
    assert (fault_fs.source / "f").read_bytes() == b"above"


@clause("X6", "S36")
def test_links_from_before_the_mount_are_one_file_once_they_are_seen(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    for name in ("a", "c"):
        (backing / name).write_bytes(b"old")
    os.link(backing / "a", backing / "b")
    os.link(backing / "c", backing / "d")
    mount = make_mount(backing, transport)
    assert (mount.path / "b").stat().st_ino == (mount.path / "a").stat().st_ino
    (mount.path / "a").write_bytes(b"new")
    (mount.path / "c").write_bytes(b"new")
    assert (mount.path / "b").read_bytes() == b"new"
    mount.flush()
    assert (backing / "b").read_bytes() == b"new"
    assert (backing / "a").stat().st_ino == (backing / "b").stat().st_ino
    assert (backing / "c").read_bytes() == b"new"
    assert (backing / "d").read_bytes() == b"old"


@clause("S44")
@every_lane
def test_a_mapping_of_a_file_that_was_once_in_passthrough_is_of_the_current_content(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    """The kernel keeps its file for a node as long as anybody is left who opened it beside a reader
    in passthrough.
    """
    mount = make_mount(backing, transport)
    path = mount.path / "f"
    path.write_bytes(b"o" * 64)
    mount.flush()
    reader = os.open(path, os.O_RDONLY)
    both = os.open(path, os.O_RDWR)
    os.pwrite(both, b"v", 0)
    os.fsync(both)  # a version whose bytes must not change
    os.close(reader)
    os.ftruncate(both, 0)
    os.pwrite(both, b"n" * 32, 0)
    with mmap.mmap(both, 32) as mapping:
        assert mapping[:] == b"n" * 32
        mapping[8:12] = b"here"
        mapping.flush()
    assert os.pread(both, 64, 0) == b"n" * 8 + b"here" + b"n" * 20
    os.close(both)
    mount.flush()
    assert (backing / "f").read_bytes() == b"n" * 8 + b"here" + b"n" * 20


@clause("X9", "S49")
@every_lane
def test_who_reads_the_backing_directorys_own_file_goes_on_with_it_when_it_is_rewritten(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    (backing / "f").write_bytes(b"below" * 1000)
    mount = make_mount(
        backing, transport, warm_reads="off"
    )  # else so small a file is read from RAM
    path = mount.path / "f"
    reader = os.open(path, os.O_RDONLY)
    native = mount.status()["lane_choices"].get("passthrough")
    path.write_bytes(b"above" * 1000)
    assert os.pread(reader, 5, 0) == (b"below" if native else b"above")
    assert path.read_bytes() == b"above" * 1000
    mount.flush()
    assert path.read_bytes() == b"above" * 1000
    os.close(reader)


@clause("X7")
@every_lane
def test_a_file_that_is_read_from_the_backing_directory_is_never_mapped_writable_there(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    (backing / "f").write_bytes(b"below" * 1000)
    mount = make_mount(
        backing, transport, warm_reads="off"
    )  # else so small a file is read from RAM
    path = mount.path / "f"
    reader = os.open(path, os.O_RDONLY)
    if mount.status()["lane_choices"].get("passthrough"):
        assert error_of(os.open, path, os.O_RDWR) == errno.EBUSY
    else:
        writer = os.open(path, os.O_RDWR)
        with mmap.mmap(writer, 0) as mapping:
            mapping[0:5] = b"above"
            mapping.flush()
        assert (backing / "f").read_bytes() == b"below" * 1000
        os.close(writer)
    os.close(reader)
    eventually(lambda: error_of(lambda: os.close(os.open(path, os.O_RDWR))) == 0)
