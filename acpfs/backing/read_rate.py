"""How fast something is read, from what was really read: an average that forgets. Thread-safe."""

from __future__ import annotations

from threading import Lock

COUNTED_BYTES_MIN = 256 << 10
"""Smaller reads measure latency, not throughput."""
REMEMBERED_BYTES = 1 << 30
"""What lies further back counts for less than half."""


class ReadRate:
    """Bytes per second."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._bytes = 0.0
        self._seconds = 0.0

    def note(self, size: int, seconds: float) -> None:
        """So many bytes were read in so long."""
        if size < COUNTED_BYTES_MIN or seconds <= 0:
            return
        with self._lock:
            self._bytes += size
            self._seconds += seconds
            if self._bytes > REMEMBERED_BYTES:
                self._bytes = self._bytes / 2
                self._seconds = self._seconds / 2

    @property
    def bytes_per_s(self) -> float | None:
        """None: nothing was read yet."""
        with self._lock:
            return self._bytes / self._seconds if self._seconds else None
