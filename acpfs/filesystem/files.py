"""Bytes of open files: read, write, truncate, fallocate, copy_range, lseek.

When their content is fixed is the business of `Closes` and `Syncing`; where the bytes are, that of
`Reads` and `Contents`; opening that of `Opens`. Used under the file system's lock; coroutines wait
as in `steps`.
"""

from __future__ import annotations

import errno
import os

from acpfs.backing.lower import SpaceInfo
from acpfs.filesystem.closes import Closes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.reads import Reads
from acpfs.filesystem.content.unseen_room import Lengthening
from acpfs.filesystem.content.writable import Writable
from acpfs.filesystem.copy_range import copy_pieces
from acpfs.filesystem.handles import Handles
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.lane_use import LaneUse
from acpfs.filesystem.names import fail
from acpfs.filesystem.node_use import NodeUse
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.syncing import Syncing
from acpfs.ram.tier import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE
from acpfs.types import HandleId

FILE_BYTES_MAX = 16 << 40
"""A file may always be so long, on however small a file system; it is what ext4 has room for in one
file.
"""
COPY_RANGE_BYTES_MAX = 128 << 20
"""One request copies at most this (about 50 ms of a reader thread); the caller asks for the
rest.
"""


class Files:
    """Calls on open files."""

    def __init__(
        self,
        handles: Handles,
        closes: Closes,
        syncing: Syncing,
        reads: Reads,
        contents: Contents,
        writable: Writable,
        use: NodeUse,
        lane_use: LaneUse,
    ) -> None:
        self._handles = handles
        self._closes = closes
        self._syncing = syncing
        self._reads = reads
        self._contents = contents
        self._writable = writable
        self._use = use
        self._lane_use = lane_use
        self._file_bytes_max = FILE_BYTES_MAX

    # -- the content as a whole

    def learn_capacity(self, space: SpaceInfo) -> None:
        """What the backing file system has room for altogether; a longer file is nothing but a
        mistake, which would be copied for years.
        """
        self._file_bytes_max = max(FILE_BYTES_MAX, space.blocks * space.block_bytes)

    def owed_bytes(self) -> int:
        """What was written, closed or not, and is in RAM alone: the backing directory will want
        room for it.
        """
        return self._contents.owed_bytes(self._handles.open_nodes())

    def _check_end(self, node: Node, end: int) -> None:
        """Whether a file may reach so far; one that is longer already may stay so.

        Raises:
            OSError: EFBIG.
        """
        if end > self._file_bytes_max and end > node.size:
            raise fail(errno.EFBIG)

    async def truncate(self, node: Node, size: int, number: HandleId | None) -> None:
        """Change a file's length.

        Through a descriptor it is complete at that descriptor's close, by path at once, unless
        somebody is at the file.
        """
        if size < 0:
            raise fail(errno.EINVAL)
        self._check_end(node, size)
        handle = self._handles.find(number) if number is not None else None
        is_still = handle is None and not self._closes.is_anybody_at_it(node)
        if handle is not None:
            self._closes.changes(handle)
        node.handles += 1
        length = Lengthening(size)
        try:
            await self._lane_use.lengthens(node, length)
            await self._writable.truncate(node, size)
        finally:
            self._lane_use.resized(node, length)
            self._use.closed(node)
            if handle is not None:
                self._closes.changed(handle)
        if handle is None:
            self._closes.publish_by_path(node, is_still=is_still)

    # -- bytes

    async def read(self, number: HandleId, offset: int, size: int) -> bytes:
        """Bytes of the file."""
        handle = self._handles.handle(number)
        self._closes.was_read(handle)
        return await self._reads.read(handle, offset, size)

    def _begin(self, number: HandleId, end: int) -> Handle:
        """The open file, which is about to be changed up to `end`; until `changed` its writer is at
        it.

        From before the first byte on: what others close meanwhile is not complete.
        """
        handle = self._handles.handle(number)
        self._check_end(handle.node, end)
        handle.node.writer_pid = handle.pid
        self._closes.changes(handle)
        return handle

    async def _ready(self, node: Node) -> None:
        """Its content is where it can be changed."""
        if not node.body.is_writable:
            await self._writable.ensure(node)
        if node.kernel_writers:
            self._contents.kernel.look(
                node
            )  # the end of the file is where writers in the passthrough lane have put it

    async def write(
        self,
        number: HandleId,
        offset: int,
        data: bytes | memoryview,
        pid: int = 0,
        *,
        is_durable: bool = False,
        is_mapped: bool | None = None,
    ) -> int:
        """Write bytes; with O_APPEND at most at the end.

        `pid`: the thread that does; 0: it cannot be told.

        `is_mapped`: whether they come from a mapping, be it of another descriptor; None: that is
        not told. The kernel has put an appending write at the end already, under its inode lock. It
        also writes the pages of a shared mapping back through whichever descriptor can write, and
        these keep their place even where that descriptor appends.
        """
        handle = self._begin(number, offset + len(data))
        node = handle.node
        try:
            if is_mapped or (node.open_writers > 1 and is_mapped is None):
                self._closes.wrote_mapped(handle, offset, len(data))
            await self._ready(node)
            if pid not in (0, handle.writer):
                self._closes.writes(handle, pid)
            if handle.flags & os.O_APPEND:
                offset = min(offset, node.size)
            done = await self._contents.write(
                node, offset, data, by_append=bool(handle.flags & os.O_APPEND)
            )
        finally:
            self._closes.changed(handle)
        if handle.synchronous or is_durable:
            await self._syncing.fsync(number, is_durable=True)
        return done

    async def fallocate(self, number: HandleId, mode: int, offset: int, length: int) -> None:
        """Allocate in the tier file; an honest ENOSPC when the budget will not hold it."""
        handle = self._begin(number, offset + length)
        node = handle.node
        keeps_size = bool(mode & FALLOC_KEEP_SIZE)
        longer = None if keeps_size else Lengthening(max(node.size, offset + length))
        try:
            if longer is not None:
                await self._lane_use.lengthens(node, longer)
            await self._ready(node)
            if not node.body.is_cold and not mode & FALLOC_PUNCH_HOLE:
                node.body.reserved = True
            await self._contents.allocate(node, mode, offset, length, keep_size=keeps_size)
        finally:
            self._lane_use.resized(node, longer)
            self._closes.changed(handle)

    async def copy_range(
        self, source_number: HandleId, source_offset: int, number: HandleId, offset: int, size: int
    ) -> int:
        """copy_file_range(2) inside the RAM tier: the bytes visit neither the caller nor this
        process. May copy less than asked for.

        Raises:
            OSError: EOPNOTSUPP where the bytes are not both in RAM; the kernel then copies by
                reading and writing.
        """
        reader = self._handles.handle(source_number)
        handle = self._begin(number, offset + min(size, COPY_RANGE_BYTES_MAX))
        try:
            done = await self._copy_range(reader, source_offset, handle.node, offset, size)
        finally:
            self._closes.changed(handle)
        if handle.synchronous:
            await self._syncing.fsync(number)
        return done

    async def _copy_range(
        self, reader: Handle, source_offset: int, node: Node, offset: int, size: int
    ) -> int:
        await self._ready(node)
        source = reader.node.body
        if not source.is_whole_in_ram:
            raise fail(errno.EOPNOTSUPP)
        source_fd = os.dup(
            self._contents.opened(source)
        )  # a truncation meanwhile may give its node another content
        try:
            done = await copy_pieces(
                self._contents,
                source_fd,
                source_offset,
                node,
                offset,
                min(size, COPY_RANGE_BYTES_MAX),
            )
        finally:
            os.close(source_fd)
        if done is None:
            raise fail(errno.EOPNOTSUPP)
        return done

    async def lseek(self, number: HandleId, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE; a file that is not in RAM is all data."""
        node = self._handles.handle(number).node
        if node.body.is_whole_in_ram:
            return await self._contents.locking(node.body, os.lseek, offset, whence)
        if offset >= node.size:
            raise fail(errno.ENXIO)
        return offset if whence == os.SEEK_DATA else node.size
