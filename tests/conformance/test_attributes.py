"""Attributes, extended attributes, statfs."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from tests.rig.mounts import MakeMount
from tests.rig.syscalls import UTIME_NOW, UTIME_OMIT, utimens
from tests.rig.targets import Target

clause = pytest.mark.clause
NS = 10**9
LOOKS_MAX = 60
LOOK_AGAIN_S = 1.0


@clause("S41")
def test_chmod_and_fchmod(d: Path) -> None:
    (d / "f").touch()
    os.chmod(d / "f", 0o4751)
    assert stat.S_IMODE((d / "f").stat().st_mode) == 0o4751
    with open(d / "f", "rb") as file:
        os.fchmod(file.fileno(), 0o604)
    assert stat.S_IMODE((d / "f").stat().st_mode) == 0o604
    (d / "x").mkdir()
    os.chmod(d / "x", 0o3755)
    assert stat.S_IMODE((d / "x").stat().st_mode) == 0o3755


@clause("S41")
def test_chown_and_lchown(d: Path) -> None:
    (d / "f").touch()
    (d / "s").symlink_to("f")
    os.chown(d / "f", 1234, 2345)
    os.chown(d / "s", 77, 88, follow_symlinks=False)
    assert ((d / "f").stat().st_uid, (d / "f").stat().st_gid) == (1234, 2345)
    assert (os.lstat(d / "s").st_uid, os.lstat(d / "s").st_gid) == (77, 88)
    os.chown(d / "f", -1, 99)
    assert ((d / "f").stat().st_uid, (d / "f").stat().st_gid) == (1234, 99)


@clause("S41")
def test_times_have_nanoseconds(d: Path) -> None:
    (d / "f").touch()
    os.utime(d / "f", ns=(1_234_567_890_123_456_789, 987_654_321_987_654_321))
    st = (d / "f").stat()
    assert (st.st_atime_ns, st.st_mtime_ns) == (1_234_567_890_123_456_789, 987_654_321_987_654_321)
    with open(d / "f", "rb") as file:
        os.utime(file.fileno(), ns=(5, 6))
    assert (d / "f").stat().st_mtime_ns == 6


@clause("S41")
def test_times_of_symlinks_and_directories(d: Path) -> None:
    (d / "s").symlink_to("nowhere")
    os.utime(d / "s", ns=(7, 8), follow_symlinks=False)
    assert os.lstat(d / "s").st_mtime_ns == 8
    (d / "x").mkdir()
    os.utime(d / "x", ns=(9, 10))
    assert (d / "x").stat().st_mtime_ns == 10


@clause("S41")
def test_utime_omit_and_now(d: Path) -> None:
    (d / "f").touch()
    os.utime(d / "f", ns=(100, 200))
    utimens(d / "f", (0, UTIME_OMIT), (7, 5))
    st = (d / "f").stat()
    assert (st.st_atime_ns, st.st_mtime_ns) == (100, 7 * NS + 5)
    before = time.time_ns()
    utimens(d / "f", (0, UTIME_NOW), (0, UTIME_OMIT))
    st = (d / "f").stat()
    assert (
        before - NS < st.st_atime_ns < time.time_ns() + NS
    )  # the clock of file systems has coarse ticks
    assert st.st_mtime_ns == 7 * NS + 5


@clause("S41")
def test_what_is_touched_is_not_older_than_what_was_done_to_it_before(d: Path) -> None:
    """The clock of programs is up to a tick ahead of the kernel's own."""
    path = d / "f"

    def touched(what: Path) -> tuple[int, int]:
        before = what.stat().st_mtime_ns
        os.utime(what)
        return before, what.stat().st_mtime_ns

    for _ in range(100):
        with path.open("wb", buffering=0) as file:
            made = touched(path)
            file.write(b"x")
        written = touched(path)
        path.unlink()
        for before, after in (made, written, touched(d)):
            assert before <= after


@clause("S41")
def test_write_and_truncate_change_mtime_and_ctime(d: Path) -> None:
    (d / "f").write_bytes(b"0123")
    os.utime(d / "f", ns=(1, 1))
    before = (d / "f").stat().st_ctime_ns
    with open(d / "f", "ab") as file:
        file.write(b"x")
    assert (d / "f").stat().st_mtime_ns > 1
    assert (d / "f").stat().st_ctime_ns >= before
    os.utime(d / "f", ns=(1, 1))
    os.truncate(d / "f", 2)
    assert (d / "f").stat().st_mtime_ns > 1


@clause("S41")
def test_chmod_and_link_change_ctime_only(d: Path) -> None:
    (d / "f").touch()
    os.utime(d / "f", ns=(1, 1))
    before = (d / "f").stat().st_ctime_ns
    os.chmod(d / "f", 0o600)
    st = (d / "f").stat()
    assert st.st_mtime_ns == 1
    assert st.st_ctime_ns >= before
    os.link(d / "f", d / "g")
    assert (d / "f").stat().st_mtime_ns == 1


