"""How a rank tells the launcher of its node that it has done an update: one datagram, at its first
one in each generation.

A process that dies before that may have a program that fails at once; one that dies behind it was
of use, and so is the next one. Owns the name of the socket and both its ends; knows nothing of
ranks or jobs. Standard library only. Nothing here waits: a word that is lost makes one death look
fruitless, no more. `tell_launcher` may be called by any thread; `Listener` belongs to one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

VARIABLE = "ACPFS_LAUNCHER"
_CREDENTIALS = struct.Struct("3i")
"""Pid, uid, gid: the kernel's word for who sent it."""
_HEARD_MAX = 10_000
"""In one go: a process that sends without end holds nobody up."""


def tell_launcher() -> None:
    """This process has done an update; nothing where no launcher wants to know."""
    if name := os.environ.get(VARIABLE):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as telling,
        ):
            telling.sendto(b"updated", f"\0{name}")


class Listener:
    """The launcher's end."""

    def __init__(self) -> None:
        self.name = f"acpfs-run-{os.getpid()}-{os.urandom(4).hex()}"
        """In the abstract namespace: nothing is left behind by kill -9."""
        self.socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(f"\0{self.name}")

    def heard(self) -> set[int]:
        """Sessions of processes that have told since the last time; a rank leads one.

        One that is gone by now counts by its own pid.
        """
        found: set[int] = set()
        for _ in range(_HEARD_MAX):
            try:
                _, further, _, _ = self.socket.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            for level, kind, content in further:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(
                    content
                ) >= _CREDENTIALS.size:
                    pid, uid, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
                    if uid in (0, os.geteuid()):
                        found.add(_session(pid))
        return found

    def close(self) -> None:
        self.socket.close()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return pid
