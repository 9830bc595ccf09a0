"""Bandwidth limit: a token bucket. Streams wait for it in `scheduler`, the scrub here.

Bytes are taken before they are written and may put the bucket in debt; whoever comes then waits
until the debt is paid. So a large take is never starved by small ones, and the rate holds over any
second. Thread-safe.
"""

from __future__ import annotations

from acpfs.runtime.given import Runtime

BURST_S = 0.1
"""What may be saved up while nothing is written."""
SLICE_MIN_BYTES = 64 << 10
SLICE_MAX_BYTES = 2 << 20
"""Read, hashed and written at a time: hash and write find what was read in the processor's cache
(one pass over memory).
"""
PAGE_BYTES = 4096
SLICE_S = 0.1
"""One take under a limit is worth about this long, so that a change of the limit is felt at
once.
"""


class TokenBucket:
    """`bytes_per_s` 0: no limit."""

    def __init__(self, bytes_per_s: int, runtime: Runtime) -> None:
        self._clock = runtime.clock.now
        self._changed = runtime.threads.condition()
        self._rate = bytes_per_s
        self._tokens = 0.0
        self._filled_at = self._clock()
        self._closed = False

    @property
    def bytes_per_s(self) -> int:
        """The limit in force."""
        return self._rate

    def set_rate(self, bytes_per_s: int) -> None:
        """Change the limit; waiting threads feel it at once."""
        with self._changed:
            self._fill()
            self._rate = bytes_per_s
            self._tokens = min(self._tokens, 0.0)
            self._changed.notify_all()

    def close(self) -> None:
        """Let everybody through until `open`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def open(self) -> None:
        """The limit is in force again."""
        with self._changed:
            self._closed = False
            self._tokens = 0.0
            self._filled_at = self._clock()

    def slice_bytes(self) -> int:
        """How much to write at a time: whole pages, as direct writes need them."""
        if not self._rate:
            return SLICE_MAX_BYTES
        return max(
            SLICE_MIN_BYTES,
            min(SLICE_MAX_BYTES, int(self._rate * SLICE_S) // PAGE_BYTES * PAGE_BYTES),
        )

    def take_nowait(self, count: int) -> float:
        """Take, and say for how long the taker should not go on."""
        with self._changed:
            if not self._rate or self._closed:
                return 0.0
            self._fill()
            self._tokens -= count
            return max(0.0, -self._tokens / self._rate)

    def debt_s(self) -> float:
        """For how long nobody should take anything; 0: go on."""
        with self._changed:
            if not self._rate or self._closed:
                return 0.0
            self._fill()
            return -self._tokens / self._rate if self._tokens <= -1 else 0.0  # of whole bytes

    def give_back(self, count: int) -> None:
        """So many of what was taken were not written."""
        with self._changed:
            if self._rate and not self._closed:
                self._tokens += count

    def take(self, count: int) -> None:
        """Take, and wait until the debt is paid."""
        if self.take_nowait(count) <= 0.0:
            return
        with self._changed:
            while self._rate and not self._closed:
                self._fill()
                if self._tokens >= 0:
                    return
                self._changed.wait(-self._tokens / self._rate)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(
            self._rate * BURST_S, self._tokens + (now - self._filled_at) * self._rate
        )
        self._filled_at = now
