"""Bytes of a file, wherever they are: RAM, a staging file, the spill directory, the backing directory, or two of them together.

The one way for all who read; it asks the places in the order in which they answer. Does not change where bytes are. Used under the file
system's lock; coroutines wait as in `steps`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future

from acpfs.filesystem.content import Content, Remainder
from acpfs.filesystem.contents import Contents
from acpfs.filesystem.lower_reads import LowerReads
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.outgrown import OutgrownFiles
from acpfs.filesystem.overflow import Overflow
from acpfs.filesystem.read_handle import ReadHandle
from acpfs.filesystem.steps import unlocked, wait
from acpfs.filesystem.warming import Warming
from acpfs.writeback.sources.spill import Spill


class Reads:
    """Reads from every place."""

    def __init__(
        self,
        contents: Contents,
        overflow: Overflow,
        outgrown: OutgrownFiles,
        spill: Spill | None,
        warming: Warming,
        lower: LowerReads,
        persisting: Callable[[Node], Future[None]],
    ) -> None:
        """`persisting`: done when all that was logged of the node is on the backing directory."""
        self._contents, self._overflow, self._outgrown, self._spill = contents, overflow, outgrown, spill
        self._warming, self._lower, self._persisting = warming, lower, persisting

    async def read(self, handle: ReadHandle, offset: int, size: int) -> bytes:
        """Bytes of an open file; shorter at its end."""
        node = handle.node
        if node.content is None:
            self._warming.check(node)
            if node.remainder is not None and min(offset + size, node.size) <= node.remainder.size:
                return await self._with_head(handle, node.remainder, offset, min(size, max(0, node.size - offset)))
            data = await self._warming.read(handle, offset, size)
            if data is not None:
                return data
        while (content := node.content) is not None:
            try:
                return await self.content(node, content, offset, size)
            except OSError as error:
                if node.content is not content:
                    continue  # its version was persisted, and the copy in the spill directory went with it
                if not (content.sealed and isinstance(error, FileNotFoundError)):
                    raise
                # the staging file was renamed into place, and no descriptor had been open
                await self._overflow.patient(self._persisting(node))
        if node.remainder is not None:
            return await self._with_head(handle, node.remainder, offset, size)
        return await self._lower.read(handle, offset, size)

    async def content(self, node: Node, content: Content, offset: int, size: int) -> bytes:
        """Bytes of a node's content."""
        if content.overflow:
            size = min(size, max(0, node.size - offset))  # what lies behind is of a write that was never answered
            return await self._overflow.read(content, offset, size)
        if content.spilled:
            return await self._spilled(content, offset, size)
        if content.outgrown is not None:
            return await self._outgrown.read(content, offset, size)
        return await self._contents.read(content, offset, size)

    async def _spilled(self, content: Content, offset: int, size: int) -> bytes:
        assert self._spill is not None, content.spilled
        try:
            return await wait(self._spill.read(content.spilled, offset, size))
        except OSError as error:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error

    async def _with_head(self, handle: ReadHandle, remainder: Remainder, offset: int, size: int) -> bytes:
        """From RAM what is there, and the rest from the backing directory, if the file there is still the one that RAM has a part of."""
        node, end = handle.node, offset + size
        start = min(max(offset, remainder.size), end)
        rest = await self._lower.read_same(handle, start, end - start) if end > start else b""
        head = await unlocked(self._contents.remainders.read, remainder, offset, start - offset) if rest is not None else b""
        if rest is not None and len(head) == start - offset:
            return head + rest
        if node.remainder is remainder:
            self._contents.drop(node)
        return await self._lower.read(handle, offset, size)
