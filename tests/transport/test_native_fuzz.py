"""Requests that no kernel would send must not end a session, nor stay without an answer."""

from __future__ import annotations

import logging
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.descriptors import readable
from acpfs.filesystem.construction import FileSystemParts
from acpfs.filesystem.filesystem import FileSystem
from acpfs.transport.native.device import Device
from acpfs.transport.native.dispatch import Dispatch
from acpfs.transport.native.holding import Holding
from acpfs.transport.native.kernel_lanes import KernelLanes
from acpfs.transport.native.negotiate import WANTED, Negotiated
from acpfs.transport.native.operations import Calls
from acpfs.transport.native.protocol import IN_HEADER, OUT_HEADER, Opcode
from acpfs.transport.native.references import References
from acpfs.transport.native.replies import Replies
from acpfs.transport.native.request import HEADER_BYTES, RequestBuffers
from acpfs.transport.native.undo import Undo
from tests.transport.doubles import file_system

PAYLOAD_BYTES = 1 << 16
ROUNDS = 400
NO_REPLY = {Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT, Opcode.NOTIFY_REPLY}


class Wire:
    """A dispatch whose device is a pipe."""

    def __init__(self, inner: FileSystemParts) -> None:
        fs = FileSystem(inner)
        kept = inner.kept
        negotiated = Negotiated(45, int(WANTED), int(WANTED), PAYLOAD_BYTES)
        self._read_fd, self._write_fd = os.pipe()
        lanes = KernelLanes(fs, kept, Device([self._write_fd]), negotiated)
        references = References(kept)
        undo = Undo(fs, lanes, references)
        self.dispatch = Dispatch(
            fs,
            kept,
            Calls(fs, negotiated, lanes, Holding(fs)),
            Replies(lanes, undo, references, 1.0),
            undo,
        )
        self._buffers = RequestBuffers(PAYLOAD_BYTES)
        self._unique = 0

    def send(
        self, opcode: int, body: bytes, ino: int = 1, *, said: int | None = None
    ) -> tuple[int, bytes] | None:
        """(error, body) of the reply; None when there is none."""
        self._unique += 2
        length = IN_HEADER.size + len(body)
        data = (
            IN_HEADER.pack(
                length if said is None else said, opcode, self._unique, ino, 0, 0, os.getpid(), 0, 0
            )
            + body
        )
        head = data[:HEADER_BYTES]
        rest = data[HEADER_BYTES:]
        self._buffers.header[: len(head)] = head
        self._buffers.payload[: len(rest)] = rest
        if self.dispatch.handle(self._write_fd, self._buffers, len(data)):
            self._buffers = RequestBuffers(PAYLOAD_BYTES)
        return self._reply()

    def _reply(self) -> tuple[int, bytes] | None:
        if not readable(self._read_fd, 0):
            return None
        reply = os.read(self._read_fd, 1 << 16)
        size, error, unique = OUT_HEADER.unpack_from(reply)
        assert (size, unique) == (len(reply), self._unique)
        assert -511 <= error <= 0
        return error, reply[OUT_HEADER.size :]

    def close(self) -> None:
        self.dispatch.continuations.abandon()
        os.close(self._read_fd)
        os.close(self._write_fd)


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Wire]:
    logging.disable(logging.ERROR)
    for name in ("backing", "tier"):
        (tmp_path / name).mkdir()
    connected = Wire(
        file_system(tmp_path / "backing", tmp_path / "tier", tmp_path, budget_bytes=1 << 20)
    )
    yield connected
    connected.close()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("opcode", [*Opcode, 0, 7, 19, 54, 4096, 0xFFFFFFFF], ids=str)
def test_random_bodies(wired: Wire, opcode: int, seed: int) -> None:
    random_source = random.Random(seed ^ opcode)
    wired.send(
        Opcode.CREATE, struct.pack("=IIII", os.O_CREAT | os.O_RDWR, 0o100644, 0o22, 0) + b"file\0"
    )
    wired.send(Opcode.OPENDIR, struct.pack("=II", 0, 0))
    for _ in range(ROUNDS):
        body = random_body(random_source)
        waiting = len(wired.dispatch.continuations)
        reply = wired.send(
            opcode, body, ino=random_source.choice([1, 2, (1 << 62) + 1, (1 << 64) - 1])
        )
        suspended = len(wired.dispatch.continuations) > waiting
        assert (reply is None) == (opcode in NO_REPLY or suspended), (body, reply)


def random_body(random_source: random.Random) -> bytes:
    """Bytes that sometimes look like handles, small numbers and names."""
    parts = []
    for _ in range(random_source.randrange(12)):
        kind = random_source.randrange(4)
        if kind == 0:
            parts.append(random_source.randbytes(random_source.randrange(1, 24)))
        elif kind == 1:
            parts.append(
                struct.pack(
                    "=Q", random_source.choice([0, 1, 2, 3, 1 << 31, 1 << 63, (1 << 64) - 1])
                )
            )
        elif kind == 2:
            parts.append(
                struct.pack("=I", random_source.choice([0, 1, 2, 0o100644, 0o1000000, 0xFFFFFFFF]))
            )
        else:
            parts.append(
                random_source.choice(
                    [
                        b"file\0",
                        b"\0",
                        b"a\0b\0",
                        b"x" * 300 + b"\0",
                        b"..\0",
                        b"a/b\0",
                        b"user.x\0y",
                    ]
                )
            )
    return b"".join(parts)


@pytest.mark.parametrize("length", range(IN_HEADER.size))
def test_shorter_than_a_header(wired: Wire, length: int) -> None:
    assert wired.dispatch.handle(-1, RequestBuffers(PAYLOAD_BYTES), length) is False


def test_a_length_that_is_a_lie(wired: Wire) -> None:
    assert wired.send(Opcode.LOOKUP, b"file\0", said=12345) is None


def test_a_write_with_fewer_bytes_than_it_says(wired: Wire) -> None:
    body = struct.pack("=QQIIQII", 1, 0, 4096, 0, 0, 0, 0) + b"short"
    assert wired.send(Opcode.WRITE, body) == (-5, b"")


def test_bytes_of_an_earlier_request_are_not_taken_for_this_one(wired: Wire) -> None:
    wired.send(Opcode.LOOKUP, b"a-name-that-is-longer\0")
    assert wired.send(Opcode.LOOKUP, b"a-name") == (-5, b"")
