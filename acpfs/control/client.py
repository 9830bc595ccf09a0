"""Blocking client of a control socket: one connection per request, no threads, no event loop.

Used by the commands and by `acpfs.client`, so it imports nothing outside the standard library and
may be used after a fork.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from acpfs.control import registry
from acpfs.control.connecting import connect_within
from acpfs.control.registry import MountRecord
from acpfs.control.socket_messages import Json, encode, error_from, socket_address
from acpfs.errors import AcpfsError, DeadlineError, NotMountedError
from acpfs.processes import directory_of, has_ended, is_ended_by_signal

CONNECT_TIMEOUT_S = 5
GRACE_S = 30.0
"""What a request with a time limit may take beyond it: to say what is left, to unmount.

Then it ends, whatever the daemon does.
"""
SILENCE_S_MAX = 60.0
"""A daemon that works on a request says something every few seconds, whatever it waits for; one
that says nothing for so long has a fault.
"""
SILENCE_S = 2.0
"""After so long it is looked whether the worker that was asked has been killed: one that is in a
call which does not return has the connection open all the same.
"""
KILLED_WAIT_S = 20.0
"""So long a request that may not be asked twice waits on when the worker that was asked has been
killed: what that one had not taken the next one answers, when it has begun.
"""
_CHUNK_BYTES = 1 << 16
_PEERCRED = struct.Struct("3i")


ATTEMPTS_MAX = 50
NEXT_WORKER_WAIT_S = 0.1
REPEATABLE = frozenset(
    {
        "status",
        "config",
        "metrics",
        "ls",
        "flush",
        "wait",
        "verify",
        "preload",
        "checkpoints",
        "history",
        "watch",
        "doctor",
        "verify_ram",
        "urgent",
        "ready",
    }
)
"""Verbs that may be asked again when the worker that was asked has died: the supervisor lives, and
the next worker answers.
"""


class _EndedError(AcpfsError):
    """The worker that was asked is not there any more."""


class _NoSocketError(NotMountedError):
    """Nobody listens there, though the daemon lives: somebody has cleaned up, and it makes its
    socket anew.
    """


class Line:
    """What a request is made over; `cut` ends it from another thread, also one that comes only
    then.
    """

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._cut = threading.Event()

    @property
    def is_cut(self) -> bool:
        """Whether the request was ended."""
        return self._cut.is_set()

    def wait_cut(self, timeout_s: float) -> None:
        """Wait for the end, so long at most."""
        self._cut.wait(timeout_s)

    def take(self, connection: socket.socket) -> None:
        """This is the connection now."""
        with self._lock:
            self._connection = connection
            if self.is_cut:
                connection.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """The request fails at once."""
        with self._lock:
            self._cut.set()
            if self._connection is not None:
                with suppress(OSError):  # it is at its end already
                    self._connection.shutdown(socket.SHUT_RDWR)


def request(
    record: MountRecord,
    verb: str,
    args: Json | None = None,
    on_event: Callable[[Json], None] | None = None,
    line: Line | None = None,
    *,
    patience_s: float | None = None,
) -> Any:
    """Ask a daemon; the result, with `items` events gathered into a list when there were any.

    `line`: lets others end the request. `patience_s`: so long the answer is waited for, where the
    verb has no limit of its own.

    Raises:
        NotMountedError: no daemon answers.
        AcpfsError: what the daemon answered, or that it fell silent.
    """
    args = dict(args or {})
    began = time.monotonic()
    limit_s = args.get("timeout_s")
    until = min(
        math.inf if limit_s is None else began + limit_s + GRACE_S,
        math.inf if patience_s is None else began + patience_s,
    )
    line = line or Line()
    tries = ATTEMPTS_MAX if verb in REPEATABLE else 1
    while True:
        try:
            return _request(record, verb, args, on_event, line, until)
        except (_EndedError, _NoSocketError):
            tries -= 1
            # Another supervisor may have the mount by now, of which only the record that lies there
            # tells.
            record = registry.as_it_is_now(record)
            if not tries or not record.alive or line.is_cut:
                raise
            line.wait_cut(NEXT_WORKER_WAIT_S)
            if limit_s is not None:  # one for all workers
                args["timeout_s"] = max(0.0, limit_s - (time.monotonic() - began))


def _request(
    record: MountRecord,
    verb: str,
    args: Json,
    on_event: Callable[[Json], None] | None,
    line: Line,
    until: float,
) -> Any:
    items: list[Any] = []
    question = encode({"verb": verb, "args": args})
    answers = _Answers(record, until, is_repeatable=verb in REPEATABLE)
    for message in answers.to(question, line):
        if "error" in message:
            raise error_from(message)
        if "result" in message:
            return (
                {**message["result"], "items": items}
                if items or message["result"].get("items") == []
                else message["result"]
            )
        if message.get("event") == "items":
            items += message["items"]
        elif on_event is not None and message.get("event") != "alive":
            on_event(message)
    raise _EndedError(
        f"the daemon of {record.mountpoint} (process {record.pid}) ended before it answered"
    )


class _Answers:
    """What a daemon says to one question."""

    def __init__(self, record: MountRecord, until: float, *, is_repeatable: bool) -> None:
        """`until`: the client's own deadline, monotonic."""
        self._record = record
        self._until = until
        self._is_repeatable = is_repeatable
        self._asked: Path | None = None
        """The worker that listens, in /proc; None: that cannot be told, or it has been killed."""

    def to(self, question: bytes, line: Line) -> Iterator[Json]:
        """Ask, and yield the messages that come, up to the end of the connection.

        Raises:
            _EndedError: the worker that was asked is not there any more.
            AcpfsError: the daemon fell silent; DeadlineError: the client's own deadline is over.
        """
        record = self._record
        with _connected(record) as connection:
            try:
                self._asked = _listener(connection)
                line.take(connection)
                with suppress(BrokenPipeError):  # a daemon that refuses answers before it has read
                    connection.sendall(question)
                received = bytearray()
                while chunk := self._next_chunk(connection):
                    received += chunk
                    if b"\n" in chunk:
                        *whole, received = received.split(b"\n")
                        for answer in whole:
                            yield json.loads(answer)
            except DeadlineError:
                raise
            except TimeoutError:
                _left_s(record, self._until)
                raise AcpfsError(_silent(record)) from None
            except ConnectionError:
                raise _EndedError(
                    f"the daemon of {record.mountpoint} (process {record.pid}) closed the "
                    "connection"
                ) from None

    def _next_chunk(self, connection: socket.socket) -> bytes:
        """Empty: the end.

        The wait is bounded each time anew: a daemon that says all the while that it is at it must
        not keep the client beyond its deadline either.
        """
        silent_until = time.monotonic() + SILENCE_S_MAX
        killed = False
        while True:
            left_s = min(silent_until - time.monotonic(), _left_s(self._record, self._until))
            if left_s <= 0:
                if killed:
                    raise AcpfsError(
                        f"the worker of {self._record.mountpoint} was killed before it answered: "
                        "see whether it was done, then try again"
                    )
                raise TimeoutError
            connection.settimeout(min(left_s, SILENCE_S))
            try:
                return connection.recv(_CHUNK_BYTES)
            except TimeoutError:
                if killed or self._asked is None or not _is_killed(self._asked):
                    continue
                # It may be asked twice so: what a worker has not taken comes to the next one.
                if self._is_repeatable:
                    raise _EndedError(
                        f"the daemon of {self._record.mountpoint} was killed before it answered"
                    ) from None
                killed = True
                silent_until = min(silent_until, time.monotonic() + KILLED_WAIT_S)


