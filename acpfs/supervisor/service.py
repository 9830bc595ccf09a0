"""The service manager as the supervisor sees it: notifications, watchdog, and its store of
descriptors (sd_notify(3), FDSTORE).

What lies in the store is handed to the next supervisor when the service restarts, so a kernel
session outlives the supervisor too. Without a service manager everything here does nothing. Imports
as little as the supervisor may.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

FIRST_FD = 3
STATE = "acpfs-state"
ALIVE = "WATCHDOG=1"
PATIENCE_S = 1.0
"""A manager that does not read has a queue of ten to some hundred words.

Workers die meanwhile, too, and must be followed by others.
"""
_PREFIX = "acpfs-"


class Service:
    """Sends datagrams to $NOTIFY_SOCKET."""

    def __init__(self) -> None:
        """Read the environment, and leave nothing of it to children that would take it for
        theirs.
        """
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        watched = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = (
            int(microseconds) / 2e6 if self.present and watched and microseconds.isdigit() else 0.0
        )
        """Between two signs of life; 0: nobody watches."""
        self._stored: set[str] = set()

    @property
    def present(self) -> bool:
        """Whether there is a service manager."""
        return bool(self._address)

    def notify(self, text: str, fds: Sequence[int] = ()) -> None:
        """Tell it something; one that is gone, or does not read, does not matter.

        A sign of life does not wait at all.
        """
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
            contextlib.suppress(OSError),
        ):
            sender.settimeout(0.0 if text == ALIVE else PATIENCE_S)
            sender.connect(address)
            socket.send_fds(sender, [text.encode()], list(fds))

    def store(self, name: str, fds: Sequence[int]) -> None:
        """Keep descriptors under a name, in place of what was kept there."""
        if not self._address:
            return
        self._remove([name])
        for fd in fds:
            self.notify(f"FDSTORE=1\nFDNAME={_PREFIX}{name}\nFDPOLL=0", [fd])
        self._stored.add(name)

    def store_state(self, state: dict[str, Any]) -> None:
        """Keep what the next supervisor must know beside the descriptors."""
        if not self._address:
            return
        fd = os.memfd_create(STATE, os.MFD_CLOEXEC)
        try:
            os.write(fd, json.dumps(state).encode())
            self.store("state", [fd])
        finally:
            os.close(fd)

    def forget(self) -> None:
        """The mount ends: the store must not keep its session alive."""
        self._remove(self._stored)
        self._stored = set()

    def takes(self, names: Iterable[str]) -> None:
        """These lie in the store already, from the supervisor before."""
        self._stored |= {*names, "state"}

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.notify(f"FDSTOREREMOVE=1\nFDNAME={_PREFIX}{name}")


def inherited() -> tuple[dict[str, list[int]], dict[str, Any]]:
    """(descriptors by name, state) that the service manager kept for this process; empty where
    there is nothing. Can be asked once.
    """
    count = os.environ.pop("LISTEN_FDS", "")
    pid = os.environ.pop("LISTEN_PID", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if not count.isdigit() or pid != str(os.getpid()):
        return {}, {}
    found: dict[str, list[int]] = {}
    for fd, name in zip(range(FIRST_FD, FIRST_FD + int(count)), names, strict=False):
        os.set_inheritable(fd, False)
        if name.startswith(_PREFIX):
            found.setdefault(name.removeprefix(_PREFIX), []).append(fd)
    state: dict[str, Any] = {}
    for fd in found.pop("state", []):
        state = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
        os.close(fd)
    return found, state


def has_inherited_session() -> bool:
    """Whether the service manager hands a session to this process, without taking it yet."""
    return f"{_PREFIX}session" in os.environ.get("LISTEN_FDNAMES", "").split(
        ":"
    ) and os.environ.get("LISTEN_PID") == str(os.getpid())
