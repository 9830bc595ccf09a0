"""Which way a file's bytes travel, decided at each open, with the reason.

`passthrough`: the kernel reads and writes the tier file (or, for a file that is not in RAM, the
backing directory's file) itself; the daemon sees neither. So only opens whose writes need not be
seen may have it; see docs/internals/passthrough.md.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable

from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import Lane
from acpfs.runtime.clock import Clock

ARRIVAL_S = 2.0
"""So long after its answer an open may not have come to its end in the kernel: far beyond what a
crowded machine has a process wait.
"""


def _is_new(node: Node, flags: int) -> bool:
    """Whether an open to read and write begins a file, to be written from its beginning to its end,
    and leaves a trace if it maps it.
    """
    return not (
        node.size or node.in_kernel or node.body.is_cold or flags & (os.O_APPEND | os.O_NOATIME)
    )


class Lanes:
    """The transport says what it can do; every open asks."""

    def __init__(self, clock: Clock) -> None:
        self.now = clock.now
        self._daemon_lane = Lane.LIBFUSE
        self._passthrough = False
        self.reasons: Counter[str] = Counter()
        """How many opens went which way, and why."""

    def offer(self, daemon_lane: Lane, *, passthrough: bool) -> None:
        """What the transport and the kernel can do: the lane through the daemon, and whether there
        is passthrough.
        """
        self._daemon_lane = daemon_lane
        self._passthrough = passthrough

    @property
    def daemon_lane(self) -> Lane:
        """The lane through the daemon."""
        return self._daemon_lane

    def offered(self) -> list[str]:
        """Lanes that files may take on this mount."""
        return ([Lane.PASSTHROUGH.value] if self._passthrough else []) + [self._daemon_lane.value]

    def choose(self, node: Node, flags: int, refuse: Callable[[], str]) -> Lane:
        """The lane of one open.

        `refuse`: says why there is no room for a writer in the passthrough lane.
        """
        reason = self._against(node, flags)
        if not reason and flags & os.O_ACCMODE != os.O_RDONLY:
            reason = refuse()
        self.reasons[reason or Lane.PASSTHROUGH.value] += 1
        return self._daemon_lane if reason else Lane.PASSTHROUGH

    def daemon_for(self, reason: str) -> Lane:
        """The lane through the daemon, for a reason that this module does not know."""
        self.reasons[Lane.PASSTHROUGH.value] -= 1
        self.reasons[reason] += 1
        return self._daemon_lane

    @staticmethod
    def bind(handle: Handle) -> bool:
        """Note an open in the daemon's lane beside such as the kernel serves; whether it may write
        unseen, through a mapping.

        Raises:
            OSError: EBUSY, the kernel has the backing directory's file, which a writable mapping
                must not change (exception X7).
        """
        node = handle.node
        if not node.in_kernel:
            return False
        may_write = handle.writable and handle.may_map
        if may_write and (
            node.body.is_cold or not node.body.tier or node.kernel_target != node.body.tier
        ):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        handle.bound = True
        node.bound_handles += 1
        return may_write

    def _is_being_opened(self, node: Node) -> bool:
        """Whether another open in the daemon's lane may not have arrived.

        Of the answers to two opens the second may come to its end first. Once that one has given
        the inode a file for passthrough, the kernel takes no open without one: the first, which had
        been answered when there was none, would end with EIO.
        """
        # by time, since the kernel does not tell when an answer to open has come to its end (S335)
        others = node.handles - 1 - node.kernel_handles
        return not node.in_kernel and others > 0 and self.now() - node.daemon_opened_at < ARRIVAL_S

    def _against(self, node: Node, flags: int) -> str:
        """Why not passthrough; "" for no reason."""
        access = flags & os.O_ACCMODE
        if not self._passthrough:
            return "not offered by transport and kernel"
        if not node.body.is_cold and (not node.body.is_whole_in_ram or node.body.overflowing):
            return "in the spill directory" if node.body.is_spilled else "does not fit into RAM"
        if node.body.head_bytes and access == os.O_RDONLY:
            return "partly in RAM"
        if node.in_kernel and node.kernel_target != (
            node.body.tier if not node.body.is_cold else 0
        ):
            return "open in the passthrough lane on an earlier content"
        if access == os.O_RDWR and not _is_new(node, flags):
            return "read and written, and not new: it may be mapped"
        if node.daemon_mappers:
            return "open in the daemon's lane, perhaps mapped"
        if self._is_being_opened(node):
            return "somebody opens it in the daemon's lane at this moment"
        if flags & os.O_DSYNC:
            return "opened with O_SYNC or O_DSYNC"
        if node.mode & (stat.S_ISUID | stat.S_ISGID):
            return "set-uid or set-gid: a write must clear the bits"
        if access == os.O_WRONLY and node.body.is_cold:
            return "not in RAM"
        return ""
