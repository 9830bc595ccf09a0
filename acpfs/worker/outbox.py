"""What a worker tells its supervisor, without ever waiting: one that is stopped (SIGSTOP, a
debugger) must not stop a healthy worker.

A channel holds some hundred packets. Signs of life go only while most of it is free; all else that
finds no room waits here, in order, for a thread that sends it when there is some. Thread-safe.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence

from acpfs.runtime.threads import Threads
from acpfs.supervisor import channel
from acpfs.supervisor.channel import Message


class Outbox:
    """For one end of a channel."""

    def __init__(self, end: socket.socket, threads: Threads) -> None:
        self._threads = threads
        self._end = end
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Message, list[int]]] = deque()
        """With copies of the descriptors: the worker may close its own meanwhile."""
        self._empty = threads.event()
        self._empty.set()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Now, or as soon as there is room."""
        with self._lock:
            if not self._waiting and self._try(message, fds):
                return
            self._waiting.append((message, [os.dup(fd) for fd in fds]))
            if self._empty.is_set():
                self._empty.clear()
                self._threads.start("to the supervisor", self._send_waiting)

    def send_if_heard(self, message: Message) -> None:
        """What is worth nothing later; not at all where it would take the room of what is."""
        with self._lock:
            if not self._waiting and self._has_room(0):
                self._try(message, ())

    def flush(self, timeout_s: float) -> None:
        """Wait until all is sent, before the process ends."""
        self._empty.wait(timeout_s)

    def close(self) -> None:
        """Another supervisor is told everything anew."""
        with self._lock:
            self._drop_waiting()

    def _try(self, message: Message, fds: Sequence[int]) -> bool:
        """Whether it is done with; also when nobody is at the other end any more."""
        try:
            channel.send(self._end, message, fds, wait=False)
        except BlockingIOError:
            return False
        return True

    def _has_room(self, timeout_ms: int | None) -> bool:
        """The kernel says so while a quarter of the channel is used, and when nobody is at the
        other end.
        """
        poll = select.poll()
        poll.register(self._end, select.POLLOUT)
        return bool(poll.poll(timeout_ms))

    def _send_waiting(self) -> None:
        while True:
            self._has_room(None)
            with self._lock:
                while self._waiting and self._try(*self._waiting[0]):
                    for fd in self._waiting.popleft()[1]:
                        os.close(fd)
                if not self._waiting:
                    self._empty.set()
                    return

    def _drop_waiting(self) -> None:
        for _message, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()
