"""Bytes of open files: read, write, truncate, fsync, fallocate, copy_range, lseek; files that stay
open for long.

Decides when a file's content is fixed (a version) without being closed: fsync, and age. Where the
bytes are is `Reads`' and `Contents`' business; opening and closing that of `OpenFiles`. Used under
the file system's lock; coroutines wait as in `steps`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from acpfs.backing.lower import SpaceInfo
from acpfs.config import FsyncMode
from acpfs.filesystem.attribute_calls import AttributeCalls
from acpfs.filesystem.close_states import CloseEvent
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.content.reads import Reads
from acpfs.filesystem.content.writable import Writable
from acpfs.filesystem.copy_range import copy_pieces
from acpfs.filesystem.doubtful_closes import DoubtfulCloses
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.names import fail
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.open_files import OpenFiles
from acpfs.filesystem.steps import wait
from acpfs.ram.tier import BLOCK_BYTES, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE
from acpfs.runtime.clock import Clock
from acpfs.types import HandleId, Seq
from acpfs.writeback.log.log import OperationLog

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
        open_files: OpenFiles,
        attributes: AttributeCalls,
        reads: Reads,
        closes: DoubtfulCloses,
        contents: Contents,
        writable: Writable,
        outgrown: OutgrownFiles,
        table: NodeTable,
        log: OperationLog,
        clock: Clock,
    ) -> None:
        self._now = clock.now
        self._open = open_files
        self._attributes = attributes
        self._reads = reads
        self._closes = closes
        self._contents = contents
        self._writable = writable
        self._outgrown = outgrown
        self._table = table
        self._log = log
        self._file_bytes_max = FILE_BYTES_MAX

    # -- the content as a whole

    async def fsync(self, number: HandleId, *, is_durable: bool = False) -> None:
        """Fix the content in the order; in durable mode, or where that is asked for, wait until it
        is persisted.

        Raises:
            OSError: ENOSPC: it outgrew RAM in the passthrough lane, opened before it was durable;
                it is persisted after its last close. Or it stands behind such a file, which is
                open.
        """
        handle = self._open.handle(number)
        await self._outgrown.check(handle.node)
        # not before: who only syncs, and is told that it failed, has written nothing, and keeps
        # nothing back
        handle.take(CloseEvent.WROTE)
        self._open.goes_on(handle)
        self._open.fix(handle)
        self._open.report_refusal(handle.node)
        if (
            handle.synchronous
            or is_durable
            or await self._attributes.fsync_mode(handle.node) is FsyncMode.DURABLE
        ):
            if handle.writes_unseen:
                self._outgrown.refuse_to_wait(handle.node)
            seen = None
            while (
                last := self._log.last_of(handle.node.ino)
            ) is not None and last is not seen:  # others may store it anew meanwhile
                seen = last
                if open_ones := await self._outgrown.in_the_way(last.seq):
                    self._outgrown.refuse_to_wait(self._table[open_ones[0].ino])
            await self._writable.persisted(handle.node)

    async def fsync_directory(self, node: Node) -> None:
        """In durable mode, wait until its names and its own attributes are persisted; an open file
        has no name yet that could be.

        Raises:
            OSError: ENOSPC: some of that stands behind an open file that outgrew RAM.
        """
        if await self._attributes.fsync_mode_in(node) is not FsyncMode.DURABLE:
            return
        newest = self._log.newest()
        if newest is None or not (self._log.pending_in(node.ino) or self._log.is_pending(node.ino)):
            return
        open_ones = await self._outgrown.in_the_way(newest.seq)
        # not the one from before the wait: a store may have been replaced by one with a larger
        # number
        seq = self._log.last_seq
        if open_ones:
            later = (
                op
                for op in self._log.since(open_ones[0].seq)
                if op not in open_ones and op.concerns(node.ino)
            )
            if any(self._log.stands_since(op) <= newest.logged_at for op in later):
                self._outgrown.refuse_to_wait(self._table[open_ones[0].ino])
            seq = Seq(open_ones[0].seq - 1)
        await wait(self._log.when_done(seq, node.ino))

    def learn_capacity(self, space: SpaceInfo) -> None:
        """What the backing file system has room for altogether; a longer file is nothing but a
        mistake, which would be copied for years.
        """
        self._file_bytes_max = max(FILE_BYTES_MAX, space.blocks * space.block_bytes)

    def owed_bytes(self) -> int:
        """What was written, closed or not, and is in RAM alone: the backing directory will want
        room for it.
        """
        written = (
            node
            for node in self._open.open_nodes()
            if (node.modified or node.kernel_writers) and not node.body.is_cold and node.body.tier
        )
        unfrozen = (
            max(0, node.blocks * BLOCK_BYTES - self._contents.frozen_bytes(node))
            for node in written
        )
        return self._log.unstored_bytes + sum(unfrozen)

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
        handle = self._open.find(number) if number is not None else None
        is_still = handle is None and not self._open.is_anybody_at_it(node)
        if handle is not None:
            self._open.changes(handle)
        node.handles += 1
        try:
            await self._writable.truncate(node, size)
        finally:
            self._open.closed(node)
            if handle is not None:
                self._open.changed(handle)
        if handle is None:
            self._open.publish_if_done(node, is_still=is_still)
            self._outgrown.seal_taken_up(node)

    # -- bytes

    async def read(self, number: HandleId, offset: int, size: int) -> bytes:
        """Bytes of the file."""
        handle = self._open.handle(number)
        handle.only_written = False
        return await self._reads.read(handle, offset, size)

    def _begin(self, number: HandleId, end: int) -> Handle:
        """The open file, which is about to be changed up to `end`; until `changed` its writer is at
        it.

        From before the first byte on: what others close meanwhile is not complete.
        """
        handle = self._open.handle(number)
        self._check_end(handle.node, end)
        handle.node.writer_pid = handle.pid
        self._open.changes(handle)
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
                self._open.wrote_mapped(handle, offset, len(data))
            await self._ready(node)
            if pid not in (0, handle.writer):
                self._open.writes(handle, pid)
            if handle.flags & os.O_APPEND:
                offset = min(offset, node.size)
            done = await self._contents.write(
                node, offset, data, by_append=bool(handle.flags & os.O_APPEND)
            )
        finally:
            self._open.changed(handle)
        if handle.synchronous or is_durable:
            await self.fsync(number, is_durable=True)
        return done

    async def fallocate(self, number: HandleId, mode: int, offset: int, length: int) -> None:
        """Allocate in the tier file; an honest ENOSPC when the budget will not hold it."""
        handle = self._begin(number, offset + length)
        try:
            await self._ready(handle.node)
            if not handle.node.body.is_cold and not mode & FALLOC_PUNCH_HOLE:
                handle.node.body.reserved = True
            await self._contents.allocate(
                handle.node, mode, offset, length, keep_size=bool(mode & FALLOC_KEEP_SIZE)
            )
        finally:
            self._open.changed(handle)

    async def copy_range(
        self, source_number: HandleId, source_offset: int, number: HandleId, offset: int, size: int
    ) -> int:
        """copy_file_range(2) inside the RAM tier: the bytes visit neither the caller nor this
        process. May copy less than asked for.

        Raises:
            OSError: EOPNOTSUPP where the bytes are not both in RAM; the kernel then copies by
                reading and writing.
        """
        reader = self._open.handle(source_number)
        handle = self._begin(number, offset + min(size, COPY_RANGE_BYTES_MAX))
        try:
            done = await self._copy_range(reader, source_offset, handle.node, offset, size)
        finally:
            self._open.changed(handle)
        if handle.synchronous:
            await self.fsync(number)
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
        node = self._open.handle(number).node
        if node.body.is_whole_in_ram:
            return await self._contents.locking(node.body, os.lseek, offset, whence)
        if offset >= node.size:
            raise fail(errno.ENXIO)
        return offset if whence == os.SEEK_DATA else node.size

    # -- files that stay open

    def due_older_than(self, age_s: float) -> list[Node]:
        """Logs that are open and whose first unfixed change is older."""
        changed = self._changed()
        due = self._now() - age_s
        return [
            node
            for node in changed
            if not node.body.is_cold and node.body.modified_since <= due and self._open.is_log(node)
        ]

    def freeze_older_than(self, age_s: float) -> int:
        """Fix such logs, but for those that the kernel writes (`freeze_marked`); how many."""
        return self._freeze(n for n in self.due_older_than(age_s) if not n.kernel_writers)

    async def freeze_marked(self, node: Node) -> None:
        """Fix the content of a log that the kernel writes.

        A write that is under way gets done first, which may take for ever.
        """
        node.handles += 1
        try:
            await self._contents.mark(node)
            if node.modified and not node.interrupted and self._open.is_log(node):
                self._closes.fix(node)
        finally:
            self._open.closed(node)

    def freeze_the_closed(self) -> int:
        """Nobody can write any more: fix the content of open files, but for one that was never
        closed and is no log. Returns how many.

        Where the session ended beneath its users, that one is a half, and found as one whose writer
        was lost.
        """
        return self._freeze(
            n for n in self._changed() if self._open.is_log(n) or self._open.was_closed(n)
        )

    def look_at_writers(self) -> None:
        """Hear what the kernel wrote by itself until now."""
        for node in self._open.open_nodes():
            if node.kernel_writers:
                self._contents.kernel.look(node)

    def _freeze(self, nodes: Iterable[Node]) -> int:
        return sum(self._closes.fix(node) is not None for node in list(nodes))

    def _changed(self) -> list[Node]:
        """Open files that hold something unfixed and can be fixed."""
        self.look_at_writers()
        return [
            n
            for n in self._open.open_nodes()
            if n.modified and not n.interrupted and not n.body.is_outgrown
        ]
