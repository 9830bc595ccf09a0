"""What the worker has to say to the service manager: ready, status line, stopping.

The supervisor passes it on, who alone may speak.

Also the worker's signs of life to the supervisor, which feeds the service manager's watchdog only
as long as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from acpfs.worker.link import BEAT_INTERVAL_S, Link


class ServiceManager:
    """Through the link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def ready(self, text: str) -> None:
        """The mount is ready to use."""
        self._send(f"READY=1\nSTATUS={text}")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={text}")

    def stopping(self, text: str, timeout_s: float) -> None:
        """Draining may take as long as the deadline says: ask for that much."""
        self._send(
            f"STOPPING=1\nSTATUS={text}\nEXTEND_TIMEOUT_USEC={int(timeout_s * 1e6) + 10_000_000}"
        )

    def _send(self, message: str) -> None:
        self._link.tell(notify=message)


class Busy:
    """How long the threads that serve have been with the same request, seen from outside."""

    def __init__(self, current: Callable[[], Sequence[int]]) -> None:
        """`current`: per thread the number of its request, 0 for none."""
        self._current = current
        self._since: dict[int, tuple[int, float]] = {}

    def longest_s(self, now: float) -> float:
        """Since when the longest of them, as far as it was looked at."""
        longest = 0.0
        for thread, request in enumerate(self._current()):
            known, since = self._since.get(thread, (0, now))
            if request == 0 or request != known:
                since = now
            self._since[thread] = (request, since)
            longest = max(longest, now - since)
        return longest


async def beat(link: Link, alive: Callable[[], bool], busy: Callable[[float], float]) -> None:
    """Give signs of life, as long as there is life."""
    while True:
        if alive():
            link.beat(busy(link.now()))
        await trio.sleep(BEAT_INTERVAL_S)
