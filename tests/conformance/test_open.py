"""Open flags, descriptors, offsets."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from tests.rig.processes import Child

clause = pytest.mark.clause


def open_errno(path: Path, flags: int, mode: int = 0o644) -> int:
    try:
        os.close(os.open(path, flags, mode))
    except OSError as error:
        return error.errno or -1
    return 0


@clause("S31", "S13")
def test_what_is_written_is_read(d: Path) -> None:
    (d / "f").write_bytes(b"hello")
    assert (d / "f").read_bytes() == b"hello"
    assert (d / "f").stat().st_size == 5


@clause("S31")
def test_excl_refuses_what_exists(d: Path) -> None:
    (d / "f").touch()
    (d / "s").symlink_to("nowhere")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    assert open_errno(d / "f", flags) == errno.EEXIST
    assert open_errno(d / "s", flags) == errno.EEXIST
    assert open_errno(d / "new", flags) == 0


@clause("S31")
def test_create_of_existing_file_keeps_its_mode(d: Path) -> None:
    os.close(os.open(d / "f", os.O_CREAT | os.O_WRONLY, 0o600))
    os.close(os.open(d / "f", os.O_CREAT | os.O_WRONLY, 0o644))
    assert (d / "f").stat().st_mode & 0o777 == 0o600


@clause("S31")
def test_created_read_only_can_be_written_by_its_creator(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o444)
    assert os.write(fd, b"x") == 1
    os.close(fd)
    assert (d / "f").read_bytes() == b"x"


@clause("S31")
def test_trunc_empties_at_once(d: Path) -> None:
    (d / "f").write_bytes(b"content")
    fd = os.open(d / "f", os.O_WRONLY | os.O_TRUNC)
    assert (d / "f").stat().st_size == 0
    os.write(fd, b"new")
    os.close(fd)
    assert (d / "f").read_bytes() == b"new"


@clause("S31")
def test_trunc_is_seen_by_another_open(d: Path) -> None:
    (d / "f").write_bytes(b"content")
    with open(d / "f", "rb", buffering=0) as reader:
        os.close(os.open(d / "f", os.O_WRONLY | os.O_TRUNC))
        assert reader.read() == b""
        (d / "f").write_bytes(b"abc")
        assert reader.read() == b"abc"


@clause("S31")
def test_missing_file_and_missing_parent(d: Path) -> None:
    assert open_errno(d / "no", os.O_RDONLY) == errno.ENOENT
    assert open_errno(d / "no" / "f", os.O_CREAT | os.O_WRONLY) == errno.ENOENT
    (d / "file").touch()
    assert open_errno(d / "file" / "x", os.O_RDONLY) == errno.ENOTDIR


@clause("S31")
def test_directory_flags(d: Path) -> None:
    (d / "file").touch()
    assert open_errno(d / "file", os.O_RDONLY | os.O_DIRECTORY) == errno.ENOTDIR
    assert open_errno(d, os.O_WRONLY) == errno.EISDIR
    assert open_errno(d, os.O_RDONLY | os.O_DIRECTORY) == 0


@clause("S31", "S37")
def test_nofollow(d: Path) -> None:
    (d / "file").touch()
    (d / "link").symlink_to("file")
    assert open_errno(d / "link", os.O_RDONLY | os.O_NOFOLLOW) == errno.ELOOP
    assert open_errno(d / "link", os.O_RDONLY) == 0


@clause("S31")
def test_access_mode_is_kept_to(d: Path) -> None:
    (d / "f").write_bytes(b"x")
    fd = os.open(d / "f", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"y")
    os.close(fd)
    fd = os.open(d / "f", os.O_WRONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.read(fd, 1)
    os.close(fd)


@clause("S31")
def test_path_descriptor(d: Path) -> None:
    (d / "f").write_bytes(b"x")
    fd = os.open(d / "f", os.O_PATH)
    assert os.fstat(fd).st_size == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.read(fd, 1)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    assert os.read(again, 5) == b"x"
    os.close(again)
    os.close(fd)


@clause("S31")
def test_direct_io(d: Path) -> None:
    import mmap

    block = mmap.mmap(-1, 8192)
    block.write(os.urandom(8192))
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o644)
    assert os.writev(fd, [block]) == 8192
    back = mmap.mmap(-1, 8192)
    assert os.preadv(fd, [back], 0) == 8192
    assert back[:] == block[:]
    os.close(fd)
    assert (d / "f").read_bytes() == block[:]


@clause("S32")
def test_append_goes_to_the_end(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.write(fd, b"one")
    with open(d / "f", "ab") as other:
        other.write(b"two")
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, b"three")
    os.close(fd)
    assert (d / "f").read_bytes() == b"onetwothree"


@clause("S32")
def test_appends_of_several_processes_do_not_overlap(d: Path) -> None:
    lines = 200

    def append(who: int) -> None:
        fd = os.open(d / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for number in range(lines):
            os.write(fd, b"%d:%06d\n" % (who, number))
        os.close(fd)

    children = [Child(partial(append, who)) for who in range(4)]
    for child in children:
        child.result()
    seen = (d / "log").read_bytes().splitlines()
    assert sorted(seen) == sorted(
        b"%d:%06d" % (who, number) for who in range(4) for number in range(lines)
    )


@clause("S49")
def test_dup_shares_the_offset(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    other = os.dup(fd)
    os.write(fd, b"ab")
    os.write(other, b"cd")
    os.close(fd)
    os.write(other, b"ef")
    os.close(other)
    assert (d / "f").read_bytes() == b"abcdef"


@clause("S49")
def test_opens_have_offsets_of_their_own_and_one_content(d: Path) -> None:
    first = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    second = os.open(d / "f", os.O_RDWR)
    os.write(first, b"0123456789")
    assert os.read(second, 4) == b"0123"
    os.pwrite(second, b"XX", 8)
    assert os.pread(first, 10, 0) == b"01234567XX"
    os.close(first)
    os.close(second)


@clause("S49")
def test_many_descriptors_of_one_file(d: Path) -> None:
    (d / "f").write_bytes(b"x" * 100)
    fds = [os.open(d / "f", os.O_RDWR) for _ in range(200)]
    for at, fd in enumerate(fds[:100]):
        os.pwrite(fd, b"%d" % (at % 10), at)
    assert os.pread(fds[-1], 100, 0) == b"0123456789" * 10
    for fd in fds:
        os.close(fd)


@clause("S49", "S13")
def test_other_processes_see_writes_before_close(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(fd, b"early")
    assert Child(lambda: (d / "f").read_bytes()).result() == b"early"
    os.close(fd)


@clause("S49")
def test_descriptor_inherited_by_a_child_outlives_the_parents(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    child = Child(lambda: os.write(fd, b"child"))
    child.result()
    os.write(fd, b"parent")
    os.close(fd)
    assert (d / "f").read_bytes() == b"childparent"