def _listener(connection: socket.socket) -> Path | None:
    """Who listened when the connection was made, in /proc, if that one lives and is seen here."""
    pid, _uid, _gid = _PEERCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    )
    process = directory_of(pid)
    return None if process is None or _is_killed(process) else process


def _is_killed(process: Path) -> bool:
    """Whether it has been killed, be it that it cannot end."""
    try:
        return has_ended(process) or is_ended_by_signal(process, own=True)
    except OSError:
        return False


def _left_s(record: MountRecord, until: float) -> float:
    """Until the client's own deadline.

    Raises:
        DeadlineError: it is over.
    """
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise DeadlineError(
            f"the daemon of {record.mountpoint} (process {record.pid}) has not answered in time"
        )
    return left_s


def _connected(record: MountRecord) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory_fd = None
    try:
        address, directory_fd = socket_address(Path(record.socket))
        connect_within(connection, address, CONNECT_TIMEOUT_S)
        connection.settimeout(SILENCE_S_MAX)
    except BaseException as error:
        connection.close()
        if isinstance(error, PermissionError):
            raise AcpfsError(
                f"permission denied: the control socket of {record.mountpoint} is for its owner "
                "and the control group"
            ) from None
        if isinstance(error, OSError):
            raise _no_answer(record, error) from None
        raise
    finally:
        if directory_fd is not None:
            os.close(directory_fd)
    return connection


def _silent(record: MountRecord) -> str:
    """What is told of a daemon that is heard by nobody.

    One that was killed keeps its socket as long as a call of its on the storage does not come back.
    """
    said = f"the daemon of {record.mountpoint} (process {record.pid}) does not answer"
    if record.alive:
        return said
    return (
        f"{said}, and that process is not seen here: if acpfs was killed, `acpfs mount "
        f"{record.backing} {record.mountpoint}` goes on with what is in RAM"
    )


def _no_answer(record: MountRecord, error: OSError) -> AcpfsError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return AcpfsError(_silent(record))
    if record.alive:
        return _NoSocketError(
            f"no answer from the daemon of {record.mountpoint} (process {record.pid}): "
            f"{error.strerror}"
        )
    return NotMountedError(
        f"the daemon of {record.mountpoint} (process {record.pid}) is gone; what it had not "
        "persisted is kept in the RAM tier, "
        f"and mounting {record.backing} again drains it"
    )
