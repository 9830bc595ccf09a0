"""Which writers in the passthrough lane may have been told ENOSPC by the tmpfs itself: the daemon
does not see their calls.

They are held before the tmpfs is full (`hold`), unless nobody was there in time to hold them. Then
a write fails, its program may close the file all the same, and nothing in the file shows that bytes
are missing. But a write that fails leaves its time: the kernel sets a file's mtime before it takes
pages. So whoever has a time from a moment in which the tmpfs was full counts as one that failed;
what was not tried, since its writers were held or did something else, is as good as before. A file
whose write just fitted in such a moment cannot be told apart, and counts as failed, too. A write
that was under way before, and ends short there, has an older time. Its program sees the short
count, and its next write is held, or has a time of its own. (One that is stopped between its time
and its first page, while all the rest of the tmpfs is filled, is not seen.) Used under the file
system's lock.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace

from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.logger import get_logger, shown
from acpfs.ram.tier import Tier
from acpfs.runtime.clock import Clock
from acpfs.types import Ino

STAMPS = 999
"""Different marks within one tick of the clock; as many nanoseconds is what a mark may lie beside
the true mtime (`kernel_writes`).
"""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Moment:
    """Read before a file is looked at."""

    clock_ns: int
    fulls: int
    """How often the tmpfs had been seen full."""


@dataclass(frozen=True, slots=True)
class _Look:
    """A file as it was when no write to it can have failed."""

    at: Moment
    mtime_ns: int

    def is_untried(self, st: os.stat_result) -> bool:
        """Whether nobody has begun to write since.

        The size may be another: of a write that was under way.
        """
        return st.st_mtime_ns == self.mtime_ns < self.at.clock_ns


class Fullness:
    """Remembers the last look at each file that the kernel may write to."""

    def __init__(self, tier: Tier, table: NodeTable, clock: Clock) -> None:
        self._kernel_ns = clock.kernel_ns  # no write from now on gives a file an earlier time
        self._tier = tier
        self._table = table
        self._looks: dict[Ino, _Look] = {}

    def moment(self) -> Moment:
        """Now.

        The clock first: a write that fails right after that must not look like one of before.
        """
        clock_ns = self._kernel_ns()
        return Moment(clock_ns, self._tier.look_full())

    def judge(self, node: Node, st: os.stat_result, moment: Moment) -> None:
        """The file was looked at after `moment`: it has failed if somebody may have been told so.

        One that is new here has not.
        """
        last = self._looks.get(node.ino)
        if last is not None and last.at.fulls != moment.fulls and not last.is_untried(st):
            self._fail(node)
        self._looks[node.ino] = _Look(moment, st.st_mtime_ns)

    def marked(self, ino: Ino, mtime_ns: int) -> None:
        """The file was marked, which gives it another time, too.

        A later one than that of the last look and a mark is a write's.
        """
        last = self._looks.get(ino)
        if last is not None and 0 <= mtime_ns - last.mtime_ns <= STAMPS:
            self._looks[ino] = replace(last, mtime_ns=mtime_ns)

    def judge_found(self, node: Node, moment: Moment, *, written: bool) -> None:
        """An earlier worker had the file, whose looks are not known; `written`: something in it is
        in no version.
        """
        if written and moment.fulls:
            self._fail(node)

    def ended(self, ino: Ino) -> None:
        """The kernel writes to it no more."""
        self._looks.pop(ino, None)

    def _fail(self, node: Node) -> None:
        body = node.body
        if body.is_cold or body.failed:
            return
        body.failed = errno.ENOSPC
        body.failed_at = node.size
        self._table.changed(node)
        path = shown(self._table.path(node.ino))
        log.error(
            "it was written while the RAM tier's tmpfs was full, and may lack bytes: close says "
            "ENOSPC, nothing is published",
            path=path,
        )
