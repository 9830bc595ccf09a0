"""Messages between supervisor, template and worker: one JSON object per packet, with descriptors
beside it.

Owns the form and nothing of the meaning. A packet comes whole or not at all; the end of a channel
is the end of the process behind it. Imports as little as the supervisor may.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

PACKET_BYTES_MAX = 1 << 17
FDS_MAX = 64
Message = dict[str, Any]


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(
    end: socket.socket, message: Message, fds: Sequence[int] = (), *, wait: bool = True
) -> bool:
    """Send; False when nobody is at the other end.

    Raises:
        BlockingIOError: without `wait`: there is no room in the channel.
    """
    try:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        end.sendmsg(
            [json.dumps(message).encode()], beside, 0 if wait else socket.MSG_DONTWAIT
        )  # socket.send_fds forgets its flags
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def receive(end: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and its descriptors, which do not outlive an exec; None: the other end is
    gone.

    Raises:
        ValueError: it is no message; its descriptors are closed.
    """
    try:
        data, fds, _flags, _address = socket.recv_fds(
            end, PACKET_BYTES_MAX, FDS_MAX, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None, []
    try:
        message = json.loads(data) if data else None
        if message is not None and not isinstance(message, dict):
            raise TypeError
    except (ValueError, TypeError) as error:
        for fd in fds:
            os.close(fd)
        raise ValueError(f"no message: {data[:40]!r}") from error
    return message, list(fds)
