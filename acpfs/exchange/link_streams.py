"""What goes over a connection between members, as it is or in TLS: frames, and bytes of files.

`sealed_stream` has the third way, with the same face. Blocks; one thread at a time.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import time
from collections.abc import Iterator

from acpfs.exchange.piece_buffers import PieceBuffers
from acpfs.links.frames import LENGTH_BYTES, framed, length_of

FRAME_BYTES_MAX = 1 << 16
SEND_BYTES = 1 << 18
"""Read from a file at a time where it cannot be sent by the kernel alone."""
PART_BYTES = 1 << 18
"""Received at a time, of what is written to a file at once: it is in a processor's cache then."""
PLAIN = "plain"
TLS = "tls"
SEALED = "sealed"
WAYS = (PLAIN, TLS, SEALED)
_parts = PieceBuffers(PART_BYTES)


class LinkFailedError(OSError):
    """The other member is gone, does not answer in time, or is not who it says."""


class LinkStream:
    """Of one socket, which whoever has the stream closes."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    @property
    def way(self) -> str:
        """One of `WAYS`."""
        return TLS if isinstance(self.socket, ssl.SSLSocket) else PLAIN

    @property
    def is_spent(self) -> bool:
        """Whether the connection is to be made anew, before the next question."""
        return False

    def send(self, data: bytes) -> None:
        """A frame."""
        self.socket.sendall(framed(data, FRAME_BYTES_MAX))

    def receive(self) -> bytes:
        """The next frame."""
        return self.frame(FRAME_BYTES_MAX)

    def receive_into(self, view: memoryview, until: float) -> None:
        """Exactly so many bytes of a file."""
        self._fill(view, until)

    def receive_parts(self, size: int, until: float) -> Iterator[memoryview]:
        """Exactly so many bytes of a file, one part after the other; each is good until the next
        one.
        """
        with _parts.lent() as memory, memoryview(memory) as buffer:
            for at in range(0, size, PART_BYTES):
                part = buffer[: min(PART_BYTES, size - at)]
                self._fill(part, until)
                yield part

    def send_file(self, fd: int, offset: int, size: int, *, is_steady: bool) -> None:
        """Bytes of a file, as they are now. `is_steady`: nobody makes it shorter meanwhile."""
        if self.way == TLS:
            self._send_through(fd, offset, size)
        else:
            self._send_by_kernel(fd, offset, size)

    # -- bytes on the socket

    def frame(self, bytes_max: int) -> bytes:
        """A frame as it came."""
        return self.exactly(length_of(self.exactly(LENGTH_BYTES), bytes_max))

    def exactly(self, count: int) -> bytes:
        """So many bytes as they came."""
        found = bytearray(count)
        with memoryview(found) as view:
            self._fill(view)
        return bytes(found)

    def _fill(self, view: memoryview, until: float = math.inf) -> None:
        done = 0
        while done < len(view):
            if time.monotonic() >= until:
                raise LinkFailedError("the other member is too slow")
            got = self.socket.recv_into(view[done:])
            if not got:
                raise LinkFailedError("the other member has closed")
            done += got

    def _send_through(self, fd: int, offset: int, size: int) -> None:
        buffer = memoryview(bytearray(min(size, SEND_BYTES)))
        done = 0
        while done < size:
            part = buffer[: min(len(buffer), size - done)]
            read_exactly(fd, part, offset + done)
            self.socket.sendall(part)
            done += len(part)

    def _send_by_kernel(self, fd: int, offset: int, size: int) -> None:
        out = self.socket.fileno()
        patience_s = self.socket.gettimeout()
        waiting = select.poll()
        waiting.register(out, select.POLLOUT)
        done = 0
        while done < size:
            try:
                got = os.sendfile(out, fd, offset + done, size - done)
            except BlockingIOError:
                if not waiting.poll(None if patience_s is None else patience_s * 1000):
                    raise LinkFailedError("the other member takes nothing") from None
                continue
            if not got:
                raise LinkFailedError("the file has become shorter")
            done += got


def read_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Fill it with bytes of a file.

    Raises:
        LinkFailedError: the file has become shorter.
    """
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if not got:
            raise LinkFailedError("the file has become shorter")
        done += got
