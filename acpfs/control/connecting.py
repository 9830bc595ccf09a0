"""Connecting to a local socket, for so long and no longer."""

from __future__ import annotations

import socket
import struct

_TIMEVAL = "2l"


def connect_within(end: socket.socket, address: str, wait_s: int) -> None:
    """Connect a local socket, which blocks afterwards.

    Waits up to `wait_s` seconds where as many as may have come and not been let in yet: a time
    limit of Python's makes the socket non-blocking, and connect(2) then fails at once (EAGAIN,
    unix(7)).

    Raises:
        BlockingIOError: nobody was let in in time, or, with `wait_s` of 0, none is at once.
        OSError: nobody listens, or not to this user.
    """
    if not wait_s:
        end.setblocking(False)
        end.connect(address)
        end.setblocking(True)
        return
    end.setblocking(True)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack(_TIMEVAL, wait_s, 0))
    end.connect(address)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack(_TIMEVAL, 0, 0))
