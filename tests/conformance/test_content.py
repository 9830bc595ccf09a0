"""Content: sparse files, truncation, big offsets, the calls that move bytes."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

clause = pytest.mark.clause
GIB = 1 << 30


@clause("S33")
def test_hole_reads_as_zeros(d: Path) -> None:
    with open(d / "f", "wb") as file:
        file.write(b"start")
        file.seek(1 << 20)
        file.write(b"end")
    content = (d / "f").read_bytes()
    assert content == b"start" + bytes((1 << 20) - 5) + b"end"


@clause("S33")
def test_offsets_beyond_four_gib(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.pwrite(fd, b"low", 0)
    os.pwrite(fd, b"high", 5 * GIB + 123)
    assert os.fstat(fd).st_size == 5 * GIB + 127
    assert os.pread(fd, 10, 5 * GIB + 120) == b"\0\0\0high"
    assert os.pread(fd, 4, 4 * GIB) == bytes(4)
    assert os.fstat(fd).st_blocks * 512 < GIB
    os.ftruncate(fd, 3)
    assert os.fstat(fd).st_size == 3
    os.close(fd)


@clause("S34")
def test_truncate_down_and_up_gives_zeros(d: Path) -> None:
    (d / "f").write_bytes(b"0123456789")
    os.truncate(d / "f", 4)
    assert (d / "f").read_bytes() == b"0123"
    os.truncate(d / "f", 8)
    assert (d / "f").read_bytes() == b"0123\0\0\0\0"


@clause("S34")
def test_truncate_an_open_file(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, b"0123456789")
    os.truncate(d / "f", 5)
    assert os.fstat(fd).st_size == 5
    os.write(fd, b"X")  # the offset stays at 10
    assert os.pread(fd, 20, 0) == b"01234\0\0\0\0\0X"
    os.ftruncate(fd, 0)
    assert (d / "f").stat().st_size == 0
    os.close(fd)


@clause("S34")
def test_truncate_to_an_odd_size_inside_a_page(d: Path) -> None:
    data = random.Random(1).randbytes(10_000)
    (d / "f").write_bytes(data)
    os.truncate(d / "f", 5001)
    os.truncate(d / "f", 9000)
    assert (d / "f").read_bytes() == data[:5001] + bytes(3999)


@clause("S34")
def test_truncate_errors(d: Path) -> None:
    (d / "f").touch()
    with pytest.raises(IsADirectoryError):
        os.truncate(d, 0)
    with pytest.raises(FileNotFoundError):
        os.truncate(d / "no", 0)
    fd = os.open(d / "f", os.O_RDONLY)
    with pytest.raises(OSError) as caught:
        os.ftruncate(fd, 0)
    assert caught.value.errno == errno.EINVAL
    os.close(fd)


@clause("S13")
def test_writes_at_random_places(d: Path) -> None:
    chooser = random.Random(7)
    model = bytearray()
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    for _ in range(300):
        at = chooser.randrange(200_000)
        size = chooser.randrange(1, 20_000)
        data = chooser.randbytes(size)
        model.extend(bytes(max(0, at + size - len(model))))
        model[at : at + size] = data
        os.pwrite(fd, data, at)
        look = chooser.randrange(len(model))
        assert os.pread(fd, 5000, look) == bytes(model[look : look + 5000])
    os.close(fd)
    assert (d / "f").read_bytes() == bytes(model)


@clause("S13")
def test_large_file_in_large_writes(d: Path) -> None:
    block = random.Random(3).randbytes(1 << 20)
    with open(d / "f", "wb", buffering=0) as file:
        for number in range(64):
            assert file.write(bytes([number]) + block[1:]) == len(block)
    with open(d / "f", "rb", buffering=0) as file:
        for number in range(64):
            assert file.read(len(block)) == bytes([number]) + block[1:]
        assert file.read(1) == b""


@clause("S13")
def test_write_of_nothing(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    assert os.write(fd, b"") == 0
    assert os.pwrite(fd, b"", 100) == 0
    assert os.fstat(fd).st_size == 0
    assert os.read(fd, 10) == b""
    os.close(fd)


@clause("S50")
def test_vectors(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    assert os.pwritev(fd, [b"ab", b"", b"cdef"], 2) == 6
    first = bytearray(3)
    second = bytearray(10)
    assert os.preadv(fd, [first, second], 0) == 8
    assert bytes(first) == b"\0\0a"
    assert bytes(second[:5]) == b"bcdef"
    os.close(fd)


@clause("S50")
def test_sendfile_in_and_out(d: Path) -> None:
    data = os.urandom(300_000)
    (d / "a").write_bytes(data)
    with open(d / "a", "rb") as source, open(d / "b", "wb") as target:
        moved = 0
        while moved < len(data):
            moved += os.sendfile(target.fileno(), source.fileno(), moved, len(data) - moved)
    assert (d / "b").read_bytes() == data


@clause("S50")
def test_copy_file_range(d: Path) -> None:
    data = os.urandom(300_000)
    (d / "a").write_bytes(data)
    with open(d / "a", "rb") as source, open(d / "b", "wb") as target:
        moved = 0
        while moved < len(data):
            moved += os.copy_file_range(source.fileno(), target.fileno(), len(data) - moved)
    assert (d / "b").read_bytes() == data


@clause("S50")
@pytest.mark.skipif(not hasattr(os, "splice"), reason="os.splice is new in Python 3.10")
def test_splice_through_a_pipe(d: Path) -> None:
    (d / "a").write_bytes(b"spliced")
    read_fd, write_fd = os.pipe()
    with open(d / "a", "rb") as source, open(d / "b", "wb") as target:
        assert os.splice(source.fileno(), write_fd, 100) == 7
        assert os.splice(read_fd, target.fileno(), 100) == 7
    os.close(read_fd)
    os.close(write_fd)
    assert (d / "b").read_bytes() == b"spliced"


@clause("S14", "S15")
def test_fsync_and_fdatasync_of_all_kinds_of_descriptors(d: Path) -> None:
    for flags in (os.O_RDWR, os.O_RDONLY, os.O_WRONLY):
        fd = os.open(d / "f", os.O_CREAT | flags, 0o644)
        os.fsync(fd)
        os.fdatasync(fd)
        os.close(fd)


@clause("S34")
def test_seek_end_follows_the_size(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, b"12345")
    other = os.open(d / "f", os.O_RDONLY)
    assert os.lseek(other, 0, os.SEEK_END) == 5
    os.ftruncate(fd, 100)
    assert os.lseek(other, 0, os.SEEK_END) == 100
    os.close(fd)
    os.close(other)
