"""One request of the kernel, the buffers it was read into, and how it is answered.

Owns the split of header and payload: fixed parts go to a small buffer, the payload of WRITE to a
page-aligned one, so that it can be handed to pwrite as it is. Knows nothing of what requests mean.
A request belongs to one thread at a time; buffers belong to the reader thread until `lend` gives
them to a request that is answered later.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from acpfs.transport.native.protocol import IN_HEADER, OUT_HEADER, WRITE_IN

HEADER_BYTES = IN_HEADER.size + WRITE_IN.size
"""The fixed part of the longest-bodied request, WRITE: its payload starts at the second buffer, on
a page boundary.
"""
GATHER_BYTES_MIN = 4096
"""From here on writev of header and body is cheaper than joining them."""
_OUT_BYTES = OUT_HEADER.size


UNIQUE_WORD = 1
RESENT = 1 << 63
"""In the number of a request that a worker before this one had read."""


def resent(unique: int) -> int:
    """The number under which the kernel sends it again."""
    return unique | RESENT


def plain(unique: int) -> int:
    """The number that the request had at first."""
    return unique & ~RESENT


class RequestBuffers:
    """What one request is read into.

    Every page is there and shared, so that the kernel never has to make one while it copies a
    request. It cannot for a process that is being killed, and answers such a request with EIO
    instead of keeping it for the next worker (seen with the first write of a thread).
    """

    def __init__(self, payload_bytes: int) -> None:
        """`payload_bytes`: the largest WRITE of the session."""
        self._payload_bytes = payload_bytes
        self.renew()

    def renew(self) -> None:
        """New ones: the view of the old payload now belongs to a WRITE that is answered later."""
        self._mapping = mmap.mmap(
            -1, mmap.PAGESIZE + self._payload_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        whole = memoryview(self._mapping)
        self.header = whole[:HEADER_BYTES]
        self.payload = whole[mmap.PAGESIZE :]
        self.vector = (self.header, self.payload)
        self.words = self.header.cast("Q")
        """The header in words, of which `UNIQUE_WORD` is the number of the request."""

    def give_back_rest(self, length: int) -> None:
        """Before `renew`: memory behind a request of `length` bytes, which nothing is read into any
        more.

        A thousand writes of 64 KiB that wait for room would have a GiB otherwise.
        """
        used = mmap.PAGESIZE + max(0, length - HEADER_BYTES)
        used += -used % mmap.PAGESIZE
        if used < len(self._mapping):
            with contextlib.suppress(OSError):  # memory that somebody has locked stays
                self._mapping.madvise(mmap.MADV_REMOVE, used)


class Request:
    """Decoded header, and the way back to the kernel."""

    __slots__ = (
        "argument",
        "buffers",
        "fd",
        "gid",
        "ino",
        "length",
        "opcode",
        "pid",
        "uid",
        "unique",
    )

    def __init__(self, fd: int, buffers: RequestBuffers, length: int) -> None:
        """`fd`: where it was read from and must be answered; `length`: bytes read, header included.

        Raises:
            ValueError: shorter than a header, or not as long as its header says.
        """
        said, self.opcode, self.unique, self.ino, self.uid, self.gid, self.pid, _extensions, _ = (
            IN_HEADER.unpack_from(buffers.header)
        )
        self.fd = fd
        self.buffers = buffers
        self.length = length
        self.argument = 0
        """What encoding the reply needs of the body, put here by decoding: by then the buffers may
        hold another request.
        """
        if length < IN_HEADER.size or said != length:
            message = f"request of {length} bytes says it has {said}"
            raise ValueError(message)

    def body(self) -> bytes:
        """Everything behind the header, as one piece of its own."""
        length = self.length
        buffers = self.buffers
        if length <= HEADER_BYTES:
            return bytes(buffers.header[IN_HEADER.size : length])
        return bytes(buffers.header[IN_HEADER.size :]) + bytes(
            buffers.payload[: length - HEADER_BYTES]
        )

    def payload(self, size: int) -> memoryview:
        """The bytes of a WRITE, where they are.

        Raises:
            ValueError: fewer bytes came than the request says.
        """
        if size > self.length - HEADER_BYTES:
            message = f"WRITE of {size} bytes came with {self.length - HEADER_BYTES}"
            raise ValueError(message)
        return self.buffers.payload[:size]

    def reply(self, body: bytes | memoryview) -> None:
        """Answer with success.

        Raises:
            OSError: ENOENT when the kernel does not wait for it any more, ENODEV after the end of
                the mount.
        """
        size = len(body)
        header = OUT_HEADER.pack(_OUT_BYTES + size, 0, self.unique)
        if size >= GATHER_BYTES_MIN:
            os.writev(self.fd, (header, body))
        else:
            os.write(self.fd, header + body)

    def refuse(self, error_number: int) -> None:
        """Answer with an errno; raises as `reply`."""
        os.write(self.fd, OUT_HEADER.pack(_OUT_BYTES, -error_number, self.unique))
