"""How one supervisor gives its mount to another: of another version, in another container, beside it on the same machine.

The one that has the mount listens at a socket of its own (`Door`); it serves on until the next one has loaded its code and asks. Then its
worker makes room, as for a reload, and it sends what it keeps. It goes only when it is told that the other one serves: the connection is a
descriptor like those that are kept, so it ends when nobody is left who could serve, and then the old one goes on.

Standard library only; the supervisor's, no thread. Knows nothing of what is handed over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acpfs.control.registry import slug
from acpfs.control.socket_messages import socket_address
from acpfs.supervisor import channel

PREDECESSOR = "predecessor"
"""Name under which the connection is kept until a worker serves."""
CONNECT_TIMEOUT_S = 5.0
_BACKLOG = 4

Watch = Callable[[socket.socket, Callable[[], None]], None]
Forget = Callable[[socket.socket], None]


def door_of(settings: dict[str, Any]) -> Path:
    """Where the supervisor of this mount is asked."""
    return Path(settings["runtime_dir"]) / "sockets" / f"{slug(settings['mountpoint'])}.handover"


def knock(path: Path) -> socket.socket | None:
    """A connection to the supervisor that listens there; None: there is none."""
    end, directory = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), None
    try:
        address, directory = socket_address(path)
        end.settimeout(CONNECT_TIMEOUT_S)
        end.connect(address)
        end.settimeout(None)
    except OSError:
        end.close()
        return None
    finally:
        if directory is not None:
            os.close(directory)
    return end


def ask(settings: dict[str, Any]) -> socket.socket | None:
    """Ask the supervisor of this mount for it; None: there is none."""
    end = knock(door_of(settings))
    if end is not None:
        channel.send(end, {"take_over": os.getpid(), "backing": settings["backing"]})
    return end


def answers(path: Path) -> bool:
    """Whether a supervisor listens there."""
    end = knock(path)
    if end is not None:
        end.close()
    return end is not None


def tell_serving(fds: list[int]) -> None:
    """Tell the old supervisor that it may go, and close the connection."""
    for fd in fds:
        with socket.socket(fileno=fd) as end, contextlib.suppress(OSError):
            channel.send(end, {"serving": os.getpid()}, wait=False)


def _listening(path: Path) -> socket.socket:
    """A socket that takes the place of what lies there: never is there none, and never one that does not listen."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    new, directory = path.with_suffix(f".{os.getpid()}"), None
    try:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        address, directory = socket_address(new)
        umask = os.umask(0o177)
        try:
            door.bind(address)
        finally:
            os.umask(umask)
        door.listen(_BACKLOG)
        new.rename(path)
    except OSError:
        door.close()
        raise
    finally:
        if directory is not None:
            os.close(directory)
    return door


def _uid_of(end: socket.socket) -> int:
    peer = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1])


class Door:
    """The old supervisor's side: where it is asked, and who has asked."""

    def __init__(
        self,
        watch: Watch,
        forget: Forget,
        *,
        asked: Callable[[dict[str, Any]], str],
        served: Callable[[], None],
        left_alone: Callable[[], None],
    ) -> None:
        """`asked` has the worker leave, or says why not; `served`: another supervisor has the mount now.

        `left_alone`: whoever was given the mount has ended without having served.
        """
        self._watch, self._forget = watch, forget
        self._asked, self._served, self._left_alone = asked, served, left_alone
        self._door: socket.socket | None = None
        self._successor: socket.socket | None = None
        self.given = False
        """What was kept has been sent to it, and it has not served yet."""

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for the mount."""
        return self._successor is not None

    def open(self, settings: dict[str, Any]) -> None:
        """Listen, from the first worker that serves on."""
        if self._door is None:
            with contextlib.suppress(OSError):  # a full disk, no descriptor: it is tried again
                self._door = _listening(door_of(settings))
                self._watch(self._door, self._answer)

    def close(self) -> None:
        """Listen no more. The name stays: another supervisor listens there by now, or the mount's end removes it."""
        for end in (self._door, self._successor):
            if end is not None:
                self._forget(end)
        self._door = self._successor = None
        self.given = False

    def remove(self, settings: dict[str, Any]) -> None:
        """The mount ends."""
        if self._door is not None:
            self.close()
            with contextlib.suppress(OSError):
                door_of(settings).unlink()

    def give(self, names: list[list[Any]], fds: list[int], state: dict[str, Any]) -> bool:
        """Send what is kept; False: nobody takes it."""
        if self._successor is None:
            return False
        try:
            self.given = channel.send(self._successor, {"kept": names, **state}, fds)
        except OSError:
            self.given = False
        return self.given

    def _answer(self) -> None:
        assert self._door is not None
        end, _address = self._door.accept()
        if _uid_of(end) not in (os.geteuid(), 0):
            end.close()
            return
        self._watch(end, lambda: self._hear(end))

    def _hear(self, end: socket.socket) -> None:
        if end.fileno() < 0:
            return
        message, fds = channel.receive(end)
        for fd in fds:
            os.close(fd)
        if message is None:
            self._forget(end)
            if end is self._successor:
                self._gone()
        elif "take_over" in message:
            why = "another one is taking it over already" if self.is_asked else self._asked(message)
            if why:
                channel.send(end, {"refused": why})
                self._forget(end)
            else:
                self._successor = end
        elif "serving" in message and end is self._successor:
            self._served()

    def _gone(self) -> None:
        given, self._successor, self.given = self.given, None, False
        if self._door is not None:
            self._forget(self._door)  # its name may be the other one's by now
            self._door = None
        if given:
            self._left_alone()
