"""Keeps the written manifest up to date, behind the commits and no more often than is worth it.

One trio task; the writing itself happens on a thread of the commit pool.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from acpfs.backing.calls import CallPool
from acpfs.writeback.arrival import Bell, outcome
from acpfs.writeback.manifest.manifest import Manifest

PAUSE_BUSY_S = 1.0
"""Between two writings while the log is being drained."""
PAUSE_IDLE_S = 0.2
"""Between two writings when the log is empty."""
SHARE_BUSY = 20.0
SHARE_IDLE = 5.0
SHARE_AWAITED = 1.0
"""Pauses are at least so many times what the last writing took: a manifest of a million lines takes
seconds. Where somebody waits for the end (`flush`, `umount`) that is all the pause there is: 0.2 s
would be most of what a flush of a gigabyte takes.
"""


class ManifestWriter:
    """Writes when it was changed."""

    def __init__(self, manifest: Manifest, pool: CallPool, is_idle: Callable[[], bool]) -> None:
        """`is_idle`: whether the log is empty."""
        self.manifest = manifest
        self._pool = pool
        self._is_idle = is_idle
        self._bell = Bell()
        self._failed = False
        self._running = False
        self._awaited = 0
        self._round = trio.Event()
        """Set after the writing that comes next, and then replaced."""

    def ring(self) -> None:
        """The manifest may have changed. Thread-safe."""
        self._bell.ring()

    @property
    def is_settled(self) -> bool:
        """Written, or it could not be written at the last attempt: nobody should wait for it."""
        return self.manifest.is_written or self._failed or not self._running

    async def written(self) -> None:
        """Wait until the written form has all that the table has now, or could not be written."""
        changes = self.manifest.changes
        self._awaited += 1
        self._bell.ring()
        try:
            while not (self.manifest.is_written_to(changes) or self.is_settled):
                await self._round.wait()
        finally:
            self._awaited -= 1

    async def run(self) -> None:
        """Until cancelled."""
        self._running = True
        try:
            while True:
                if self.manifest.is_written:
                    await self._bell.heard()
                    continue
                began = trio.current_time()
                await self._write()
                self._tell()
                await self._pause(trio.current_time() - began)
        finally:
            self._running = False
            self._tell()

    def _tell(self) -> None:
        done = self._round
        self._round = trio.Event()
        done.set()

    async def _write(self) -> None:
        try:
            await outcome(self._pool.submit("write manifest", self.manifest.write))
            self._failed = False
        except OSError:
            self._failed = True  # tried again after the pause; the table is the truth

    async def _pause(self, took_s: float) -> None:
        """Shorter once the log is empty, which the last commit's ring tells, and shorter still when
        somebody waits.
        """
        began = trio.current_time()
        while trio.current_time() < (until := began + self._pause_s(took_s)):
            await self._bell.heard(until)

    def _pause_s(self, took_s: float) -> float:
        if not self._is_idle():
            return max(PAUSE_BUSY_S, SHARE_BUSY * took_s)
        if self._awaited:
            return SHARE_AWAITED * took_s
        return max(PAUSE_IDLE_S, SHARE_IDLE * took_s)
