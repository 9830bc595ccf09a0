"""Local sockets between the long-lived processes of acpfs: listen, connect, and who is at the other
end as the kernel vouches for it.

Only their owner may connect (mode 0600), and whoever listens asks who did. Standard library only,
no thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

from acpfs.control.connecting import connect_within
from acpfs.control.socket_messages import socket_address

BACKLOG = 16
_CREDENTIALS = "3i"


def uid_of(end: socket.socket) -> int:
    """The user of the process that connected."""
    return int(
        struct.unpack(
            _CREDENTIALS,
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS)),
        )[1]
    )


def connected(path: Path, wait_s: float) -> socket.socket | None:
    """A connection; None: nobody listens, or not to this user.

    Nothing waits for longer than `wait_s` (whole seconds).
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    directory = None
    try:
        address, directory = socket_address(path)
        connect_within(end, address, int(wait_s))
    except OSError:
        end.close()
        return None
    finally:
        if directory is not None:
            os.close(directory)
    return end


def listening(path: Path) -> socket.socket:
    """A socket that takes the place of what lies there: never is there none, and never one that
    does not listen.
    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    new = path.with_suffix(f".{os.getpid()}")
    directory = None
    try:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        address, directory = socket_address(new)
        umask = os.umask(0o177)
        try:
            door.bind(address)
        finally:
            os.umask(umask)
        door.listen(BACKLOG)
        new.rename(path)
    except OSError:
        door.close()
        raise
    finally:
        if directory is not None:
            os.close(directory)
    return door


def close(end: socket.socket | int) -> None:
    """A socket, or a descriptor; -1 is none."""
    if isinstance(end, socket.socket):
        end.close()
    elif end >= 0:
        with contextlib.suppress(OSError):
            os.close(end)
