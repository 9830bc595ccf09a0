"""Which process of /proc makes a call; that this cannot always be told, and then nothing may be read.

The kernel reports a caller by its number in the PID namespace of the mount. It reports 0 for one that has no number there: the daemon
runs in a container, and the caller in another one. A /proc that was mounted in another namespace counts differently: the same number
is somebody else there. Thread-safe.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

PROC = Path("/proc")


def directory_of(pid: int, proc: Path = PROC) -> Path | None:
    """Where /proc tells of a caller; None: it cannot be told which process that is. The directory may be hidden, or gone."""
    return proc / str(pid) if pid and _counts_like_us(proc, os.getpid()) else None


@functools.lru_cache(maxsize=4)
def _counts_like_us(proc: Path, own: int) -> bool:
    """Whether this /proc was mounted in the PID namespace of this process, which is the mount's."""
    try:
        return os.readlink(proc / "self") == str(own)
    except OSError:
        return False
