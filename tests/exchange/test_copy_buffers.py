"""Memory of what goes to a holder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.writeback.copies.copy_buffers import IDLE_MAX, SMALL_BYTES, CopyBuffers

SIZE = 1 << 20


@pytest.mark.parametrize("size", [1, SMALL_BYTES, SMALL_BYTES + 1, SIZE])
def test_a_buffer_is_read_by_its_descriptor(tmp_path: Path, size: int) -> None:
    buffer = CopyBuffers(tmp_path).take(size)
    assert len(buffer.memory) >= size
    buffer.memory[:5] = b"bytes"
    assert os.pread(buffer.fd, 5, 0) == b"bytes"
    assert not list(tmp_path.iterdir())
    buffer.close()


@pytest.mark.parametrize(("size", "kept"), [(SMALL_BYTES, IDLE_MAX), (SIZE, 0)])
def test_a_few_small_ones_are_kept(tmp_path: Path, size: int, kept: int) -> None:
    """A large one is in nobody's budget."""
    buffers = CopyBuffers(tmp_path)
    made = [buffers.take(size) for _each in range(IDLE_MAX + 1)]
    for one in made:
        buffers.give_back(one)
    for one in made[kept:]:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(one.fd)
    again = [buffers.take(size) for _each in range(kept)]
    assert again == made[:kept][::-1]
    for one in again:
        one.close()


def test_where_there_is_no_room_it_is_memory_all_the_same(tmp_path: Path) -> None:
    buffer = CopyBuffers(tmp_path / "gone").take(SIZE)
    buffer.memory[-1:] = b"x"
    assert os.pread(buffer.fd, 2, len(buffer.memory) - 1) == b"x"
    buffer.close()
