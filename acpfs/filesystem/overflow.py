"""Files that do not fit into the RAM tier: written straight into a staging file on the backing directory, at its speed.

The same staging file is renamed into place when the file's turn comes, so nothing is written twice and order and checksums are kept.
Every system call on such a file may hang with the backing directory and is made on a thread of the pool, never under the lock.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower, LowerPath
from acpfs.filesystem.content import Content
from acpfs.filesystem.steps import wait
from acpfs.ram.tier import Tier
from acpfs.types import NO_TIER, TierId

CHUNK_BYTES = 8 << 20
T = TypeVar("T")


class Overflow:
    """Makes and uses contents whose bytes are in a staging file."""

    def __init__(self, lower: Lower, calls: CallPool, tier: Tier, patience_s: float) -> None:
        """`calls`: threads for calls on the backing directory; `patience_s`: how long a read waits for it.

        A write waits as long as it takes, as it would without acpfs: one that was given up could still arrive, over newer bytes.
        """
        self._patience_s = patience_s
        self._lower = lower
        self._calls = calls
        self._tier = tier
        self.being_made: set[str] = set()
        """Staging files that no content names yet."""
        self.files = 0
        """How many files have taken this way so far."""

    async def from_tier(self, tier_id: TierId, size: int) -> Content:
        """A content with the first `size` bytes of a tier file."""
        return await self._make(lambda fd: self._copy_from_tier(tier_id, fd, size))

    async def from_lower(self, path: LowerPath, size: int) -> Content:
        """A content with the first `size` bytes of a file of the backing directory."""
        return await self._make(lambda fd: self._copy_from_lower(path, fd, size))

    async def _make(self, fill: Callable[[int], None]) -> Content:
        name = f"overflow-{secrets.token_hex(8)}"
        self.files += 1
        self.being_made.add(name)
        fd = await wait(self._calls.submit("overflow", self._create, name, fill))
        return Content(NO_TIER, overflow=name, fd=fd)

    def in_use(self, contents: Iterable[Content]) -> set[str]:
        """Names of all staging files that have, or are about to have, a file's content."""
        contents = list(contents)
        names = {content.overflow for content in contents if content.overflow}
        names |= {content.spill.name for content in contents if content.spill is not None}
        self.being_made -= names
        return names | self.being_made

    def _create(self, name: str, fill: Callable[[int], None]) -> int:
        fd = self._lower.create_staging(name)
        try:
            fill(fd)
        except BaseException:
            os.close(fd)
            self._lower.remove_staging(name)
            raise
        return fd

    def _copy_from_tier(self, tier_id: TierId, fd: int, size: int) -> None:
        source = self._tier.open(tier_id)
        try:
            self._copy(source, fd, size)
        finally:
            os.close(source)

    def _copy_from_lower(self, path: LowerPath, fd: int, size: int) -> None:
        source = self._lower.open_read(path)
        try:
            self._copy(source, fd, size)
        finally:
            os.close(source)

    @staticmethod
    def _copy(source: int, target: int, size: int) -> None:
        done = 0
        while done < size:
            data = os.pread(source, min(CHUNK_BYTES, size - done), done)
            if not data:
                break
            _write_all(target, data, done)
            done += len(data)
        os.ftruncate(target, size)

    # -- use

    async def _call(self, content: Content, label: str, function: Callable[..., T], *arguments: Any, patience_s: float = math.inf) -> T:
        content.in_flight += 1
        try:
            if content.fd < 0:  # an earlier daemon made it
                content.fd = await wait(self._calls.submit("open overflow", self._lower.open_staging, content.overflow))
            call = self._calls.submit(label, function, content.fd, *arguments)
            return await wait(call if math.isinf(patience_s) else self._calls.patient(call, patience_s))
        finally:
            content.in_flight -= 1
            if content.closing and not content.in_flight:
                self._close(content)

    async def read(self, content: Content, offset: int, size: int) -> bytes:
        """Bytes of the file; shorter at its end."""
        return await self._call(content, "read overflow", os.pread, size, offset, patience_s=self._patience_s)

    async def write(self, content: Content, offset: int, data: bytes | memoryview) -> int:
        """Write all bytes."""
        return await self._call(content, "write overflow", _write_all, data, offset)

    async def truncate(self, content: Content, size: int) -> None:
        """Change the file's length."""
        await self._call(content, "truncate overflow", os.ftruncate, size)

    def let_go(self, content: Content, *, remove: bool) -> None:
        """Nobody uses the content any more; `remove`: nor does a version."""
        content.closing = True
        if not content.in_flight:
            self._close(content)
        if remove:
            self._calls.submit("remove overflow", self._lower.remove_staging, content.overflow)

    def _close(self, content: Content) -> None:
        if content.fd >= 0:
            self._calls.submit("close overflow", os.close, content.fd)
            content.fd = -1


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> int:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
    return done
