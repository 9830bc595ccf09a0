"""What arrives from other members to be held, and its memory."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from acpfs.exchange.exchange_records import PUT_BYTES_MAX, Message
from acpfs.exchange.hold_calls import HoldCalls
from acpfs.exchange.link_streams import PART_BYTES, WAYS
from acpfs.exchange.piece_buffers import BUFFERS_MAX, PieceBuffers
from acpfs.exchange.sealed_stream import PIECE_BYTES
from tests.exchange.giving_member import giving, key_of, own_name

clause = pytest.mark.clause
PATIENCE_S = 10.0
ODD = 777
"""Bytes beyond whole parts and pieces."""
SIZE = 2 * PIECE_BYTES + PART_BYTES + ODD


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


@clause("S612")
@pytest.mark.parametrize("way", WAYS)
def test_a_piece_is_written_part_by_part_or_refused_with_the_connection_good_for_the_next_one(
    tmp_path: Path, way: str
) -> None:
    data = random.Random(7).randbytes(SIZE)
    (tmp_path / "from").write_bytes(data)
    with giving(tmp_path, b"", way=way) as member, (tmp_path / "from").open("rb") as file:
        own = own_name(tmp_path, "n2", way=way)
        member.keys["n2"] = key_of(own)
        calls = HoldCalls(own)
        member.takers.append(calls._calls)

        def put(at: int) -> Message:
            said: Message = {"session": "s", "name": "file", "at": at, "size": SIZE - ODD}
            return calls.put(member.address, said, (file.fileno(), ODD), PATIENCE_S)

        member.has_room = False
        assert put(0) == {"refused": "full"}
        member.has_room = True
        member.is_writable = False
        assert put(0) == {"refused": os.strerror(9)}
        assert member.path.read_bytes() == b""
        member.is_writable = True
        assert put(3) == {"ok": True}
        assert member.path.read_bytes() == bytes(3) + data[ODD:]
        assert {one[1] for one in member.linked} == {way}
        assert len(member.linked) == 1, "one connection for all"
        assert member.asked == ["knows", "room", "room", "room", "hold"]
