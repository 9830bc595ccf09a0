"""How large staging files are filled: direct where that is known to be fast, and always with the
right bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.backing import filling

MiB = 1 << 20
PAGE = 4096


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def filled(content: bytes) -> memoryview:
    """The content in page-aligned memory."""
    memory = mmap.mmap(-1, max(1, len(content)))
    memory.write(content)
    return memoryview(memory)[: len(content)]


def go_direct(fd: int) -> None:
    if not filling.wants_direct(fd):
        pytest.skip("the file system under the tests is none that direct writes are used on")
    filling.go_direct(fd)
    assert is_direct(fd)


def test_whole_pages_go_past_the_page_cache(fd: int, tmp_path: Path) -> None:
    go_direct(fd)
    content = os.urandom(MiB)
    assert filling.write(fd, filled(content), 0) == MiB
    assert is_direct(fd)
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("size", [1, 511, PAGE + 1, MiB + 13])
def test_the_odd_end_goes_through_the_page_cache(fd: int, tmp_path: Path, size: int) -> None:
    go_direct(fd)
    head = os.urandom(MiB)
    tail = os.urandom(size)
    filling.write(fd, filled(head), 0)
    filling.write(fd, filled(tail), MiB)
    assert not is_direct(fd)
    os.fsync(fd)
    assert (tmp_path / "file").read_bytes() == head + tail


def test_an_offset_that_is_no_page_is_written_too(fd: int, tmp_path: Path) -> None:
    go_direct(fd)
    content = os.urandom(PAGE)
    filling.write(fd, filled(content), 7)
    assert (tmp_path / "file").read_bytes() == bytes(7) + content


def test_an_error_of_a_plain_descriptor_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    fd = os.open(tmp_path / "there", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        filling.write(fd, memoryview(b"x"), 0)
    os.close(fd)


def test_no_direct_writes_on_a_tmpfs() -> None:
    fd = os.memfd_create("tmpfs")
    assert not filling.wants_direct(fd)
    filling.begin_write_out(fd, 0, MiB)  # advice: whatever the file system says
    os.close(fd)
