"""Names: rename with flags, links, symlinks, fifos, unlinked files, odd names and paths."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from tests.rig.processes import Child
from tests.rig.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, error_of, rename2

clause = pytest.mark.clause


# -- rename


@clause("S35")
def test_rename_moves_content_and_identity(d: Path) -> None:
    (d / "a").write_bytes(b"A")
    ino = (d / "a").stat().st_ino
    os.rename(d / "a", d / "b")
    assert not (d / "a").exists()
    assert (d / "b").read_bytes() == b"A"
    assert (d / "b").stat().st_ino == ino


@clause("S35")
def test_rename_replaces(d: Path) -> None:
    (d / "a").write_bytes(b"A")
    (d / "b").write_bytes(b"B")
    os.rename(d / "a", d / "b")
    assert os.listdir(d) == ["b"]
    assert (d / "b").read_bytes() == b"A"


@clause("S35", "S39")
def test_rename_over_an_open_file_leaves_it_to_its_readers(d: Path) -> None:
    (d / "a").write_bytes(b"A")
    (d / "b").write_bytes(b"B")
    with open(d / "b", "rb") as reader:
        os.rename(d / "a", d / "b")
        assert reader.read() == b"B"
        assert os.fstat(reader.fileno()).st_nlink == 0


@clause("S35", "S11")
def test_rename_while_open_for_writing(d: Path) -> None:
    with open(d / "tmp", "wb", buffering=0) as file:
        file.write(b"one")
        os.rename(d / "tmp", d / "final")
        file.write(b"two")
        assert (d / "final").read_bytes() == b"onetwo"
    assert (d / "final").read_bytes() == b"onetwo"
    assert not (d / "tmp").exists()


@clause("S35")
def test_rename_of_two_links_of_one_file_does_nothing(d: Path) -> None:
    (d / "a").touch()
    os.link(d / "a", d / "b")
    os.rename(d / "a", d / "b")
    assert sorted(os.listdir(d)) == ["a", "b"]


@clause("S35")
def test_rename_of_directories(d: Path) -> None:
    (d / "x").mkdir()
    (d / "x" / "f").write_bytes(b"deep")
    (d / "empty").mkdir()
    (d / "full").mkdir()
    (d / "full" / "f").touch()
    (d / "file").touch()
    assert error_of(os.rename, d / "x", d / "full") in (errno.ENOTEMPTY, errno.EEXIST)
    assert error_of(os.rename, d / "x", d / "file") == errno.ENOTDIR
    assert error_of(os.rename, d / "file", d / "x") == errno.EISDIR
    assert error_of(os.rename, d / "x", d / "x" / "below") == errno.EINVAL
    os.rename(d / "x", d / "empty")
    assert (d / "empty" / "f").read_bytes() == b"deep"
    os.rename(d / "empty", d / "full" / "moved")
    assert (d / "full" / "moved" / "f").read_bytes() == b"deep"


@clause("S35")
def test_rename_missing(d: Path) -> None:
    assert error_of(os.rename, d / "no", d / "other") == errno.ENOENT
    (d / "a").touch()
    assert error_of(os.rename, d / "a", d / "no" / "b") == errno.ENOENT


@clause("S35")
def test_rename_noreplace(d: Path) -> None:
    (d / "a").write_bytes(b"A")
    (d / "b").write_bytes(b"B")
    assert error_of(rename2, d / "a", d / "b", RENAME_NOREPLACE) == errno.EEXIST
    rename2(d / "a", d / "c", RENAME_NOREPLACE)
    assert sorted(os.listdir(d)) == ["b", "c"]


@clause("S35")
def test_rename_exchange_files_and_directories(d: Path) -> None:
    (d / "a").write_bytes(b"A")
    (d / "b").mkdir()
    (d / "b" / "in").write_bytes(b"B")
    rename2(d / "a", d / "b", RENAME_EXCHANGE)
    assert (d / "a" / "in").read_bytes() == b"B"
    assert (d / "b").read_bytes() == b"A"
    assert error_of(rename2, d / "a", d / "no", RENAME_EXCHANGE) == errno.ENOENT


@clause("S35")
def test_link_counts_of_directories_follow_renames(d: Path) -> None:
    for name in ("x", "y"):
        (d / name).mkdir()
    (d / "x" / "sub").mkdir()
    before = (d / "y").stat().st_nlink
    os.rename(d / "x" / "sub", d / "y" / "sub")
    assert (d / "y").stat().st_nlink in (before + 1, 1)
    os.rmdir(d / "y" / "sub")
    assert (d / "y").stat().st_nlink == before


# -- links


@clause("S36")
def test_hard_links_are_one_file(d: Path) -> None:
    (d / "a").write_bytes(b"one")
    os.link(d / "a", d / "b")
    assert (d / "a").stat().st_ino == (d / "b").stat().st_ino
    assert (d / "a").stat().st_nlink == 2
    with open(d / "b", "ab") as file:
        file.write(b"two")
    assert (d / "a").read_bytes() == b"onetwo"
    os.chmod(d / "a", 0o640)
    assert stat.S_IMODE((d / "b").stat().st_mode) == 0o640
    os.unlink(d / "a")
    assert (d / "b").read_bytes() == b"onetwo"
    assert (d / "b").stat().st_nlink == 1


@clause("S36")
def test_link_errors(d: Path) -> None:
    (d / "a").touch()
    (d / "b").touch()
    assert error_of(os.link, d / "a", d / "b") == errno.EEXIST
    assert error_of(os.link, d, d / "dir-link") == errno.EPERM
    assert error_of(os.link, d / "no", d / "c") == errno.ENOENT


@clause("S36")
def test_link_of_a_file_being_written(d: Path) -> None:
    with open(d / "a", "wb", buffering=0) as file:
        file.write(b"one")
        os.link(d / "a", d / "b")
        file.write(b"two")
    assert (d / "b").read_bytes() == b"onetwo"


@clause("S37")
def test_symlinks(d: Path) -> None:
    target = "x/" * 500
    os.symlink(target, d / "dangling")
    assert os.readlink(d / "dangling") == target
    assert os.lstat(d / "dangling").st_size == 1000
    assert error_of(os.stat, d / "dangling") == errno.ENOENT
    (d / "f").write_bytes(b"F")
    os.symlink("f", d / "good")
    assert (d / "good").read_bytes() == b"F"
    os.symlink("loop", d / "loop")
    assert error_of(os.stat, d / "loop") == errno.ELOOP
    assert error_of(os.symlink, "f", d / "good") == errno.EEXIST
    os.unlink(d / "good")
    assert (d / "f").exists()


@clause("S37")
def test_link_of_a_symlink_is_the_symlink(d: Path) -> None:
    os.symlink("nowhere", d / "s")
    os.link(d / "s", d / "t", follow_symlinks=False)
    assert os.readlink(d / "t") == "nowhere"


@clause("S5", "S52")
def test_symlinks_out_lead_where_they_say(d: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"outside")
    os.symlink(tmp_path / "outside", d / "absolute")
    os.symlink("/" + "../" * 30 + "etc/hostname", d / "many")
    assert (d / "absolute").read_bytes() == b"outside"
    os.unlink(d / "absolute")
    assert (tmp_path / "outside").exists()
    with open("/etc/hostname", "rb") as real:
        assert (d / "many").read_bytes() == real.read()


# -- special files


@clause("S38")
def test_fifo_between_processes(d: Path) -> None:
    os.mkfifo(d / "p", 0o600)
    assert stat.S_ISFIFO((d / "p").stat().st_mode)
    writer = Child(lambda: (d / "p").write_bytes(b"through the fifo"))
    assert (d / "p").read_bytes() == b"through the fifo"
    writer.result()


@clause("S38")
def test_socket_file(d: Path) -> None:
    os.chdir(d)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s")
            assert stat.S_ISSOCK(os.stat("s").st_mode)
            server.listen()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect("s")
    finally:
        os.chdir("/")


@clause("S38")
def test_mknod_of_a_regular_file_and_a_device(d: Path) -> None:
    os.mknod(d / "f", 0o640 | stat.S_IFREG)
    assert (d / "f").read_bytes() == b""
    if os.geteuid() == 0:
        os.mknod(d / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        st = (d / "null").stat()
        assert (stat.S_ISCHR(st.st_mode), st.st_rdev) == (True, os.makedev(1, 3))


# -- unlink


@clause("S39")
def test_unlinked_file_lives_on_in_its_descriptors(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, b"before")
    os.unlink(d / "f")
    assert os.listdir(d) == []
    os.write(fd, b" after")
    assert os.pread(fd, 100, 0) == b"before after"
    st = os.fstat(fd)
    assert (st.st_nlink, st.st_size) == (0, 12)
    os.ftruncate(fd, 3)
    os.fchmod(fd, 0o400)
    assert os.pread(fd, 100, 0) == b"bef"
    os.close(fd)


@clause("S39")
def test_name_of_an_unlinked_open_file_can_be_used_again(d: Path) -> None:
    old = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o600)
    os.write(old, b"old")
    os.unlink(d / "f")
    (d / "f").write_bytes(b"new")
    assert os.pread(old, 10, 0) == b"old"
    os.pwrite(old, b"OLD", 0)
    os.close(old)
    assert (d / "f").read_bytes() == b"new"


@clause("S39")
def test_removed_directory_that_is_open(d: Path) -> None:
    (d / "x").mkdir()
    fd = os.open(d / "x", os.O_RDONLY | os.O_DIRECTORY)
    (d / "x").rmdir()
    assert os.listdir(fd) == []
    assert error_of(lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd)) == errno.ENOENT
    os.close(fd)


@clause("S39")
def test_unlink_errors(d: Path) -> None:
    assert error_of(os.unlink, d / "no") == errno.ENOENT
    assert error_of(os.unlink, d) in (errno.EISDIR, errno.EPERM)
    (d / "f").touch()
    assert error_of(os.rmdir, d / "f") == errno.ENOTDIR
    assert error_of(os.rmdir, d) in (errno.ENOTEMPTY, errno.EEXIST)
    assert error_of(os.mkdir, d / "f") == errno.EEXIST


# -- odd names


@clause("S47")
def test_names_of_255_bytes(d: Path) -> None:
    name = "n" * 255
    (d / name).write_bytes(b"x")
    (d / ("d" * 255)).mkdir()
    os.rename(d / name, d / ("m" * 255))
    assert sorted(os.listdir(d)) == ["d" * 255, "m" * 255]
    assert error_of(os.mkdir, d / ("d" * 256)) == errno.ENAMETOOLONG
    assert error_of(os.stat, d / ("d" * 256)) == errno.ENAMETOOLONG


@clause("S47")
def test_names_of_any_bytes(d: Path) -> None:
    here = os.fsencode(d)
    names = [
        b"\xff\xfe",
        b"caf\xe9",
        "größe-模型".encode(),
        b"new\nline",
        b" ",
        b"-rf",
        b"a'\"$`\\b",
        b"\x01\x7f",
        b"...",
        b"*?[x]",
    ]
    for name in names:
        with open(here + b"/" + name, "wb") as file:
            file.write(name)
    assert sorted(os.listdir(here)) == sorted(names)
    for name in names:
        with open(here + b"/" + name, "rb") as file:
            assert file.read() == name
        os.rename(here + b"/" + name, here + b"/" + name + b"2")
    assert sorted(os.listdir(here)) == sorted(name + b"2" for name in names)


@clause("S52")
def test_dots_and_slashes(d: Path) -> None:
    (d / "x" / "y").mkdir(parents=True)
    (d / "f").write_bytes(b"F")
    assert Path(f"{d}/x/../f").read_bytes() == b"F"
    assert Path(f"{d}//x/./y/../..///f").read_bytes() == b"F"
    assert os.stat(f"{d}/x/y/..").st_ino == os.stat(d / "x").st_ino
    assert error_of(os.rmdir, f"{d}/x/.") == errno.EINVAL
    assert error_of(os.rmdir, f"{d}/x/..") == errno.ENOTEMPTY
    assert error_of(os.stat, f"{d}/f/") == errno.ENOTDIR
    assert error_of(os.stat, f"{d}/no/../f") == errno.ENOENT


@clause("S52")
def test_deep_directories(d: Path) -> None:
    path = d
    for level in range(60):
        path = path / f"level{level}"
    path.mkdir(parents=True)
    (path / "f").write_bytes(b"deep")
    os.rename(d / "level0", d / "moved")
    assert (d / "moved" / path.relative_to(d / "level0") / "f").read_bytes() == b"deep"
