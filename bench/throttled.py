"""A disk that reads no faster than so many bytes per second, and that nobody's processor pays for: the kernel's block throttle.

An ext4 file system in an image of its own, on a loop device that reads the image with O_DIRECT. A backing directory that a pass-through
file system limits takes the very processors that readers copy with, which the storage of a training job does not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

SECTOR_BYTES = 512
ROOM_BYTES = 256 << 20
"""For the file system's own structures, its journal first of all."""


class NoThrottleError(Exception):
    """No control group of this machine limits block devices, or none that this process may write to."""


def _limit(device: str, bytes_per_s: int) -> tuple[Path, str]:
    """Where a limit for this process' control group is written, and what; the same for what it starts.

    Raises:
        NoThrottleError: no control group of this machine limits block devices.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _number, controllers, group = line.split(":", 2)
        for top in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/blkio"):
            below = Path(top) / group.lstrip("/")
            if controllers == "blkio" and (file := below / "blkio.throttle.read_bps_device").exists():
                return file, f"{device} {bytes_per_s}"
            if not controllers and (file := below / "io.max").exists():
                return file, f"{device} rbps={bytes_per_s or 'max'}"
    raise NoThrottleError("no control group limits block devices here (blkio.throttle of version 1, io.max of version 2)")


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def throttled_disk(scratch: Path, size: int, bytes_per_s: int) -> Iterator[tuple[Path, Callable[[], int]]]:
    """Yields a directory with room for `size` bytes, and what tells how many bytes were ever read from its device.

    Raises:
        NoThrottleError: this machine has no such limit.
    """
    image, path = scratch / "throttled.img", scratch / "throttled"
    path.mkdir()
    with open(image, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size + ROOM_BYTES)
    with contextlib.ExitStack() as stack:
        device = Path(_run("losetup", "--find", "--show", "--direct-io=on", str(image)))
        stack.callback(_run, "losetup", "--detach", str(device))
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(device))
        _run("mount", str(device), str(path))
        stack.callback(_run, "umount", "-l", str(path))
        number = os.stat(device).st_rdev
        name = f"{os.major(number)}:{os.minor(number)}"
        limit, words = _limit(name, bytes_per_s)
        try:
            limit.write_text(words)
        except OSError as error:
            raise NoThrottleError(f"{limit}: {error.strerror}") from error
        stack.callback(lambda: limit.write_text(_limit(name, 0)[1]))
        statistics = Path("/sys/dev/block") / name / "stat"
        yield path, lambda: int(statistics.read_text().split()[2]) * SECTOR_BYTES
