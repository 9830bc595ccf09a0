"""Sealed pieces between two members: what arrives is what was sent, in its place, or nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from acpfs.exchange import sealed_stream
from acpfs.exchange.exchange_records import MemberAddress, Message
from acpfs.exchange.hold_calls import HoldCalls
from acpfs.exchange.link_streams import SEALED, TLS, LinkFailedError
from acpfs.exchange.member_links import MemberLink, OwnName
from acpfs.exchange.sealed_stream import (
    PIECE_BYTES,
    PIECES_MAX,
    SECRET_BYTES,
    TAG_BYTES,
    SealedStream,
    SpoiltLinkError,
    new_secret,
    secret_of,
)
from tests.exchange.giving_member import (
    PATIENCE_S,
    giving,
    key_of,
    needs_sealing,
    own_name,
    read_all,
    taker,
)
from tests.exchange.test_member_links import Tap
from tests.rig.storage.servers import until

clause = pytest.mark.clause
pytestmark = needs_sealing
SECRET = os.urandom(2 * SECRET_BYTES)
FOREVER = float("inf")
SIZES = (1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 4321)
DATA = os.urandom(SIZES[-1])
SEALED_PIECE = PIECE_BYTES + TAG_BYTES


def sent(
    tmp_path: Path,
    *words: bytes | int,
    secret: bytes = SECRET,
    called: bool = True,
    is_steady: bool = False,
) -> bytes:
    """What goes over the wire: messages, and so many bytes of a file."""
    (path := tmp_path / "sent").write_bytes(DATA)
    ours, theirs = socket.socketpair()
    found = bytearray()

    def take() -> None:
        while data := theirs.recv(1 << 16):
            found.extend(data)

    taking = threading.Thread(target=take)
    taking.start()
    with ours, path.open("rb") as file:
        stream = SealedStream(ours, secret, called=called)
        for word in words:
            if isinstance(word, bytes):
                stream.send(word)
            else:
                stream.send_file(file.fileno(), 0, word, is_steady=is_steady)
        ours.shutdown(socket.SHUT_WR)
        taking.join()
    theirs.close()
    return bytes(found)


def heard(wire: bytes, *words: bytes | int, called: bool = False) -> list[bytes]:
    """What somebody has who takes messages (`b""`) and so many bytes of a file from the wire."""
    ours, theirs = socket.socketpair()

    def give() -> None:
        with theirs:
            try:
                theirs.sendall(wire)
            except OSError:
                return  # it has closed

    giving_it = threading.Thread(target=give)
    giving_it.start()
    found: list[bytes] = []
    try:
        with ours:
            stream = SealedStream(ours, SECRET, called=called)
            for word in words:
                if isinstance(word, bytes):
                    found.append(stream.receive())
                else:
                    into = bytearray(word)
                    stream.receive_into(memoryview(into), FOREVER)
                    found.append(bytes(into))
    finally:
        giving_it.join()
    return found


@clause("S546")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("is_steady", [False, True])
def test_what_was_sent_is_heard(tmp_path: Path, size: int, called: bool, is_steady: bool) -> None:
    words = (b"first", size, b"", size, b"last")
    wire = sent(tmp_path, *words, called=called, is_steady=is_steady)
    found = heard(wire, b"", size, b"", size, b"", called=not called)
    assert found == [b"first", DATA[:size], b"", DATA[:size], b"last"]
    assert DATA[:16] not in wire or size < 16
    assert b"first" not in wire


@clause("S546")
@pytest.mark.parametrize("at", [4, 12, 4 + 5 + TAG_BYTES, 1 << 19, 1 << 20, -1])
def test_a_byte_that_was_changed_ends_it(tmp_path: Path, at: int) -> None:
    wire = bytearray(sent(tmp_path, b"first", SIZES[-1]))
    wire[at] ^= 1
    with pytest.raises(SpoiltLinkError):
        heard(bytes(wire), b"", SIZES[-1])


@clause("S546")
def test_pieces_in_another_order_repeated_or_left_out_end_it(tmp_path: Path) -> None:
    wire = sent(tmp_path, 2 * PIECE_BYTES)
    first = wire[:SEALED_PIECE]
    second = wire[SEALED_PIECE:]
    assert len(second) == SEALED_PIECE
    assert heard(first + second, 2 * PIECE_BYTES) == [DATA[: 2 * PIECE_BYTES]]
    for wrong in (second + first, first + first, second + second):
        with pytest.raises(SpoiltLinkError):
            heard(wrong, 2 * PIECE_BYTES)


@clause("S546")
def test_messages_in_another_order_repeated_or_left_out_end_it(tmp_path: Path) -> None:
    wire = sent(tmp_path, b"one", b"two")
    first = wire[: len(wire) // 2]
    second = wire[len(wire) // 2 :]
    for wrong in (second, first + first, second + first):
        with pytest.raises(SpoiltLinkError):
            heard(wrong, b"", b"")


@clause("S546")
def test_a_piece_is_of_no_use_in_another_place(tmp_path: Path) -> None:
    """Of a file of another length, behind another message, or as a message."""
    with pytest.raises(SpoiltLinkError):
        heard(sent(tmp_path, 2 * PIECE_BYTES), 3 * PIECE_BYTES)
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "sent").open("rb") as file:
        one = SealedStream(ours, SECRET, called=True)
        other = SealedStream(theirs, SECRET, called=False)
        other.send(b"what one of them has not heard of")
        one.send_file(file.fileno(), 0, 10, is_steady=False)
        with pytest.raises(SpoiltLinkError):
            other.receive_into(memoryview(bytearray(10)), FOREVER)
    with pytest.raises(SpoiltLinkError):
        heard(struct.pack(">I", 5 + TAG_BYTES) + sent(tmp_path, 5), b"")


@clause("S546")
def test_what_was_sealed_by_another_key_ends_it(tmp_path: Path) -> None:
    """Of another connection, or of the other direction: what somebody throws back."""
    with pytest.raises(SpoiltLinkError):
        heard(sent(tmp_path, b"word", secret=os.urandom(2 * SECRET_BYTES)), b"")
    wire = sent(tmp_path, b"word", called=True)
    assert heard(wire, b"", called=False) == [b"word"]
    with pytest.raises(SpoiltLinkError):
        heard(wire, b"", called=True)


@clause("S546")
@pytest.mark.parametrize("count", [0, 1, SEALED_PIECE - 1, SEALED_PIECE, SEALED_PIECE + 1])
def test_a_stream_that_ends_too_early_is_an_end(tmp_path: Path, count: int) -> None:
    with pytest.raises(LinkFailedError, match="closed"):
        heard(sent(tmp_path, 2 * PIECE_BYTES)[:count], 2 * PIECE_BYTES)


@clause("S545")
@pytest.mark.parametrize("length", [0, TAG_BYTES - 1, (1 << 16) + TAG_BYTES + 1, 0xFFFFFFFF])
def test_a_frame_of_no_length_that_there_is_ends_it(length: int) -> None:
    with pytest.raises((ValueError, SpoiltLinkError)):
        heard(struct.pack(">I", length) + bytes(TAG_BYTES), b"")


@clause("S546")
def test_nothing_more_comes_from_a_stream_that_was_spoilt(tmp_path: Path) -> None:
    wire = sent(tmp_path, b"one", b"two")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = SealedStream(theirs, SECRET, called=False)
        ours.sendall(bytes([*wire[:-1], wire[-1] ^ 1]) + wire)
        assert stream.receive() == b"one"
        with pytest.raises(SpoiltLinkError):
            stream.receive()
        with pytest.raises(OSError, match="file descriptor"):
            stream.receive()


@clause("S546")
@pytest.mark.parametrize("is_steady", [False, True])
def test_any_part_of_a_file_goes_and_one_that_is_too_short_does_not(
    tmp_path: Path, is_steady: bool
) -> None:
    (tmp_path / "sent").write_bytes(DATA)
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "sent").open("rb") as file:
        one = SealedStream(ours, SECRET, called=True)
        other = SealedStream(theirs, SECRET, called=False)
        for offset in (0, 1, 4095, 4096, len(DATA) - 1000):
            one.send_file(file.fileno(), offset, 1000, is_steady=is_steady)
            other.receive_into(memoryview(found := bytearray(1000)), FOREVER)
            assert found == DATA[offset : offset + 1000]
        with pytest.raises(LinkFailedError, match="shorter"):
            one.send_file(file.fileno(), len(DATA) - 999, 1000, is_steady=is_steady)


@clause("S546")
def test_a_key_that_is_used_up_seals_nothing_more(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = SealedStream(ours, SECRET, called=True)
        stream._out._pieces = PIECES_MAX - 1
        stream.send(b"the last one")
        with pytest.raises(LinkFailedError, match="used up"):
            stream.send(b"more")


def test_a_secret_is_one_or_none() -> None:
    assert secret_of(told := new_secret()) == bytes.fromhex(told)
    assert len(bytes.fromhex(told)) == SECRET_BYTES
    for wrong in (None, True, "", "x" * 64, "0" * 62, ["0" * 64]):
        assert secret_of(wrong) is None


# -- between members


class Spoiler(Tap):
    """Changes one byte on its way, once so many have passed."""

    AFTER = 1 << 20
    """Handshakes and questions are less."""

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        try:
            while data := bytearray(source.recv(1 << 16)):
                if passed <= self.AFTER < passed + len(data):
                    data[self.AFTER - passed] ^= 1
                passed += len(data)
                target.sendall(data)
        except OSError:
            pass
        with contextlib.suppress(OSError):  # who is closed on learns of it at once
            target.shutdown(socket.SHUT_WR)


@clause("S546")
def test_a_range_that_was_changed_on_its_way_is_not_taken(tmp_path: Path) -> None:
    with giving(tmp_path, DATA) as member, Spoiler(member.port) as tap:
        calls = taker(member, tmp_path)
        to = MemberAddress("n1", ("127.0.0.1",), tap.port, key_of(member.own))
        with pytest.raises(SpoiltLinkError):
            calls.get(to, member.file, 0, len(DATA), PATIENCE_S)
        assert read_all(calls.get(member.address, member.file, 0, 10, PATIENCE_S)) == DATA[:10]
        until(lambda: member.ended == [1], "the loan is over")


@clause("S546")
def test_bytes_to_be_held_that_were_changed_on_their_way_are_not_written(tmp_path: Path) -> None:
    """The holder's worker is told, and asked for nothing."""
    (tmp_path / "theirs").write_bytes(bytes(len(DATA)))
    (tmp_path / "copied").write_bytes(DATA)
    with giving(tmp_path, bytes(len(DATA))) as member, Spoiler(member.port) as tap:
        own = own_name(tmp_path, "n2")
        member.keys["n2"] = key_of(own)
        to = MemberAddress("n1", ("127.0.0.1",), tap.port, key_of(member.own))
        said: Message = {"session": "s", "name": "file", "at": 0, "size": len(DATA)}
        calls = HoldCalls(own)
        member.takers.append(calls._calls)
        with (tmp_path / "copied").open("rb") as file:
            with pytest.raises(LinkFailedError):
                calls.put(to, said, (file.fileno(), 0), PATIENCE_S)
            assert member.spoilt.get(timeout=PATIENCE_S) == "n2"
            assert member.asked == ["knows", "room"], "it is not told that anything is there"
            assert member.path.read_bytes() == bytes(len(DATA))
            answer = calls.put(member.address, said, (file.fileno(), 0), PATIENCE_S)
            assert answer == {"ok": True}
        assert member.path.read_bytes() == DATA


