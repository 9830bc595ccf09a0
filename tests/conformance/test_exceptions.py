"""The exceptions of docs/SEMANTICS.md: either what tmpfs does, or exactly the stated errno."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

import pytest

from tests.rig.syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    RENAME_WHITEOUT,
    fallocate,
    link_descriptor,
    rename2,
)
from tests.rig.targets import Target

clause = pytest.mark.clause
FS_IOC_SETFLAGS = 0x40086602


@clause("X1", "S31")
def test_tmpfile_and_linkat(d: Path, target: Target) -> None:
    if not target.can("tmpfile"):
        with pytest.raises(OSError) as caught:
            os.open(d, os.O_TMPFILE | os.O_RDWR, 0o600)
        assert caught.value.errno == errno.EOPNOTSUPP
        return
    fd = os.open(d, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, b"late name")
    assert os.listdir(d) == []
    assert os.fstat(fd).st_nlink == 0
    link_descriptor(fd, d / "named")
    os.close(fd)
    assert (d / "named").read_bytes() == b"late name"
    assert (d / "named").stat().st_nlink == 1


@clause("X2")
def test_fallocate(d: Path, target: Target) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, b"x" * 8192)
    if target.can("fallocate"):
        fallocate(fd, 0, 0, 20_000)
        assert os.fstat(fd).st_size == 20_000
        fallocate(fd, FALLOC_KEEP_SIZE, 20_000, 4096)
        assert os.fstat(fd).st_size == 20_000
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 4096, 4096)
        assert os.pread(fd, 8192, 0) == b"x" * 4096 + bytes(4096)
    else:
        with pytest.raises(OSError) as caught:
            fallocate(fd, 0, 0, 20_000)
        assert caught.value.errno == errno.EOPNOTSUPP
    os.posix_fallocate(fd, 0, 30_000)
    assert os.fstat(fd).st_size == 30_000
    os.close(fd)


@clause("X3")
def test_holes_can_be_looked_for(d: Path, target: Target) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o600)
    os.pwrite(fd, b"x" * 4096, 1 << 20)
    hole = os.lseek(fd, 0, os.SEEK_HOLE)
    data = os.lseek(fd, 0, os.SEEK_DATA)
    if target.can("seek_hole"):
        assert (hole, data) == (0, 1 << 20)
    else:
        assert (hole, data) == ((1 << 20) + 4096, 0)
    with pytest.raises(OSError) as caught:
        os.lseek(fd, 2 << 20, os.SEEK_DATA)
    assert caught.value.errno == errno.ENXIO
    os.close(fd)


@clause("X4")
def test_whiteout_and_chattr(d: Path, target: Target) -> None:
    (d / "f").touch()
    if target.can("whiteout"):
        return
    with pytest.raises(OSError) as caught:
        rename2(d / "f", d / "g", RENAME_WHITEOUT)
    assert caught.value.errno == errno.EINVAL
    with open(d / "f", "rb") as file, pytest.raises(OSError) as caught:
        fcntl.ioctl(file.fileno(), FS_IOC_SETFLAGS, struct.pack("l", 0))
    assert caught.value.errno == errno.ENOTTY


@clause("X10")
@pytest.mark.skipif(os.getuid() != 0, reason="makes a device")
def test_device_files_are_not_devices(d: Path, target: Target) -> None:
    os.mknod(d / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    if target.can("devices"):  # where the machine's own mount options allow it
        return
    assert os.statvfs(d).f_flag & os.ST_NODEV
    assert os.statvfs(d).f_flag & os.ST_NOSUID
    with pytest.raises(OSError) as caught:
        os.open(d / "null", os.O_WRONLY)
    assert caught.value.errno == errno.EACCES
    assert (d / "null").lstat().st_rdev == os.makedev(1, 3)


@clause("X5")
def test_posix_acls(d: Path, target: Target) -> None:
    (d / "f").touch()
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, 6, 0xFFFFFFFF) for tag in (1, 4, 32)
    )
    if target.can("acl"):
        os.setxattr(d / "f", "system.posix_acl_access", acl)
        return
    with pytest.raises(OSError) as caught:
        os.setxattr(d / "f", "system.posix_acl_access", acl)
    assert caught.value.errno == errno.EOPNOTSUPP


@clause("S269")
@pytest.mark.parametrize("name", ["security.selinux", "security.ima", "security.evm"])
def test_labels_are_not_supported(d: Path, target: Target, name: str) -> None:
    if target.can("labels"):
        return
    (d / "f").touch()
    for call in (lambda: os.getxattr(d / "f", name), lambda: os.setxattr(d / "f", name, b"1")):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EOPNOTSUPP
