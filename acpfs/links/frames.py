"""Frames on a stream: four bytes of length, then so many bytes.

Both sides bound what they take: a frame that claims more is refused before a byte of it is kept.
Knows nothing of what is in them.
"""

from __future__ import annotations

import struct

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size


class FrameTooLongError(ValueError):
    """A frame is longer than anybody would take; `length`: in bytes."""

    def __init__(self, length: int) -> None:
        super().__init__(f"a message of {length} bytes")


def framed(data: bytes, bytes_max: int) -> bytes:
    """Bytes with their length.

    Raises:
        FrameTooLongError: they are more than `bytes_max`.
    """
    if len(data) > bytes_max:
        raise FrameTooLongError(len(data))
    return _LENGTH.pack(len(data)) + data


def length_of(head: bytes | bytearray, bytes_max: int) -> int:
    """How long the frame is that begins so.

    Raises:
        FrameTooLongError: longer than `bytes_max`.
    """
    length: int = _LENGTH.unpack(head)[0]
    if length > bytes_max:
        raise FrameTooLongError(length)
    return length


class FrameSplitter:
    """Bytes in, what the frames have out."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept = bytearray()

    def take(self, data: bytes | bytearray) -> list[bytearray]:
        """The frames that are complete with these bytes.

        Raises:
            FrameTooLongError: one claims to be longer than `bytes_max`.
        """
        self._kept += data
        found = []
        begin = 0
        while len(self._kept) - begin >= LENGTH_BYTES:
            body = begin + LENGTH_BYTES
            end = body + length_of(self._kept[begin:body], self._bytes_max)
            if len(self._kept) < end:
                break
            found.append(self._kept[body:end])
            begin = end
        del self._kept[:begin]
        return found

    @property
    def inside(self) -> bool:
        """Whether a frame has begun that is not complete."""
        return bool(self._kept)
