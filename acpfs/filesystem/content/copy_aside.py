"""Making the bytes of a content free to change: what versions need of them is copied to a tier file
of their own first.

Knows contents and versions; does not know what changes them. Runs as a call does, under the file
system's lock between its waits.
"""

from __future__ import annotations

import errno
import os

from acpfs.backing.calls import CallPool
from acpfs.errors import FULL_ERRNOS
from acpfs.filesystem.content.body import Body
from acpfs.filesystem.content.room import Room
from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import outlast, shared, wait
from acpfs.ram.tier import Tier
from acpfs.ram.waiting import Purpose
from acpfs.types import TierId

INLINE_COPY_BYTES_MAX = 1 << 20
"""Up to here a copy under the lock (about 0.3 ms) is cheaper than a thread switch with everybody
else let in between.
"""


class CopyAside:
    """Copies versions out of the way of changes."""

    def __init__(self, tier: Tier, versions: Versions, room: Room, copies: CallPool) -> None:
        """`copies`: threads for large copies inside the RAM tier."""
        self._tier = tier
        self._versions = versions
        self._room = room
        self._copies = copies
        self.copied_bytes = 0
        """So far."""

    async def free(self, node: Node, start: int) -> Body | None:
        """The node's content, once no version needs its bytes from `start` on; None: there is no
        room for a copy of what they need.

        Raises:
            OSError: EBUSY: it is changed through the path while it outgrows RAM in passthrough.
                ENOSPC: no room, and that is the policy.
        """
        while True:
            body = node.body
            if body.rest is not None:  # mostly all of it is in RAM
                assert not body.is_cold, node.ino
                if body.is_outgrown:
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            if body.busy is not None:
                await wait(body.busy)
                continue
            # asked anew after each wait: a close meanwhile may have frozen more, a commit less
            frozen = self._versions.frozen_bytes(body.tier)
            if frozen <= start:
                return body
            if not await self._copy_aside(node, body, frozen):
                return None

    async def _copy_aside(self, node: Node, body: Body, size: int) -> bool:
        """Give the versions on this tier file a copy of their own; False: there is no room for
        it.
        """
        done = shared()
        body.busy = done
        try:
            if not await self._room.reserve(size, node, Purpose.COPY_ASIDE):
                return not self._versions.on(body.tier)  # else they were all persisted meanwhile
            target = self._tier.create()
            try:
                await self._copy(body.tier, target, size)
            except BaseException as error:
                self._tier.discard(target)
                if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
                    # others have filled the tmpfs, though the budget has room
                    return not self._versions.on(body.tier)
                raise
            finally:
                self._tier.release(size, node.ino)
            self._tier.settle(target)
            # Only when the copy is whole. A stream that has begun reads on in the old file, which
            # changes from now on: so it compares after each read whether the version has moved
            # (interleaving 1).
            self._versions.move(body.tier, target)
            self.copied_bytes += size
            return True
        finally:
            body.busy = None
            done.set_result(None)

    async def _copy(self, source: TierId, target: TierId, size: int) -> None:
        if size <= INLINE_COPY_BYTES_MAX:
            self._tier.copy(source, target, size)
        else:
            # Also where the caller is killed: until the thread is back it takes room, which is
            # reserved, and the file is busy. Nobody holds it up: it only reads in the one file, and
            # nobody else has the other one.
            await outlast(self._copies.submit("copy aside", self._tier.copy, source, target, size))