@clause("S546")
def test_a_connection_of_which_the_keys_are_used_up_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with giving(tmp_path, DATA) as member:
        calls = taker(member, tmp_path)
        for _each in range(2):
            assert read_all(calls.get(member.address, member.file, 0, 1000, PATIENCE_S))
        assert len(member.linked) == 2, "one connection, and each side has said so"
        monkeypatch.setattr(sealed_stream, "KEY_BYTES_MAX", 1000)
        assert read_all(calls.get(member.address, member.file, 0, 1000, PATIENCE_S))
        assert len(member.linked) == 4


@clause("S546")
@pytest.mark.parametrize(
    ("offered", "way"),
    [({"plain": False}, TLS), ({"plain": False, "sealed": "of another kind"}, TLS)],
    ids=["older", "newer"],
)
def test_a_member_that_offers_no_such_sealing_is_spoken_to_in_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offered: Message, way: str
) -> None:
    with giving(tmp_path, DATA) as member:
        own: OwnName = own_name(tmp_path, "n2", way=TLS)
        member.keys["n2"] = key_of(own)
        said: list[Message] = []
        say = MemberLink._say

        def say_otherwise(link: MemberLink, message: Message) -> None:
            mine = "plain" in message and not said
            said.append(message)
            say(link, offered if mine else message)

        monkeypatch.setattr(MemberLink, "_say", say_otherwise)
        link = MemberLink.called(own, member.address, PATIENCE_S)
        link.limit(PATIENCE_S)
        link.send({"do": "has", "file": member.file.told()})
        assert link.receive()["has"] == "whole"
        assert link.way == way != SEALED
        link.close()
