"""Encoding: what a call returned becomes the body of a reply.

Owns the layout of answers that several operations have in common, or that need what is known of the
session: the times for which the kernel may cache, lanes, and the undoing of what a reply that
nobody waits for any more had taken. Any thread; no state but that.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from acpfs.filesystem.records import Attributes, DirEntry, OpenFile
from acpfs.transport.native.kernel_lanes import KernelLanes
from acpfs.transport.native.protocol import (
    ATTR_OUT,
    DIRENT,
    ENTRY_OUT,
    GETXATTR_OUT,
    OPEN_OUT,
    RECORD_ALIGNMENT,
    STATX_BASIC_STATS,
    STATX_OUT,
    Opcode,
    OpenFlag,
)
from acpfs.transport.native.references import References
from acpfs.transport.native.request import Request
from acpfs.transport.native.undo import Undo
from acpfs.types import Ino

NS = 1_000_000_000
BLOCK_SIZE_BYTES = 4096
"""st_blksize, as on tmpfs."""
_READDIRPLUS = int(Opcode.READDIRPLUS)
_NOFLUSH = int(OpenFlag.NOFLUSH)
_CHANGES = os.O_ACCMODE | os.O_TRUNC
"""Of the flags of an open: no bit of these, and nothing is changed through it, so that no close of
it matters.
"""


class Replies:
    """From a call's value to bytes."""

    def __init__(
        self, lanes: KernelLanes, undo: Undo, references: References, attr_timeout_s: float
    ) -> None:
        """`undo`: takes back entries that did not fit; `references`: told of those that did.

        `attr_timeout_s`: how long the kernel may use names and attributes unasked.
        """
        self._lanes = lanes
        self._undo = undo
        self._given = references.given
        self._valid_s = int(attr_timeout_s)
        self._valid_ns = int((attr_timeout_s - self._valid_s) * NS)

    # -- nodes and attributes

    def entry(self, _request: Request, a: Attributes) -> bytes:
        self._given((a.ino,))
        return self._entry(a)

    def _entry(self, a: Attributes) -> bytes:
        valid = self._valid_s
        valid_ns = self._valid_ns
        atime, atime_ns = divmod(a.atime_ns, NS)
        mtime, mtime_ns = divmod(a.mtime_ns, NS)
        ctime, ctime_ns = divmod(a.ctime_ns, NS)
        ino = a.ino
        return ENTRY_OUT.pack(
            *(ino, 0, valid, valid, valid_ns, valid_ns),
            *(ino, a.size, a.blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns),
            *(a.mode, a.nlink, a.uid, a.gid, a.rdev, BLOCK_SIZE_BYTES, 0),
        )

    def attr(self, _request: Request, a: Attributes) -> bytes:
        atime, atime_ns = divmod(a.atime_ns, NS)
        mtime, mtime_ns = divmod(a.mtime_ns, NS)
        ctime, ctime_ns = divmod(a.ctime_ns, NS)
        return ATTR_OUT.pack(
            *(self._valid_s, self._valid_ns, 0),
            *(a.ino, a.size, a.blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns),
            *(a.mode, a.nlink, a.uid, a.gid, a.rdev, BLOCK_SIZE_BYTES, 0),
        )

    def statx(self, _request: Request, a: Attributes) -> bytes:
        """Basic fields only: nobody records a birth time, and the mask says so."""
        atime, atime_ns = divmod(a.atime_ns, NS)
        mtime, mtime_ns = divmod(a.mtime_ns, NS)
        ctime, ctime_ns = divmod(a.ctime_ns, NS)
        return STATX_OUT.pack(
            *(self._valid_s, self._valid_ns, 0, 0, 0),
            *(
                STATX_BASIC_STATS,
                BLOCK_SIZE_BYTES,
                0,
                a.nlink,
                a.uid,
                a.gid,
                a.mode,
                0,
                a.ino,
                a.size,
                a.blocks,
                0,
            ),
            *(atime, atime_ns, 0, 0, 0, 0, ctime, ctime_ns, 0, mtime, mtime_ns, 0),
            *(os.major(a.rdev), os.minor(a.rdev), 0, 0),
            *[0] * 14,
        )

    # -- files

    def opened(self, request: Request, file: OpenFile) -> bytes:
        """Of what only reads the kernel does not tell the closes (Linux 5.16), but the last one
        (RELEASE).

        Where an open truncates, they are that of a change, whatever else it may do; and what CREATE
        answers is a new file nearly always. Locks end by each close all the same: the kernel keeps
        them, and asks for none where they are refused.
        """
        flags, backing_id = self._lanes.open_reply(Ino(request.ino), request.argument, file)
        if not request.argument & _CHANGES:
            flags |= _NOFLUSH
        return OPEN_OUT.pack(file.handle, flags, backing_id)

    def created(self, request: Request, value: tuple[OpenFile, Attributes]) -> bytes:
        file, attributes = value
        flags, backing_id = self._lanes.open_reply(attributes.ino, request.argument, file)
        return self.entry(request, attributes) + OPEN_OUT.pack(file.handle, flags, backing_id)

    @staticmethod
    def data(_request: Request, value: bytes | memoryview) -> bytes | memoryview:
        return value

    @staticmethod
    def nothing(_request: Request, _value: object) -> bytes:
        return b""

    # -- extended attributes and space

    @staticmethod
    def xattr(request: Request, value: bytes) -> bytes:
        """The value where the caller has room for it, its size where the caller asks for that.

        Raises:
            OSError: ERANGE when the room is too small.
        """
        room = request.argument
        if room == 0:
            return GETXATTR_OUT.pack(len(value), 0)
        if len(value) > room:
            raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
        return value

    def xattr_names(self, request: Request, names: list[bytes]) -> bytes:
        return self.xattr(request, b"".join(name + b"\0" for name in names))

    # -- directories

    def entries(self, request: Request, entries: list[DirEntry]) -> bytes:
        """As many entries as the kernel has room for; it asks for the rest with the offset of the
        last one.
        """
        room = request.argument
        plus = request.opcode == _READDIRPLUS
        parts: list[bytes] = []
        for entry in entries:
            record = self._record_plus(entry) if plus else _record(entry)
            room -= len(record)
            if room < 0:
                break
            parts.append(record)
        if plus:
            self._given(
                [entry.ino for entry in entries[: len(parts)] if entry.attributes is not None]
            )
            if len(parts) < len(entries):
                self._undo.entries(entries[len(parts) :])
        return b"".join(parts)

    def _record_plus(self, entry: DirEntry) -> bytes:
        return (
            self._entry(entry.attributes) if entry.attributes is not None else bytes(ENTRY_OUT.size)
        ) + _record(entry)


def _record(entry: DirEntry) -> bytes:
    name = entry.name
    length = len(name)
    return (
        DIRENT.pack(entry.ino, entry.next_offset, length, entry.mode >> 12)
        + name
        + _PADDING[length % RECORD_ALIGNMENT]
    )


_PADDING = [b"\0" * (-length % RECORD_ALIGNMENT) for length in range(RECORD_ALIGNMENT)]


def with_room(names: Sequence[bytes], room: int) -> int:
    """How many names' records a READDIRPLUS of `room` bytes takes: who finds more for it has to
    give them back.
    """
    for number, name in enumerate(names):
        room -= ENTRY_OUT.size + DIRENT.size + len(name) + -len(name) % RECORD_ALIGNMENT
        if room < 0:
            return number
    return len(names)
