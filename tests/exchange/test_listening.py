"""Memory of what arrives from other members."""

from __future__ import annotations

from contextlib import ExitStack

from acpfs.exchange.exchange_records import PUT_BYTES_MAX
from acpfs.exchange.piece_buffers import BUFFERS_MAX, PieceBuffers


def test_memory_for_pieces_is_used_again_by_one_at_a_time_and_little_is_kept() -> None:
    buffers = PieceBuffers(PUT_BYTES_MAX)
    with buffers.lent() as first:
        assert len(first) == PUT_BYTES_MAX
        with buffers.lent() as second:
            assert second is not first
    with buffers.lent() as again:
        assert again is first
    with ExitStack() as stack:
        lent = {id(stack.enter_context(buffers.lent())) for _each in range(BUFFERS_MAX + 2)}
        assert len(lent) == BUFFERS_MAX + 2
    assert len(buffers._idle) == BUFFERS_MAX
