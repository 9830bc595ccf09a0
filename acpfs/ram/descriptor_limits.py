"""Descriptors of this process: as many as the machine gives, a reserve that applications cannot
take, and a share for each user.

Each file that somebody has open holds one or two; the drain, control and the next file that is read
need some, too. Standard library only; `Reserve` is used under the file system's lock.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from acpfs.runtime.clock import Clock

WANTED = 1 << 20
FEW = 1 << 16
RESERVE = 512
"""For streams, commits, syncs of directories, control connections, and what libraries open now and
then.
"""
RESERVE_SHARE = 4
"""… but never more than this fraction of what there are."""
PER_OPEN = 4
"""More than one open file takes."""
UNCHECKED_OPENS_MAX = 1000
USER_SHARE = 4
"""A user may have this many times as many files open as descriptors are left. So one user takes
four fifths of them at most, each further one as much of the rest, and whoever has few open finds
room. A fixed share would leave most of them idle where there is one user.
"""
NR_OPEN = Path("/proc/sys/fs/nr_open")
OWN = "/proc/self/fd"
LISTED_AGAIN_S = 1.0
"""Where the kernel does not count them, so that nobody at the end of his share has a million of
them listed for each try.
"""


def raise_limit() -> None:
    """As far as this process may: with CAP_SYS_RESOURCE beyond the hard limit, which a shell has at
    some thousand.
    """
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
    return [
        (
            f"the daemon may have {count} descriptors, so some {files} files can be open: "
            "raise the limit (ulimit -Hn, LimitNOFILE)"
        )
    ]


def taken() -> int:
    """How many this process has open.

    The lowest free number does not say: behind what was closed, most can be taken.
    """
    return os.stat(OWN).st_size or len(
        os.listdir(OWN)
    )  # Linux counts since 6.2; before, the size is 0


class Reserve:
    """Asked before each open; counts anew when what it knows is too old to say yes."""

    def __init__(self, shared: bool, clock: Clock) -> None:
        """`shared`: other users can use the mount, too."""
        self._now = clock.now
        self._share = USER_SHARE if shared else WANTED
        self._left = 0
        """For files, when it was counted, `_opens` opens ago."""
        self._opens = 0
        self._listed_at: float | None = None
        """Monotonic time, seconds, where that took a listing and was an answer of no."""

    def before_open(self, has: int, files: int) -> None:
        """Refuse an open that would take of the reserve, or of what is left for other users.

        `has`: how many files the caller has open; `files`: all users together. Each may still want
        a descriptor: that of a file on the backing directory, or of one that an earlier worker
        opened, is not open before it is read.

        Raises:
            OSError: ENFILE.
        """
        if self._opens >= UNCHECKED_OPENS_MAX or not self._has_room(has):
            if self._listed_at is None or self._now() >= self._listed_at + LISTED_AGAIN_S:
                self._count(files)
            if not self._has_room(has):
                if not os.stat(OWN).st_size and self._listed_at is None:
                    self._listed_at = self._now()
                raise OSError(
                    errno.ENFILE, "acpfs has no more descriptors for open files of this user"
                )
        self._opens += 1

    def _has_room(self, has: int) -> bool:
        return has < self._share * (self._left - PER_OPEN * self._opens)

    def _count(self, files: int) -> None:
        count = limit()
        self._left = count - reserve(count) - max(taken(), files)
        self._opens = 0
        self._listed_at = None
