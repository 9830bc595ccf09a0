"""Memory of what goes to a holder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.writeback.copies.copy_buffers import (
    LARGE_IDLE_MAX,
    SMALL_BYTES,
    SMALL_IDLE_MAX,
    CopyBuffers,
)

SIZE = 1 << 20


@pytest.mark.parametrize(
    ("size", "kept"), [(1, SMALL_IDLE_MAX), (SMALL_BYTES, SMALL_IDLE_MAX), (SIZE, LARGE_IDLE_MAX)]
)
def test_a_buffer_is_read_by_its_descriptor_and_used_again(
    tmp_path: Path, size: int, kept: int
) -> None:
    buffers = CopyBuffers(tmp_path, SIZE)
    first = buffers.take(size)
    assert len(first.memory) >= size
    first.memory[:5] = b"bytes"
    assert os.pread(first.fd, 5, 0) == b"bytes"
    assert not list(tmp_path.iterdir())
    buffers.give_back(first)
    made = [buffers.take(size) for _each in range(kept + 1)]
    assert made[0] is first
    for one in made:
        buffers.give_back(one)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(made[-1].fd)
    again = [buffers.take(size) for _each in range(kept)]
    assert again == made[-2::-1]
    for one in again:
        one.close()


def test_where_there_is_no_room_it_is_memory_all_the_same(tmp_path: Path) -> None:
    buffer = CopyBuffers(tmp_path / "gone", SIZE).take(SIZE)
    buffer.memory[-1:] = b"x"
    assert os.pread(buffer.fd, 2, SIZE - 1) == b"x"
    buffer.close()
