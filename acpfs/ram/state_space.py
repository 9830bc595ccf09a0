"""Room for the state database: a reserve that only what was promised may use, and a tmpfs that
grows.

What is logged must be recorded: a drain, a close, a deletion. So calls that make new names are
refused (ENOSPC) while less than the reserve is free, before they change anything; the rest goes on
from the reserve. The tmpfs grows before that, where it is ours and the machine has memory. Where it
is shared, others can take what is free; there the reserve is a file that is given up when it is
needed.

Asked at each call that makes a name: one statvfs, 1 µs. Used under the file system's lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from acpfs.logger import get_logger

RESERVE_BYTES = 16 << 20
"""Some 40,000 operations."""
START_BYTES = 1 << 20
"""What a worker needs to come to serve: its session's records."""

log = get_logger(__name__)


def _does_nothing() -> bool:
    return False


class StateSpace:
    """Room on the tmpfs that the state database lies on."""

    def __init__(
        self,
        free_bytes: Callable[[], int] = lambda: 1 << 62,
        grow: Callable[[], bool] = _does_nothing,
        ballast: Path | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        """`grow`: makes the tmpfs larger, False where that cannot be.

        `ballast`: the file that has the reserve where others write.
        """
        self._free_bytes = free_bytes
        self._grow = grow
        self._ballast = ballast
        self._reserve_bytes = reserve_bytes

    def is_short(self) -> bool:
        """Whether only what was promised may still be recorded."""
        return self._free_bytes() < self._reserve_bytes and not (
            self._grow() and self._free_bytes() >= self._reserve_bytes
        )

    def look(self) -> None:
        """About once a second, and at a worker's start: grow in time, and have the reserve."""
        free = self._free_bytes()
        if free < START_BYTES:
            self.give_way()
        elif free < 2 * self._reserve_bytes:
            self._grow()
        elif self._ballast is not None and _size(self._ballast) < self._reserve_bytes:
            with contextlib.suppress(OSError):
                _allocate(self._ballast, self._reserve_bytes)

    def give_way(self) -> bool:
        """A transaction found no room; whether there is more now."""
        if self._grow():
            return True
        if self._ballast is None or not _size(self._ballast):
            return False
        log.warning(
            "the state in the RAM tier takes its reserve: no room is left",
            bytes=_size(self._ballast),
        )
        with contextlib.suppress(OSError):
            self._ballast.unlink()
            return True
        return False

    def warnings(self) -> list[str]:
        """For `status`."""
        if not self.is_short():
            return []
        return [
            (
                "little room is left for the state in the RAM tier: new names are refused (ENOSPC) "
                "until more of it is drained"
            )
        ]


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_blocks * 512
    return 0


def _allocate(file: Path, size: int) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.ftruncate(fd, 0)
        raise
    finally:
        os.close(fd)