@clause("S41")
def test_chown_to_nobody_changes_ctime(d: Path) -> None:
    (d / "f").touch()
    before = (d / "f").stat().st_ctime_ns
    while (
        time.time_ns() - before < 20_000_000
    ):  # file systems take the time from a clock of coarse ticks
        os.sched_yield()
    os.chown(d / "f", -1, -1)
    assert (d / "f").stat().st_ctime_ns > before


@clause("S41")
@pytest.mark.parametrize("owner", [-1, 1234])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_chown_takes_set_uid_away(d: Path, owner: int) -> None:
    (d / "f").touch()
    (d / "f").chmod(0o4711)
    os.chown(d / "f", owner, -1)
    assert stat.S_IMODE((d / "f").stat().st_mode) == 0o711


@clause("S41")
def test_times_set_while_open_survive_close(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, b"x")
    os.utime(fd, ns=(11, 12))
    os.close(fd)
    assert (d / "f").stat().st_mtime_ns == 12


@clause("S41")
def test_inode_numbers_are_unique_and_stay(d: Path) -> None:
    for number in range(50):
        (d / f"f{number}").touch()
    inodes = {name: (d / name).stat().st_ino for name in os.listdir(d)}
    assert len(set(inodes.values())) == 50
    (d / "f0").write_bytes(b"x")
    assert (d / "f0").stat().st_ino == inodes["f0"]


@clause("S41")
def test_blocks_are_told(d: Path) -> None:
    (d / "f").write_bytes(b"x" * 100_000)
    with open(d / "f", "rb") as file:
        os.fsync(file.fileno())
    assert (d / "f").stat().st_blocks * 512 >= 98_304


@clause("S40")
def test_xattrs_of_files_and_directories(d: Path) -> None:
    (d / "f").touch()
    (d / "x").mkdir()
    for path in (d / "f", d / "x"):
        os.setxattr(path, "user.one", b"1")
        os.setxattr(path, "user.two", bytes(range(256)))
        os.setxattr(path, "user.empty", b"")
        assert {n for n in os.listxattr(path) if n.startswith("user.")} == {
            "user.one",
            "user.two",
            "user.empty",
        }
        assert os.getxattr(path, "user.two") == bytes(range(256))
        assert os.getxattr(path, "user.empty") == b""
        os.setxattr(path, "user.one", b"other")
        assert os.getxattr(path, "user.one") == b"other"
        os.removexattr(path, "user.one")
        with pytest.raises(OSError) as caught:
            os.getxattr(path, "user.one")
        assert caught.value.errno == errno.ENODATA


@clause("S40")
def test_xattr_create_and_replace(d: Path) -> None:
    (d / "f").touch()
    with pytest.raises(OSError) as caught:
        os.setxattr(d / "f", "user.a", b"1", os.XATTR_REPLACE)
    assert caught.value.errno == errno.ENODATA
    os.setxattr(d / "f", "user.a", b"1", os.XATTR_CREATE)
    with pytest.raises(OSError) as caught:
        os.setxattr(d / "f", "user.a", b"2", os.XATTR_CREATE)
    assert caught.value.errno == errno.EEXIST
    os.setxattr(d / "f", "user.a", b"3", os.XATTR_REPLACE)
    assert os.getxattr(d / "f", "user.a") == b"3"
    with pytest.raises(OSError) as caught:
        os.removexattr(d / "f", "user.no")
    assert caught.value.errno == errno.ENODATA


@clause("S40")
def test_xattrs_while_open_and_after_rename(d: Path) -> None:
    with open(d / "f", "wb") as file:
        os.setxattr(file.fileno(), "user.a", b"1")
        file.write(b"content")
    os.rename(d / "f", d / "g")
    assert os.getxattr(d / "g", "user.a") == b"1"
    (d / "h").write_bytes(b"")
    os.rename(d / "h", d / "g")
    assert "user.a" not in os.listxattr(d / "g")


@clause("S43")
def test_statfs(d: Path) -> None:
    st = os.statvfs(d)
    assert st.f_bsize >= 512
    assert st.f_blocks >= st.f_bfree >= st.f_bavail > 0
    assert st.f_namemax == 255


@clause("S43")
def test_statfs_tells_the_backing_file_systems_space(d: Path, target: Target) -> None:
    if target.backing is None:
        pytest.skip("has no backing directory")
    for _ in range(LOOKS_MAX):  # tests beside this one write to the same disk
        below = os.statvfs(target.backing)
        above = os.statvfs(d)
        assert above.f_blocks * above.f_frsize == below.f_blocks * below.f_frsize
        if abs(above.f_bavail * above.f_frsize - below.f_bavail * below.f_frsize) < 1 << 30:
            return
        threading.Event().wait(LOOK_AGAIN_S)
    pytest.fail("the mount never tells how much room there is")


@clause("S395")
@pytest.mark.every_lane
def test_reading_moves_no_access_time(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport)
    path = mount.path / "f"
    path.write_bytes(b"x" * (2 << 20))
    os.utime(path, ns=(5 * NS, 10 * NS))
    for _ in range(2):
        assert path.read_bytes()
        assert os.stat(path).st_atime_ns == 5 * NS
        mount.flush()
