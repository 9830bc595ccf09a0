"""A backing directory whose throughput falls with the clients that write at the same time, as many
a parallel file system's does.

The tests' pass-through file system with a bandwidth, times (best / clients) ** 0.7 where more than
`best` files are being written.

Usage: python -m bench.crowded_storage SOURCE MOUNTPOINT BYTES_PER_S BEST
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable
from typing import Any

import pyfuse3
import trio

from tests.rig.faultfs_ops import FaultyOperations
from tests.rig.faults import Faults

AT_ONCE_S = 0.5
"""A file that was written within this time is one of those that are written now."""
CONTENTION = 0.7
TASKS_MAX = 500


class Crowded(FaultyOperations):
    """Bandwidth by the number of files."""

    def __init__(self, source: str, faults: Faults, bytes_per_s: int, best: int) -> None:
        super().__init__(source, faults, None, page_cache=False, sync=False)
        self._bytes_per_s = bytes_per_s
        self._best = best
        self._written: dict[int, float] = {}

    def write(self, fh: int, off: int, buf: bytes, *more: Any) -> Awaitable[int]:  # type: ignore[override]
        now = trio.current_time()
        self._written[fh] = now
        self._written = {other: at for other, at in self._written.items() if now - at < AT_ONCE_S}
        share = min(1.0, self._best / len(self._written))
        self.faults.bandwidth = int(self._bytes_per_s * share**CONTENTION)
        return super().write(fh, off, buf, *more)


async def serve() -> None:
    """Until unmounted."""
    await pyfuse3.main(max_tasks=TASKS_MAX)


def main(source: str, mountpoint: str, bytes_per_s: int, best: int) -> None:
    """Mount and serve."""
    os.umask(0)
    pyfuse3.init(
        Crowded(source, Faults(), bytes_per_s, best),
        mountpoint,
        {"default_permissions", "allow_other", "fsname=crowded-storage"},
    )
    try:
        trio.run(serve)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
