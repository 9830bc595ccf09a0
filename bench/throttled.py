"""A disk that reads no faster than so many bytes per second, and that nobody's processor pays for:
the kernel's block throttle.

A backing directory that a pass-through file system limits takes the very processors that readers
copy with, which the storage of a training job does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.disk import Disk, NoDiskError, NoThrottleError, limited

__all__ = ["NoThrottleError", "throttled_disk"]


@contextlib.contextmanager
def throttled_disk(
    scratch: Path, size: int, bytes_per_s: int
) -> Iterator[tuple[Path, Callable[[], int]]]:
    """Yields a directory with room for `size` bytes, and what tells how many bytes were ever read
    from its device.

    Raises:
        NoThrottleError: this machine has no such limit.
    """
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(Disk(scratch, size, "throttled"))
        except NoDiskError as error:
            raise NoThrottleError(str(error)) from error
        stack.enter_context(limited(disk, bytes_per_s))
        yield disk.path, disk.read_bytes
