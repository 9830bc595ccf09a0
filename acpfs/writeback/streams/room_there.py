"""Whether a full storage has room for a file, asked before its bytes are sent.

A stream that finds no room in its midst has sent what it had for nothing, and so have all that ran
beside it; and they are tried again and again. So as long as the storage is full, each stream has
room set aside for its file first. Where the backing file system cannot do that, its free space is
compared, beside what other streams are about to take; and as nobody knows whether that is right
(quotas, file systems that tell nothing), a stream is tried now and then whatever it says.
Thread-safe.
"""

from __future__ import annotations

import errno
import os
import threading

from acpfs.backing.lower import Lower
from acpfs.errors import FULL_ERRNOS
from acpfs.ram.tier import Tier
from acpfs.types import VersionId
from acpfs.writeback.log.ops import Op, Version

TRIED_ANYWAY = 8
"""Every so many tries of a file its bytes are sent, whatever the free space is said to be."""


class RoomThere:
    """Knows whether the storage is full: since a stream found no room, until as large a file has
    got it.
    """

    def __init__(self, lower: Lower, tier: Tier) -> None:
        self._lower = lower
        self._tier = tier
        self._lock = threading.Lock()
        self._wanted_bytes = 0
        """The least for which there was no room, until there was some for as much; 0: nothing is
        known to be full.
        """
        self._claims: dict[VersionId, int] = {}
        """What streams that go by the free space are about to take."""

    def ask(self, op: Op, version: Version, fd: int) -> None:
        """Before anything is written to a staging file.

        Raises:
            OSError: ENOSPC, EDQUOT: there is no room for it.
        """
        if not (self._wanted_bytes and version.size):
            return
        taken = min(version.size, self._tier.allocated_bytes(version.tier_id) or version.size)
        # not of a file with holes: what is set aside for those would stay theirs
        if taken == version.size and self._lower.make_room(fd, version.size):
            return
        space = self._lower.space()
        with self._lock:
            free = space.blocks_free * space.block_bytes - sum(self._claims.values())
            if space.blocks and free < taken and op.tries % TRIED_ANYWAY:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._claims[version.vid] = taken

    def ended(self, version: Version, error: BaseException | None) -> None:
        """The stream has its file there, or has failed."""
        with self._lock:
            self._claims.pop(version.vid, None)
            if error is None and version.size >= self._wanted_bytes:
                self._wanted_bytes = 0
            elif isinstance(error, OSError) and error.errno in FULL_ERRNOS:
                self._wanted_bytes = max(1, min(self._wanted_bytes or version.size, version.size))
