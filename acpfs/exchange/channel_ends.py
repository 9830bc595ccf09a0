"""Questions and answers between a worker and its exchange process: JSON packets with descriptors
beside them, over one unix socket.

Either side asks, and answers when it can; answers come in any order. The end of the socket is the
end of the process behind it: whatever was asked and not answered fails then. Thread-safe.
"""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import NamedTuple

from acpfs.exchange.exchange_records import Message

PACKET_BYTES_MAX = 1 << 16
FDS_MAX = 16


class ExchangeGoneError(OSError):
    """The process at the other end is gone, or takes nothing now."""

    def __init__(self) -> None:
        super().__init__(errno.EPIPE, "the exchange process does not take anything")


class Answer(NamedTuple):
    """What was answered, with its descriptors, which the asker closes."""

    said: Message
    fds: list[int]

    def close(self) -> None:
        """Nobody wants the descriptors."""
        for fd in self.fds:
            os.close(fd)


Reply = Callable[..., bool]
"""`reply(message, fds=())`: once, at any time, in any thread; the descriptors stay the caller's.

Whether it could be sent.
"""
Heed = Callable[[Message, list[int], Reply], None]
"""What is done about a question, in the thread that receives; its descriptors are the callee's."""


class ChannelEnd:
    """One end; `run` in a thread of its own."""

    def __init__(
        self,
        end: socket.socket,
        heed: Heed,
        unwanted: Callable[[Message], object] = lambda _message: None,
        *,
        waits: bool = False,
    ) -> None:
        """`unwanted`: told of answers that nobody waited for any more.

        `waits`: whether this end waits where the other takes nothing now. A worker does not: a
        process that stands still must not hold it up.
        """
        self._end = end
        self._heed = heed
        self._unwanted = unwanted
        self._flags = 0 if waits else socket.MSG_DONTWAIT
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._is_over = False

    def ask(self, message: Message, fds: Sequence[int] = ()) -> tuple[int, Future[Answer]]:
        """Ask; the number is for `forget`.

        Raises:
            ExchangeGoneError: nobody takes it.
        """
        number = next(self._numbers)
        future: Future[Answer] = Future()
        with self._lock:
            if self._is_over:
                raise ExchangeGoneError
            self._asked[number] = future
        try:
            self._send({**message, "n": number}, fds)
        except OSError:
            self.forget(number, future)
            raise ExchangeGoneError from None
        return number, future

    def wait(self, number: int, future: Future[Answer], timeout_s: float) -> Answer | None:
        """The answer; None: not within that time, and nobody waits for it any more.

        Raises:
            ExchangeGoneError: the other end is gone.
        """
        with contextlib.suppress(FutureTimeoutError):
            return future.result(timeout_s)
        return self.forget(number, future)

    def forget(self, number: int, future: Future[Answer]) -> Answer | None:
        """Nobody waits for an answer; one that has just come is returned."""
        with self._lock:
            waits = self._asked.pop(number, None) is not None
        return None if waits or future.exception() is not None else future.result()

    def tell(self, message: Message) -> None:
        """Say something that has no answer; nothing where nobody is there."""
        with contextlib.suppress(OSError):
            self._send(message, ())

    def run(self) -> None:
        """Receive until the other end is gone."""
        try:
            while True:
                data, fds, _flags, _from = socket.recv_fds(
                    self._end, PACKET_BYTES_MAX, FDS_MAX, socket.MSG_CMSG_CLOEXEC
                )
                if not data:
                    return
                self._received(json.loads(data), list(fds))
        except OSError:
            return
        finally:
            self._over()

    def close(self) -> None:
        """Have `run` end, here and at the other end."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _received(self, message: Message, fds: list[int]) -> None:
        if "re" in message:
            with self._lock:
                future = self._asked.pop(message["re"], None)
                if future is not None:
                    future.set_result(Answer(message, fds))
            if future is None:
                Answer(message, fds).close()
                self._unwanted(message)
            return
        number = message.get("n")

        def reply(said: Message, fds: Sequence[int] = ()) -> bool:
            with contextlib.suppress(OSError):
                self._send({**said, "re": number}, fds)
                return True
            return False

        with contextlib.suppress(ValueError, KeyError, TypeError):  # of a process that is not ours
            self._heed(message, fds, reply)

    def _over(self) -> None:
        with self._lock:
            self._is_over = True
            waiting = list(self._asked.values())
            self._asked.clear()
        self._end.close()
        for future in waiting:
            future.set_exception(ExchangeGoneError())

    def _send(self, message: Message, fds: Sequence[int]) -> None:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._end.sendmsg([json.dumps(message).encode()], beside, self._flags)
