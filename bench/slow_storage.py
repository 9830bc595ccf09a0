"""A directory as a network file system shows it: fsync costs milliseconds, any number at a time,
and the kernel may keep what it was told.

The tests' pass-through file system without faults, but with names and attributes cached for a
second: without that, every look at a path would cost this program's processor time, which no
network file system asks for.

Usage: python -m bench.slow_storage SOURCE MOUNTPOINT FSYNC_SECONDS
"""

from __future__ import annotations

import os
import resource
import sys

import pyfuse3
import trio

from tests.rig.faultfs_ops import FaultyOperations
from tests.rig.faults import Faults

CACHED_S = 1.0
TASKS_MAX = 500


class Cached(FaultyOperations):
    """Lets the kernel keep names and attributes."""

    def _entry(self, st: os.stat_result) -> pyfuse3.EntryAttributes:
        entry = super()._entry(st)
        entry.entry_timeout = CACHED_S
        entry.attr_timeout = CACHED_S
        return entry


async def serve() -> None:
    """Until unmounted."""
    await pyfuse3.main(max_tasks=TASKS_MAX)


def main(source: str, mountpoint: str, fsync_s: float) -> None:
    """Mount and serve."""
    os.umask(0)
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (files_max, files_max)
    )  # a descriptor for each name that the kernel keeps
    faults = Faults()
    faults.fsync_s = fsync_s
    operations = Cached(source, faults, None, page_cache=True, sync=False)
    pyfuse3.init(
        operations, mountpoint, {"default_permissions", "allow_other", "fsname=slow-storage"}
    )
    try:
        trio.run(serve)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
