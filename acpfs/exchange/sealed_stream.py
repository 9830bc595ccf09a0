"""What goes over a connection between members in sealed pieces: frames of messages, and bytes of
files a MiB at a time, each encrypted and checked by AES-256-GCM.

TLS by Python's ssl costs twice the processor time, as each of its records of 16 KiB is a call. Here
TLS makes the keys and ends. Each direction has a key of its own, and each piece the next number
as its nonce: what is left out, repeated or in another order does not open. A piece of a file has
its place as associated data: behind which messages, at which offset, of how many bytes. Sizes are
known to both sides, so that nobody has to take a larger piece. Nobody sees a byte of a piece that
does not open: the connection ends there.

The package `cryptography` is optional (`acpfs[exchange]`); without it nothing is sealed.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from acpfs.exchange.link_streams import (
    FRAME_BYTES_MAX,
    SEALED,
    LinkFailedError,
    LinkStream,
    read_exactly,
)
from acpfs.exchange.piece_buffers import PieceBuffers
from acpfs.links.frames import framed

PIECE_BYTES = 1 << 20
TAG_BYTES = 16
SECRET_BYTES = 32
"""Of each side, for both keys."""
PIECES_MAX = 1 << 32
"""By one key; no nonce comes twice long after that."""
KEY_BYTES_MAX = 1 << 37
"""After so many a connection is made anew: a third of what TLS gives a key of AES-GCM."""
MESSAGE = b"message"
_PLACE = struct.Struct(">16s16sQQ")
_memory = PieceBuffers(PIECE_BYTES + TAG_BYTES)
_opened = PieceBuffers(PIECE_BYTES)


def can_seal() -> bool:
    """Whether the package is there, and new enough to write where it is told to."""
    return _cipher_of(bytes(SECRET_BYTES)) is not None


def _cipher_of(key: bytes) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return None
    try:
        return AESGCM(key) if hasattr(AESGCM, "decrypt_into") else None
    except UnsupportedAlgorithm:
        return None


class SpoiltLinkError(LinkFailedError):
    """What has come is not what the other member has sent, or not in its place."""

    def __init__(self) -> None:
        super().__init__("what came was changed on its way, or is not in its place")


class _Direction:
    """What goes one way: a key, and how often it was used."""

    def __init__(self, secret: bytes, name: bytes) -> None:
        self._cipher = _cipher_of(hmac.digest(secret, b"acpfs exchange, " + name, "sha256"))
        self._pieces = 0
        self.bytes = 0
        self.last_message = bytes(TAG_BYTES)
        """Its tag, which is of no other one."""

    def seal(self, data: memoryview | bytes, place: bytes, sealed: memoryview | bytearray) -> None:
        """`sealed`: longer by a tag."""
        self._cipher.encrypt_into(self._nonce(len(data)), data, place, sealed)

    def open(self, sealed: memoryview | bytes, place: bytes, data: memoryview | bytearray) -> None:
        """Inverse of `seal`; of what is in `data` when it fails nothing is to be used.

        Raises:
            SpoiltLinkError: it is not the next piece that was sealed, for that place.
        """
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(self._nonce(len(data)), sealed, place, data)
        except InvalidTag:
            raise SpoiltLinkError from None

    def _nonce(self, size: int) -> bytes:
        if self._pieces >= PIECES_MAX:
            raise LinkFailedError("its key is used up")
        self._pieces += 1
        self.bytes += size
        return self._pieces.to_bytes(12, "big")


class SealedStream(LinkStream):
    """See above."""

    def __init__(self, connection: socket.socket, secret: bytes, *, called: bool) -> None:
        """`secret`: that of who has called, then the other one's. `called`: we have."""
        super().__init__(connection)
        caller, answerer = (_Direction(secret, name) for name in (b"caller", b"answerer"))
        self._out, self._in = (caller, answerer) if called else (answerer, caller)

    @property
    def way(self) -> str:
        """One of `WAYS`."""
        return SEALED

    @property
    def is_spent(self) -> bool:
        """Whether the connection is to be made anew, before the next question."""
        return max(self._out.bytes, self._in.bytes) > KEY_BYTES_MAX

    def send(self, data: bytes) -> None:
        """A frame."""
        sealed = bytearray(len(data) + TAG_BYTES)
        self._out.seal(data, MESSAGE, sealed)
        self._out.last_message = bytes(sealed[-TAG_BYTES:])
        self.socket.sendall(framed(bytes(sealed), FRAME_BYTES_MAX + TAG_BYTES))

    def receive(self) -> bytes:
        """The next frame."""
        sealed = self.frame(FRAME_BYTES_MAX + TAG_BYTES)
        data = bytearray(max(0, len(sealed) - TAG_BYTES))
        self._open(sealed, MESSAGE, data)
        self._in.last_message = sealed[-TAG_BYTES:]
        return bytes(data)

    def receive_into(self, view: memoryview, until: float) -> None:
        """Exactly so many bytes of a file."""
        for at in range(0, len(view), PIECE_BYTES):
            self._receive_piece(view[at : at + PIECE_BYTES], at, len(view), until)

    def receive_parts(self, size: int, until: float) -> Iterator[memoryview]:
        """See `LinkStream`; a part has been opened."""
        with _opened.lent() as memory, memoryview(memory) as buffer:
            for at in range(0, size, PIECE_BYTES):
                part = buffer[: min(PIECE_BYTES, size - at)]
                self._receive_piece(part, at, size, until)
                yield part

    def send_file(self, fd: int, offset: int, size: int, *, is_steady: bool) -> None:
        """Bytes of a file, as they are now. `is_steady`: nobody makes it shorter meanwhile."""
        if is_steady:
            with _mapped(fd, offset, size) as view:
                self._send_pieces(size, lambda at, count: view[at : at + count])
            return
        # one that can become shorter is read: to touch what a mapping has no more ends the process
        with _memory.lent() as memory, memoryview(memory) as buffer:

            def read(at: int, count: int) -> memoryview:
                read_exactly(fd, buffer[:count], offset + at)
                return buffer[:count]

            self._send_pieces(size, read)

    def _send_pieces(self, size: int, piece: Callable[[int, int], memoryview]) -> None:
        """`piece(at, count)`: so many bytes from there on."""
        with _memory.lent() as memory, memoryview(memory) as buffer:
            for at in range(0, size, PIECE_BYTES):
                count = min(PIECE_BYTES, size - at)
                sealed = buffer[: count + TAG_BYTES]
                self._out.seal(piece(at, count), _place(self._out, self._in, at, size), sealed)
                self._send_all(sealed)

    def _receive_piece(self, data: memoryview, at: int, size: int, until: float) -> None:
        """The one for there, of a file's range of that size."""
        with _memory.lent() as memory, memoryview(memory) as buffer:
            sealed = buffer[: len(data) + TAG_BYTES]
            self._fill(sealed, until)
            self._open(sealed, _place(self._in, self._out, at, size), data)

    def _open(self, sealed: memoryview | bytes, place: bytes, data: memoryview | bytearray) -> None:
        try:
            if len(sealed) < TAG_BYTES:
                raise SpoiltLinkError
            self._in.open(sealed, place, data)
        except SpoiltLinkError:
            self.socket.close()  # whoever goes on with it all the same gets nothing
            raise

    def _send_all(self, view: memoryview) -> None:
        """Each part of it has the socket's time-out, as what the kernel sends."""
        while view:
            view = view[self.socket.send(view) :]


def _place(there: _Direction, back: _Direction, at: int, size: int) -> bytes:
    """Behind which message, and which one of the other side, a piece goes; and what of how much
    it is.
    """
    return _PLACE.pack(there.last_message, back.last_message, at, size)


@contextlib.contextmanager
def _mapped(fd: int, offset: int, size: int) -> Iterator[memoryview]:
    if os.fstat(fd).st_size < offset + size:
        raise LinkFailedError("the file has become shorter")
    before = offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(fd, before + size, prot=mmap.PROT_READ, offset=offset - before)
    try:
        with memoryview(mapped) as view:
            yield view[before:]
    finally:
        with contextlib.suppress(BufferError):  # an error's stack has a part: it goes with that
            mapped.close()


def new_secret() -> str:
    """For a message."""
    return secrets.token_hex(SECRET_BYTES)


def secret_of(told: object) -> bytes | None:
    """Inverse of `new_secret`; None: it is none, as where a member seals nothing, or otherwise."""
    try:
        found = bytes.fromhex(told) if isinstance(told, str) else b""
    except ValueError:
        return None
    return found if len(found) == SECRET_BYTES else None
