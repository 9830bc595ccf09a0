"""How one supervisor gives its mount to another: of another version, in another container, beside
it on the same machine.

The one that has the mount listens at a socket of its own (`Door`); it serves on until the next one
has loaded its code and asks. Then its worker makes room, as for a reload, and it sends what it
keeps. It goes only when it is told that the other one serves: the connection is a descriptor like
those that are kept, so it ends when nobody is left who could serve, and then the old one goes on.

Standard library only; the supervisor's, no thread. Knows nothing of what is handed over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acpfs.control.registry import slug
from acpfs.supervisor import channel
from acpfs.supervisor.local_sockets import connected, listening, uid_of

PREDECESSOR = "predecessor"
"""Name under which the connection is kept until a worker serves."""
CONNECT_TIMEOUT_S = 5.0

Watch = Callable[[socket.socket, Callable[[], None]], None]
Forget = Callable[[socket.socket], None]


def door_of(settings: dict[str, Any]) -> Path:
    """Where the supervisor of this mount is asked."""
    return Path(settings["runtime_dir"]) / "sockets" / f"{slug(settings['mountpoint'])}.handover"


def knock(path: Path) -> socket.socket | None:
    """A connection to the supervisor that listens there; None: there is none."""
    return connected(path, CONNECT_TIMEOUT_S)


def ask(settings: dict[str, Any], instance: str) -> socket.socket | None:
    """Ask the supervisor of this mount for it, as this instance (`instances`); None: there is
    none.
    """
    end = knock(door_of(settings))
    if end is not None:
        send_with_pidfd(
            end,
            {"take_over": os.getpid(), "backing": settings["backing"], "instance": instance},
            os.getpid(),
        )
    return end


def send_with_pidfd(end: socket.socket, message: channel.Message, pid: int) -> None:
    """Say something about a process, which whoever hears it can end even where its number means
    nothing to them.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        channel.send(end, message, [pidfd], wait=False)
    except BlockingIOError:
        return  # it is stopped
    finally:
        os.close(pidfd)


def say_starting(end: socket.socket) -> None:
    """To the old supervisor: this one lives, and is about to serve."""
    with contextlib.suppress(OSError):
        channel.send(end, {"starting": True}, wait=False)


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
        """`asked` has the worker leave, or says why not; `served`: another supervisor has the mount
        now.

        `left_alone`: whoever was given the mount has ended without having served.
        """
        self._watch = watch
        self._forget = forget
        self._asked = asked
        self._served = served
        self._left_alone = left_alone
        self._door: socket.socket | None = None
        self._successor: socket.socket | None = None
        self._processes: list[int] = []
        """pidfds of whoever was given the mount."""
        self._heard_at = 0.0
        self.given = False
        """What was kept has been sent to it, and it has not served yet."""

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for the mount."""
        return self._successor is not None

    def open(self, settings: dict[str, Any]) -> None:
        """Listen, from the first worker that serves on; anew where somebody has removed the
        socket.
        """
        if self._door is not None and not door_of(settings).is_socket():
            self._forget(self._door)
            self._door = None
        if self._door is None:
            with contextlib.suppress(OSError):  # a full disk, no descriptor: it is tried again
                self._door = listening(door_of(settings))
                self._watch(self._door, self._answer)

    def close(self) -> None:
        """Listen no more.

        The name stays: another supervisor listens there by now, or the mount's end removes it.
        """
        for end in (self._door, self._successor):
            if end is not None:
                self._forget(end)
        self._door = None
        self._successor = None
        self.given = False
        self._let_go()

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
        self._heard_at = time.monotonic()
        try:
            self.given = channel.send(self._successor, {"kept": names, **state}, fds)
        except OSError:
            self.given = False
        return self.given

    def look(self, silence_s: float) -> None:
        """Whoever was given the mount and gives no sign of life, stopped or hung, is killed: its
        end tells this one to go on.
        """
        now = time.monotonic()
        if not self.given or now - self._heard_at < silence_s:
            return
        self._heard_at = now
        for pidfd in self._processes:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except OSError as error:  # it lives in a PID name space that this one does not see into
                sys.stderr.write(
                    "acpfs: who took the mount over gives no sign of life, and cannot be ended "
                    f"from here: {error.strerror}\n"
                )

    def _answer(self) -> None:
        assert self._door is not None
        end, _address = self._door.accept()
        if uid_of(end) not in (os.geteuid(), 0):
            end.close()
            return
        self._watch(end, lambda: self._hear(end))

    def _hear(self, end: socket.socket) -> None:
        if end.fileno() < 0:
            return
        message, fds = channel.receive(end)
        if end is self._successor or (
            message is not None and "take_over" in message and not self.is_asked
        ):
            self._heard_at = time.monotonic()
            self._processes += fds
        else:
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
                if not self.is_asked:
                    self._let_go()
            else:
                self._successor = end
        elif "serving" in message and end is self._successor:
            self._served()

    def _let_go(self) -> None:
        for pidfd in self._processes:
            os.close(pidfd)
        self._processes.clear()

    def _gone(self) -> None:
        self._let_go()
        given = self.given
        self._successor = None
        self.given = False
        if self._door is not None:
            self._forget(self._door)  # its name may be the other one's by now
            self._door = None
        if given:
            self._left_alone()
