"""Reading files that are not in RAM: each open file has a descriptor of its own on the backing
directory, opened at its first read.

Knows neither names nor lanes. Used under the file system's lock; the bytes are read on threads of
the pool of requests.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from typing import Any

from acpfs.backing.attributes import lower_stat
from acpfs.backing.read_rate import ReadRate
from acpfs.filesystem.nameless import Nameless
from acpfs.filesystem.nodes import Identity, Node
from acpfs.filesystem.read_handle import ReadHandle
from acpfs.runtime.clock import Clock


def came_to_ram(node: Node, error: OSError) -> bool:
    """Whether another file was found in the place of one that was only on the backing directory
    because somebody here had it in RAM meanwhile, as who writes it anew: there its bytes are.
    """
    return error.errno == errno.ESTALE and not node.body.is_cold


class LowerReads:
    """Descriptors of handles, and reads through them."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        open_lower: Callable[[Node], Awaitable[int]],
        close_later: Callable[[int], None],
        nameless: Nameless,
        rate: ReadRate,
        clock: Clock,
    ) -> None:
        """`call`, `open_lower`, `close_later`: of the view on the lower layer."""
        self._call = call
        self._open_lower = open_lower
        self._close_later = close_later
        self._nameless = nameless
        self._rate = rate
        self._now = clock.now

    async def read(self, handle: ReadHandle, offset: int, size: int) -> bytes:
        """Read from the backing directory through the handle's own descriptor, opened at the first
        read.
        """
        await self.ready_again(handle)
        data: bytes = await self._call("read", self._read, handle.lower_fd, size, offset)
        return data

    async def read_same(self, handle: ReadHandle, offset: int, size: int) -> bytes | None:
        """`read`; None: it is not the file any more that the mount knows."""
        await self.ready_again(handle)
        data: bytes | None = await self._call(
            "read", self._read_same, handle.lower_fd, size, offset, handle.node.identity
        )
        return data

    async def ready(self, handle: ReadHandle) -> None:
        """Have the handle's own descriptor on the file that the node is on the backing directory
        now; of a deleted one, that it was.
        """
        node = handle.node
        if handle.lower_fd >= 0 and node.lower_ino in (0, handle.lower_ino):
            return
        fd = self._nameless.copy(node)
        fd = await self._open_lower(node) if fd < 0 else fd
        if handle.lower_fd >= 0 and handle.lower_ino == node.lower_ino:
            self._close_later(fd)  # two first reads met
            return
        if handle.lower_fd >= 0:
            handle.left_fds.append(handle.lower_fd)
        handle.lower_fd = fd
        handle.lower_ino = node.lower_ino

    async def ready_again(self, handle: ReadHandle) -> None:
        """`ready` for a handle that is open: where its file is not there any more, that is no
        longer a question of names.
        """
        try:
            await self.ready(handle)
        except FileNotFoundError:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from None

    def left(self, handle: ReadHandle) -> None:
        """The handle is gone."""
        for fd in handle.left_fds + [handle.lower_fd] * (handle.lower_fd >= 0):
            self._close_later(fd)

    def _read_same(
        self, fd: int, size: int, offset: int, identity: Identity | None
    ) -> bytes | None:
        data = self._read(fd, size, offset)
        return data if lower_stat(os.fstat(fd)).identity() == identity else None

    def _read(self, fd: int, size: int, offset: int) -> bytes:
        began = self._now()
        data = os.pread(fd, size, offset)
        self._rate.note(len(data), self._now() - began)
        return data
