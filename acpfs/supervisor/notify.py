"""Speaks to the service manager: ready, status line, watchdog, stopping. Does nothing where there is none.

The watchdog is fed from the worker's own loop, and only after the file system's lock was to be had: a worker that
answers nobody must not look alive.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import sdnotify
import trio


class ServiceManager:
    """One per process; sends datagrams to $NOTIFY_SOCKET."""

    def __init__(self) -> None:
        """Read the environment."""
        self.present = "NOTIFY_SOCKET" in os.environ
        self._notifier = sdnotify.SystemdNotifier() if self.present else None

    def ready(self, text: str) -> None:
        """The mount is ready to use."""
        self._send(f"READY=1\nSTATUS={text}\nMAINPID={os.getpid()}")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={text}")

    def stopping(self, text: str, timeout_s: float) -> None:
        """Draining may take as long as the deadline says: ask for that much."""
        self._send(f"STOPPING=1\nSTATUS={text}\nEXTEND_TIMEOUT_USEC={int(timeout_s * 1e6) + 10_000_000}")

    def watchdog_interval_s(self) -> float | None:
        """Half of what the service manager allows between signs of life; None: it does not watch."""
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return int(microseconds) / 2e6 if self.present and watched and microseconds.isdigit() and int(microseconds) > 0 else None

    async def feed_watchdog(self, alive: Callable[[], bool]) -> None:
        """Say that the worker lives, as long as it does; returns at once where nobody watches."""
        interval_s = self.watchdog_interval_s()
        if interval_s is None:
            return
        while True:
            if alive():
                self._send("WATCHDOG=1")
            await trio.sleep(interval_s)

    def close(self) -> None:
        """Close the socket."""
        if self._notifier is not None and self._notifier.socket is not None:
            self._notifier.socket.close()

    def _send(self, message: str) -> None:
        if self._notifier is not None:
            self._notifier.notify(message)
