"""Several users: permission checks, ownership of what they make, umask, set-gid and sticky
directories, set-uid bits.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.rig.processes import NOBODY, SOMEBODY, errno_as, in_child

clause = pytest.mark.clause
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become other users")


def write_new(path: Path, data: bytes = b"x") -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    os.write(fd, data)
    os.close(fd)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@clause("S48")
def test_files_belong_to_the_caller(d: Path) -> None:
    def make() -> None:
        write_new(d / "file")
        os.mkdir(d / "dir")
        os.symlink("x", d / "link")
        os.mkfifo(d / "fifo")

    in_child(make, SOMEBODY, 4321)
    for name in ("file", "dir", "link", "fifo"):
        st = os.lstat(d / name)
        assert (name, st.st_uid, st.st_gid) == (name, SOMEBODY, 4321)


@clause("S48")
def test_umask_of_the_caller(d: Path) -> None:
    def make() -> None:
        os.umask(0o027)
        write_new(d / "file")
        os.mkdir(d / "dir", 0o777)
        os.mkfifo(d / "fifo", 0o666)

    in_child(make, SOMEBODY, SOMEBODY)
    assert (mode_of(d / "file"), mode_of(d / "dir"), mode_of(d / "fifo")) == (0o640, 0o750, 0o640)


@clause("S48")
def test_read_and_write_permission(d: Path) -> None:
    write_new(d / "secret")
    (d / "secret").chmod(0o600)
    (d / "shown").write_bytes(b"shown")
    (d / "shown").chmod(0o644)
    assert errno_as(NOBODY, lambda: (d / "secret").read_bytes()) == errno.EACCES
    assert in_child(lambda: (d / "shown").read_bytes(), NOBODY, NOBODY) == b"shown"
    assert errno_as(NOBODY, lambda: (d / "shown").write_bytes(b"")) == errno.EACCES
    assert errno_as(NOBODY, lambda: os.truncate(d / "shown", 0)) == errno.EACCES
    assert (d / "shown").read_bytes() == b"shown"


@clause("S487")
def test_trusted_attributes_are_listed_to_root_alone(d: Path) -> None:
    """The kernel filters no list of a FUSE file system; programs that copy attributes then fail."""
    write_new(d / "f")
    (d / "sub").mkdir()
    for path in (d / "f", d / "sub"):
        os.setxattr(path, "user.seen", b"1")
        os.setxattr(path, "trusted.hidden", b"2")
        assert {"user.seen", "trusted.hidden"} <= set(os.listxattr(path))
        assert in_child(partial(listed, path), NOBODY, NOBODY) == b"user.seen"
        hidden = partial(os.getxattr, path, "trusted.hidden")
        assert errno_as(NOBODY, hidden) == errno.ENODATA


def listed(path: Path) -> bytes:
    return b" ".join(map(os.fsencode, os.listxattr(path)))


@clause("S48")
def test_group_and_supplementary_groups(d: Path) -> None:
    write_new(d / "f")
    os.chown(d / "f", 0, 777)
    (d / "f").chmod(0o660)
    assert errno_as(NOBODY, lambda: (d / "f").read_bytes()) == errno.EACCES
    assert errno_as(NOBODY, lambda: (d / "f").read_bytes(), gid=777) == 0
    assert errno_as(NOBODY, lambda: (d / "f").write_bytes(b"y"), groups=(777,)) == 0


@clause("S48")
def test_directory_permissions(d: Path) -> None:
    (d / "closed").mkdir(mode=0o700)
    (d / "closed" / "f").touch()
    (d / "listed").mkdir()
    (d / "listed").chmod(0o744)
    (d / "listed" / "f").touch()
    (d / "fixed").mkdir(mode=0o755)
    (d / "fixed" / "f").touch()
    assert errno_as(NOBODY, lambda: os.listdir(d / "closed")) == errno.EACCES
    assert errno_as(NOBODY, lambda: os.stat(d / "closed" / "f")) == errno.EACCES
    assert in_child(lambda: os.listdir(d / "listed"), NOBODY, NOBODY) == ["f"]
    assert errno_as(NOBODY, lambda: os.stat(d / "listed" / "f")) == errno.EACCES
    assert errno_as(NOBODY, lambda: write_new(d / "fixed" / "new")) == errno.EACCES
    assert errno_as(NOBODY, lambda: os.unlink(d / "fixed" / "f")) == errno.EACCES
    assert errno_as(NOBODY, lambda: os.rename(d / "fixed" / "f", d / "fixed" / "g")) == errno.EACCES
    assert errno_as(NOBODY, lambda: os.mkdir(d / "fixed" / "sub")) == errno.EACCES


@clause("S48")
def test_only_the_owner_changes_attributes(d: Path) -> None:
    write_new(d / "f")
    (d / "f").chmod(0o666)
    assert errno_as(NOBODY, lambda: os.chmod(d / "f", 0o777)) == errno.EPERM
    assert errno_as(NOBODY, lambda: os.chown(d / "f", NOBODY, -1)) == errno.EPERM
    assert errno_as(NOBODY, lambda: os.utime(d / "f", ns=(1, 1))) == errno.EPERM
    assert errno_as(NOBODY, lambda: os.utime(d / "f")) == 0
    os.chown(d / "f", NOBODY, NOBODY)
    assert errno_as(NOBODY, lambda: os.chmod(d / "f", 0o600)) == 0
    assert errno_as(NOBODY, lambda: os.utime(d / "f", ns=(1, 1))) == 0
    assert errno_as(NOBODY, lambda: os.chown(d / "f", -1, 888)) == errno.EPERM
    assert errno_as(NOBODY, lambda: os.chown(d / "f", -1, 888), groups=(888,)) == 0


@clause("S48")
def test_permission_is_checked_at_open_not_at_write(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o600)

    def use() -> int:
        return os.write(fd, b"through an open descriptor")

    assert in_child(use, NOBODY, NOBODY) == 26
    os.close(fd)


@clause("S48")
def test_create_without_any_permission_bit(d: Path) -> None:
    def make() -> bytes:
        fd = os.open(d / "f", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0)
        os.write(fd, b"mine")
        data = os.pread(fd, 10, 0)
        os.close(fd)
        return data

    assert in_child(make, NOBODY, NOBODY) == b"mine"
    assert errno_as(NOBODY, lambda: (d / "f").read_bytes()) == errno.EACCES


@clause("S48")
def test_set_gid_directory_hands_on_its_group(d: Path) -> None:
    (d / "team").mkdir()
    os.chown(d / "team", 0, 777)
    (d / "team").chmod(0o2777)

    def make() -> None:
        write_new(d / "team" / "file")
        os.mkdir(d / "team" / "dir", 0o755)

    in_child(make, SOMEBODY, SOMEBODY)
    assert ((d / "team" / "file").stat().st_uid, (d / "team" / "file").stat().st_gid) == (
        SOMEBODY,
        777,
    )
    assert ((d / "team" / "dir").stat().st_gid, mode_of(d / "team" / "dir") & stat.S_ISGID) == (
        777,
        stat.S_ISGID,
    )


@clause("S48")
def test_sticky_directory_protects(d: Path) -> None:
    (d / "tmp").mkdir()
    (d / "tmp").chmod(0o1777)
    in_child(lambda: write_new(d / "tmp" / "mine"), SOMEBODY, SOMEBODY)
    assert errno_as(NOBODY, lambda: os.unlink(d / "tmp" / "mine")) in (errno.EPERM, errno.EACCES)
    assert errno_as(NOBODY, lambda: os.rename(d / "tmp" / "mine", d / "tmp" / "other")) in (
        errno.EPERM,
        errno.EACCES,
    )
    assert errno_as(SOMEBODY, lambda: os.unlink(d / "tmp" / "mine")) == 0


@clause("S42")
def test_write_clears_set_uid_and_set_gid(d: Path) -> None:
    write_new(d / "f")
    (d / "f").chmod(0o6777)
    assert errno_as(NOBODY, lambda: (d / "f").open("ab").close()) == 0
    assert mode_of(d / "f") == 0o6777

    def append() -> None:
        with open(d / "f", "ab") as file:
            file.write(b"y")

    in_child(append, NOBODY, NOBODY)
    assert mode_of(d / "f") == 0o777


def cut_by_opening(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


def echo(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(fd, b"\n")
    os.close(fd)


def overwrite(path: Path) -> None:
    with path.open("rb+") as file:
        file.write(b"y")


def cut_open(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(1)


CHANGES: dict[str, Callable[[Path], object]] = {
    "open with O_TRUNC": cut_by_opening,
    "echo >": echo,
    "truncate": lambda path: os.truncate(path, 1),
    "ftruncate": cut_open,
    "write": overwrite,
}


@clause("S42")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("permissions", [0o644, 0o744, 0o654, 0o755], ids=oct)
def test_a_change_by_the_owner_clears_set_uid_and_set_gid(
    d: Path, change: str, permissions: int
) -> None:
    write_new(d / "f", b"some bytes")
    os.chown(d / "f", NOBODY, NOBODY)
    (d / "f").chmod(0o6000 | permissions)
    in_child(lambda: CHANGES[change](d / "f"), NOBODY, NOBODY)
    without_meaning = 0 if permissions & stat.S_IXGRP else stat.S_ISGID
    assert oct(mode_of(d / "f")) == oct(permissions | without_meaning)


@clause("S42")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_root_leaves_set_uid_and_set_gid(d: Path, change: str) -> None:
    write_new(d / "f", b"some bytes")
    (d / "f").chmod(0o6755)
    CHANGES[change](d / "f")
    assert mode_of(d / "f") == 0o6755


@clause("S42")
def test_allocation_and_copies_by_who_may_write_clear_set_uid_and_set_gid(d: Path) -> None:
    write_new(d / "source", b"some bytes")
    (d / "source").chmod(0o644)
    for name in ("allocated", "copied"):
        write_new(d / name)
        (d / name).chmod(0o6777)

    def change() -> None:
        with open(d / "allocated", "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, 100)
        with open(d / "copied", "rb+") as file, open(d / "source", "rb") as source:
            os.copy_file_range(source.fileno(), file.fileno(), 4)

    in_child(change, NOBODY, NOBODY)
    assert (mode_of(d / "allocated"), mode_of(d / "copied")) == (0o777, 0o777)


@clause("S42")
def test_chown_clears_set_uid_and_set_gid(d: Path) -> None:
    write_new(d / "f")
    os.chown(d / "f", NOBODY, NOBODY)
    (d / "f").chmod(0o6755)
    in_child(lambda: os.chown(d / "f", -1, 888), NOBODY, NOBODY, (888,))
    assert mode_of(d / "f") == 0o755


@clause("S42")
def test_chmod_by_a_stranger_to_the_group_drops_set_gid(d: Path) -> None:
    write_new(d / "f")
    os.chown(d / "f", NOBODY, 777)
    in_child(lambda: os.chmod(d / "f", 0o2755), NOBODY, NOBODY)
    assert mode_of(d / "f") == 0o755


@clause("S48")
def test_access_answers_for_the_real_user(d: Path) -> None:
    write_new(d / "f")
    (d / "f").chmod(0o640)
    assert in_child(
        lambda: (os.access(d / "f", os.R_OK), os.access(d / "f", os.F_OK)), NOBODY, NOBODY
    ) == (False, True)
    assert os.access(d / "f", os.W_OK)


@clause("S42")
@pytest.mark.parametrize("owner", [(-1, -1), (0, -1), (-1, 0), (NOBODY, NOBODY)])
def test_every_chown_clears_set_uid_even_one_that_changes_nothing(
    d: Path, owner: tuple[int, int]
) -> None:
    write_new(d / "f")
    (d / "f").chmod(0o4711)
    os.chown(d / "f", *owner)
    assert mode_of(d / "f") == 0o711
