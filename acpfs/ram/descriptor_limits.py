"""Descriptors of this process: as many as the machine gives, and a reserve that applications cannot take.

Each file that somebody has open holds one or two; the drain, control and the next file that is read need some, too. Standard library only.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

WANTED = 1 << 20
FEW = 1 << 16
RESERVE = 512
"""For streams, commits, syncs of directories, control connections, and what libraries open now and then."""
RESERVE_SHARE = 4
"""… but never more than this fraction of what there are."""
PER_OPEN = 4
"""More than one open file takes."""
UNCHECKED_OPENS_MAX = 1000
NR_OPEN = Path("/proc/sys/fs/nr_open")


def raise_limit() -> None:
    """As far as this process may: with CAP_SYS_RESOURCE beyond the hard limit, which a shell has at some thousand."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        wanted = max(hard, min(WANTED, int(NR_OPEN.read_text())))
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """How many this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def reserve(count: int) -> int:
    """How many of so many are kept."""
    return min(RESERVE, count // RESERVE_SHARE)


def complaints() -> list[str]:
    """What a user should know about the limit."""
    count = limit()
    if count >= FEW:
        return []
    files = max(0, count - reserve(count)) // 2
    return [f"the daemon may have {count} descriptors, so some {files} files can be open: raise the limit (ulimit -Hn, LimitNOFILE)"]


class Reserve:
    """Asked before each open. A new descriptor has the lowest free number, so that says how many are taken; not asked for each time."""

    def __init__(self) -> None:
        self._unchecked_opens = 0

    def before_open(self) -> None:
        """Refuse an open that would take of the reserve.

        Raises:
            OSError: ENFILE.
        """
        if self._unchecked_opens > 0:
            self._unchecked_opens -= 1
            return
        count = limit()
        try:
            lowest = os.eventfd(0, os.EFD_CLOEXEC)
            os.close(lowest)
        except OSError:
            lowest = count
        left = count - reserve(count) - lowest
        if left <= 0:
            raise OSError(errno.ENFILE, "acpfs has no more descriptors for open files")
        self._unchecked_opens = min(left // PER_OPEN, UNCHECKED_OPENS_MAX)
