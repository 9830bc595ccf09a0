"""The keeper as a supervisor and a command see it: it is told what is to be held, and asked for a
mount that nobody serves.

Owns the connection. A keeper that is not there, ends or hangs costs nothing: the mount goes on,
nothing here waits for it but `take`, and one that comes later is told everything. The supervisor's;
standard library only, no thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acpfs.supervisor import channel
from acpfs.supervisor.local_sockets import connected

KEEPER = "keeper"
"""Name under which workers get the connection: it ends with the last of them, and so the keeper
knows that nobody serves.
"""
SOCKET = "keeper.sock"
AGAIN_S = 1.0
"""Between two looks for a keeper that is not there."""
HANGS_AGAIN_S = 30.0
ANSWER_S = 10.0

Watch = Callable[[socket.socket, Callable[[], None]], None]
Forget = Callable[[socket.socket], None]


class KeeperClient:
    """The supervisor's side: everything it keeps is told there as well."""

    def __init__(
        self, watch: Watch, forget: Forget, changed: Callable[[Sequence[int]], None]
    ) -> None:
        """`changed`: there is a connection now, or none; workers are to have it."""
        self._watch = watch
        self._forget = forget
        self._changed = changed
        self._end: socket.socket | None = None
        self._told = False
        """Everything was told, and every change is since."""
        self._again_at = 0.0

    @property
    def connection(self) -> Sequence[int]:
        """What a worker is to have of it."""
        return [] if self._end is None else [self._end.fileno()]

    def use(self, end: socket.socket) -> None:
        """The connection over which the mount was given."""
        self._end = end
        self._watch(end, self._hear)

    def look(
        self,
        settings: dict[str, Any],
        kept: Mapping[str, Sequence[int]],
        state: dict[str, Any],
        worker: int,
    ) -> None:
        """Where a keeper has come, or a worker begins to serve, tell it all.

        `worker`: pidfd of the one that serves.
        """
        now = time.monotonic()
        if self._end is not None:
            if not self._told:
                self._tell_all(settings, kept, state, worker)
            return
        if now < self._again_at:
            return
        self._again_at = now + AGAIN_S
        end = connected(socket_of(settings), 0)
        if end is None:
            return
        self.use(end)
        self._tell_all(settings, kept, state, worker)
        if self.connection:
            self._changed(self.connection)

    def begin_anew(self) -> None:
        """Another worker serves: what is held is to be the same as here from now on."""
        self._told = False

    def _tell_all(
        self,
        settings: dict[str, Any],
        kept: Mapping[str, Sequence[int]],
        state: dict[str, Any],
        worker: int,
    ) -> None:
        self._told = True
        self._send(
            {"hold": settings["mountpoint"], "session": state["facts"].get("session")}, own=True
        )
        for name, fds in list(
            kept.items()
        ):  # the connection may end meanwhile, and leaves its name
            self.store(name, fds)
        self._send({"state": state})
        self._send({"worker": True}, [worker])
        self._send({"whole": list(kept)})

    def store(self, name: str, fds: Sequence[int]) -> None:
        """Hold these under a name, in place of what is held there."""
        if name != KEEPER:
            self._send({"keep": [[name, len(fds)]]}, fds)

    def store_state(self, state: dict[str, Any]) -> None:
        """Hold what the next supervisor must know beside the descriptors."""
        self._send({"state": state})

    def starting(self) -> None:
        """From now on a worker may live that it does not know."""
        self._send({"starting": True})

    def worker(self, *pidfd: int) -> None:
        """The worker; none: it is gone."""
        self._send({"worker": True}, pidfd)

    def forget_mount(self) -> None:
        """The mount has ended; one that another supervisor has by now is not concerned."""
        self._send({"forget": True})

    def _send(
        self, message: channel.Message, fds: Sequence[int] = (), *, own: bool = False
    ) -> None:
        if self._end is None:
            return
        pidfd = os.pidfd_open(os.getpid()) if own else -1
        try:
            if not channel.send(self._end, message, [pidfd] if own else fds, wait=False):
                self._lose()
        except OSError:  # it hangs, or one of the descriptors is gone
            self._again_at = time.monotonic() + HANGS_AGAIN_S
            self._lose()
        finally:
            if own:
                os.close(pidfd)

    def _hear(self) -> None:
        if self._end is None:
            return
        message, fds = channel.receive(self._end)
        for fd in fds:
            os.close(fd)
        if message is None:
            self._lose()

    def _lose(self) -> None:
        if self._end is not None:
            end = self._end
            self._end = None
            self._forget(end)
            self._changed([])


@dataclass(slots=True)
class Taken:
    """What a keeper gave, or why not."""

    refused: str = ""
    end: socket.socket | None = None
    """The connection, which says that this supervisor lives."""
    kept: dict[str, list[int]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def let_go(self) -> None:
        """It stays with the keeper."""
        for fd in (fd for fds in self.kept.values() for fd in fds):
            os.close(fd)
        self.kept.clear()
        if self.end is not None:
            self.end.close()


def socket_of(settings: dict[str, Any]) -> Path:
    """Where the keeper of a mount with these settings listens."""
    return Path(settings["runtime_dir"]) / SOCKET


def take(settings: dict[str, Any], instance: str) -> Taken:
    """Ask for the mount, which nobody serves."""
    end = connected(socket_of(settings), ANSWER_S)
    if end is None:
        return Taken("there is no keeper any more")
    pidfd = os.pidfd_open(os.getpid())
    taken = Taken(end=end)
    try:
        channel.send(
            end,
            {"take": settings["mountpoint"], "backing": settings["backing"], "instance": instance},
            [pidfd],
        )
        end.settimeout(ANSWER_S)
        while True:
            message, fds = channel.receive(end)
            if message is not None and "keep" in message:
                taken.kept[message["keep"][0][0]] = fds
            elif message is not None and "given" in message:
                taken.state = message["given"]
                end.settimeout(None)
                return taken
            else:
                taken.refused = (
                    "the keeper holds it no more"
                    if message is None or "none" in message
                    else message["refused"]
                )
                break
    except OSError as error:
        taken.refused = f"the keeper does not answer: {error}"
    finally:
        os.close(pidfd)
    taken.let_go()
    return Taken(taken.refused)


def held(path: Path) -> list[dict[str, Any]] | None:
    """What the keeper that listens there holds (`HeldSession.report`); None: there is none."""
    end = connected(path, ANSWER_S)
    if end is None:
        return None
    with end, contextlib.suppress(OSError):
        end.settimeout(ANSWER_S)
        channel.send(end, {"list": True})
        message, _fds = channel.receive(end)
        if message is not None:
            return list(message["held"])
    return None


def held_mount(settings: dict[str, Any]) -> dict[str, Any] | None:
    """What is held of this mount; None: nothing."""
    return next(
        (one for one in held(socket_of(settings)) or () if one["mount"] == settings["mountpoint"]),
        None,
    )
