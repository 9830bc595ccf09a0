"""Bytes of a file, wherever they are: RAM, a staging file, the spill directory, the backing
directory, or two of them together.

The one way for all who read; it asks the places in the order in which they answer. Does not change
where bytes are. Used under the file system's lock; coroutines wait as in `steps`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future

from acpfs.filesystem.content.body import Body
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.content.overflow import Overflow
from acpfs.filesystem.content.warming import Warming
from acpfs.filesystem.lower_reads import LowerReads, came_to_ram
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.read_handle import ReadHandle
from acpfs.filesystem.steps import unlocked, wait
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
        self._contents = contents
        self._overflow = overflow
        self._outgrown = outgrown
        self._spill = spill
        self._warming = warming
        self._lower = lower
        self._persisting = persisting

    async def read(self, handle: ReadHandle, offset: int, size: int) -> bytes:
        """Bytes of an open file; shorter at its end."""
        while True:
            was_cold = handle.node.body.is_cold
            try:
                return await self._read(handle, offset, size)
            except OSError as error:
                if not (was_cold and came_to_ram(handle.node, error)):
                    raise

    async def _read(self, handle: ReadHandle, offset: int, size: int) -> bytes:
        node = handle.node
        if node.body.is_cold:
            self._warming.check(node)
            if node.body.head_bytes and min(offset + size, node.size) <= node.body.head_bytes:
                return await self._with_head(
                    handle, node.body, offset, min(size, max(0, node.size - offset))
                )
            data = await self._warming.read(handle, offset, size)
            if data is not None:
                return data
        while not (body := node.body).is_cold:
            try:
                return await self.content(node, body, offset, size)
            except OSError as error:
                if node.body is not body:
                    # its version was persisted, and the copy in the spill directory went with it
                    continue
                if not (body.sealed and isinstance(error, FileNotFoundError)):
                    raise
                # The staging file was renamed into place, and no descriptor had been open. It is
                # the file of the backing directory when its commit is flushed, so this waits for
                # that, and no longer than the backing directory may take (S255).
                await self._overflow.patient(self._persisting(node))
        if body.head_bytes:
            return await self._with_head(handle, body, offset, size)
        return await self._lower.read(handle, offset, size)

    async def content(self, node: Node, body: Body, offset: int, size: int) -> bytes:
        """Bytes of a node's content."""
        if body.is_overflowed:
            size = min(
                size, max(0, node.size - offset)
            )  # what lies behind is of a write that was never answered
            return await self._overflow.read(body, offset, size)
        if body.is_spilled:
            return await self._spilled(body, offset, size)
        if body.is_outgrown:
            return await self._outgrown.read(body, offset, size)
        if self._contents.earlier.may_write(body.tier):
            size = min(size, max(0, node.size - offset))  # others may make the tier file longer
        return await self._contents.read(body, offset, size)

    async def _spilled(self, body: Body, offset: int, size: int) -> bytes:
        assert self._spill is not None, body.rest
        try:
            return await wait(self._spill.read(body.spilled, offset, size))
        except OSError as error:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error

    async def _with_head(self, handle: ReadHandle, body: Body, offset: int, size: int) -> bytes:
        """From RAM what is there, and the rest from the backing directory, if the file there is
        still the one that RAM has a part of.
        """
        node = handle.node
        end = offset + size
        there = body.head_bytes
        start = min(max(offset, there), end)
        rest = await self._lower.read_same(handle, start, end - start) if end > start else b""
        head = (
            await unlocked(self._contents.read_head, body, offset, start - offset)
            if rest is not None
            else b""
        )
        if rest is not None and len(head) == start - offset:
            return head + rest
        if (
            node.body is body and body.head_bytes == there
        ):  # else it was given up, or cut, meanwhile
            self._contents.drop(node)
        return await self._lower.read(handle, offset, size)
