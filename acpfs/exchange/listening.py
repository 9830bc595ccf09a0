"""The side of an exchange process that gives: takes connections of other members, and sends them
what the worker lends.

Whether a member may have something, and whether it is still what it was when all of it had arrived,
the worker says: the process only moves bytes. Nobody who has not shown its key gets further than a
bounded time and a bounded number of connections.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from acpfs.exchange.channel_ends import Answer, ChannelEnd, ExchangeGoneError
from acpfs.exchange.exchange_records import (
    GET_BYTES_MAX,
    PUT_BYTES_MAX,
    Availability,
    Has,
    Message,
    VersionName,
    whole_number,
)
from acpfs.exchange.link_streams import LinkFailedError
from acpfs.exchange.member_links import MemberLink, OtherVersionError, OwnName
from acpfs.exchange.sealed_stream import SpoiltLinkError
from acpfs.runtime.threads import Threads

STRANGERS_MAX = 64
"""Connections whose handshake is not done."""
MEMBERS_MAX = 64
"""Connections of members."""
HANDSHAKE_S = 10.0
STREAMS_MAX = 4
"""Ranges that are sent at the same time."""
NEWS_S = 0.1
"""So often who waits for bytes that are on their way is told that they are."""
WAIT_MAX_S = 5.0
"""So long a range may wait for its bytes, or its turn; then its reader helps itself."""
SAYS_SAME_S = 5.0
"""So long after its last byte the reader of a range may take to say that it has all."""
HOLD_S = 10.0
"""So long the worker may take to say what becomes of a word or of bytes that it is to hold."""
PIECE_MAX_S = 20.0
"""A member that takes longer for a piece of what is held here is slower than any storage."""
IDLE_S = 60.0
ACCEPT_AGAIN_S = 0.2


@dataclass(slots=True)
class ListeningLimits:
    """Of connections; others in tests."""

    strangers: int = STRANGERS_MAX
    members: int = MEMBERS_MAX
    handshake_s: float = HANDSHAKE_S


class Listening:
    """Of one member."""

    def __init__(
        self,
        own: OwnName,
        worker: ChannelEnd,
        threads: Threads,
        limits: ListeningLimits | None = None,
    ) -> None:
        self._own = own
        self._worker = worker
        self._threads = threads
        self._limits = limits or ListeningLimits()
        self._lock = threading.Lock()
        self._strangers: dict[MemberLink, float] = {}
        """Connection → when it has to have shown its key."""
        self._members = 0
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)

    def begin(self, listeners: list[socket.socket]) -> None:
        """Take connections, each listener in a thread."""
        for listener in listeners:
            self._threads.start("accept", self._accept, listener)
        self._threads.start("reaper", self._reap)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _address = listener.accept()
            except OSError:  # no descriptor left, or whoever called has gone again
                if listener.fileno() < 0:
                    return
                time.sleep(ACCEPT_AGAIN_S)
                continue
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        link = MemberLink(connection)
        with self._lock:
            is_taken = len(self._strangers) < self._limits.strangers
            if is_taken:
                self._strangers[link] = time.monotonic() + self._limits.handshake_s
        if not is_taken:
            link.close()
            return
        try:
            link.limit(self._limits.handshake_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._threads.start("member", self._speak, link)
        except OSError:
            self._forget(link)
            link.close()

    def _reap(self) -> None:
        """A handshake that comes a byte at a time ends all the same."""
        while True:
            time.sleep(min(0.5, self._limits.handshake_s / 4))
            now = time.monotonic()
            with self._lock:
                late = [link for link, until in self._strangers.items() if until <= now]
            for link in late:
                link.close()

    def _forget(self, link: MemberLink) -> None:
        with self._lock:
            self._strangers.pop(link, None)

    # -- one connection

    def _speak(self, link: MemberLink) -> None:
        node = ""
        try:
            node = link.answer(self._own, self._knows)
            self._worker.tell({"do": "linked", "node": node, "way": link.way})
            with self._lock:
                self._strangers.pop(link, None)
                if self._members >= self._limits.members:
                    return
                self._members += 1
            try:
                while True:
                    link.limit(IDLE_S)
                    self._heed(link, node, link.receive())
            finally:
                with self._lock:
                    self._members -= 1
        except OtherVersionError as error:
            self._worker.tell({"do": "speaks", "node": error.node, "version": error.version})
        except SpoiltLinkError:
            self._worker.tell({"do": "spoilt", "node": node})
        except (LinkFailedError, ExchangeGoneError, ValueError, TypeError):
            return  # whatever it was: the other side connects anew, if it has business here
        finally:
            self._forget(link)
            link.close()

    def _knows(self, node: str, key: str) -> bool:
        """Whether that member has that key; the worker may have to read its record."""
        answer = self._ask({"do": "knows", "node": node, "key": key}, self._limits.handshake_s)
        return answer is not None and answer.said.get("known") is True

    def _ask(self, message: Message, timeout_s: float) -> Answer | None:
        return self._worker.wait(*self._worker.ask(message), timeout_s)

    def _heed(self, link: MemberLink, node: str, message: Message) -> None:
        if message.get("do") == "hold":
            answer = self._ask({"do": "hold", "from": node, "said": message.get("said")}, HOLD_S)
            link.send(_refusal("it does not answer itself") if answer is None else _told(answer))
            return
        if message.get("do") == "put":
            self._keep(link, node, message.get("said"))
            return
        file = VersionName.heard(message.get("file"))
        if message.get("do") == "has":
            answer = self._ask({"do": "has", "from": node, "file": file.told()}, WAIT_MAX_S)
            link.send(Availability(Has.NO).told() if answer is None else _available(answer))
            return
        if message.get("do") != "get":
            raise ValueError("neither has nor get")
        size = whole_number(message, "size", 1, GET_BYTES_MAX)
        offset = whole_number(message, "offset", 0, file.size - size)
        self._give(link, node, file, offset, size)

    # -- keeping for others

    def _keep(self, link: MemberLink, node: str, said: object) -> None:
        """Bytes of a file that this member holds for another one: the worker says where they go, or
        why nowhere.
        """
        if not isinstance(said, dict):
            raise ValueError("nothing that is to be held")  # noqa: TRY004 - of content
        size = whole_number(said, "size", 1, PUT_BYTES_MAX)
        position = whole_number(said, "at", 0, (1 << 62) - size)
        link.limit(HANDSHAKE_S)
        # the bytes are on their way: a sender that was to wait for room would wait once for each
        number, future = self._worker.ask({"do": "room", "from": node, "said": said})
        parts = link.receive_parts(size, PIECE_MAX_S)
        try:
            first = next(parts)
        except BaseException:
            self._return(self._worker.forget(number, future))
            raise
        answer = self._worker.wait(number, future, HOLD_S)
        if answer is None or not answer.fds:
            for _part in parts:  # nobody has room for it, and the next word comes behind it
                pass
            link.send(_refusal("it does not answer itself") if answer is None else _told(answer))
            return
        try:
            why = _write_parts(answer.fds[0], position, itertools.chain([first], parts))
        finally:
            answer.close()
        if why:
            link.send(_refusal(why))
            return
        # the log may have been claimed since there was room: who adopts it has read what was
        # there by then, so what came after that is not told to be held
        wrote = {"what": "wrote", "session": said.get("session")}
        counts = self._ask({"do": "hold", "from": node, "said": wrote}, HOLD_S)
        link.send(_refusal("it does not answer itself") if counts is None else _told(counts))

    # -- giving

    def _give(self, link: MemberLink, node: str, file: VersionName, offset: int, size: int) -> None:
        until = time.monotonic() + WAIT_MAX_S
        asked = {"do": "lend", "from": node, "file": file.told(), "offset": offset, "size": size}
        lent = self._lent(link, until, asked)
        if lent is None:
            link.send({"size": 0})
            return
        try:
            self._send(link, until, lent, offset, size)
            # The kernel may send pages of the file itself, as they are then. So what counts is how
            # it is when the reader has all bytes.
            if link.receive().get("do") != "same":
                raise ValueError("not the end of a range")
        except BaseException:
            self._worker.tell({"do": "end", "loan": lent.said["loan"]})
            raise
        answer = self._ask({"do": "same", "loan": lent.said["loan"]}, SAYS_SAME_S)
        link.send({"same": answer is not None and answer.said.get("same") is True})

    def _send(self, link: MemberLink, until: float, lent: Answer, offset: int, size: int) -> None:
        """Send the range when it is its turn; closes the descriptors."""
        try:
            while not self._streams.acquire(timeout=NEWS_S):
                if time.monotonic() >= until:
                    raise LinkFailedError("too many others read here")
                link.send({"wait": True})
            try:
                link.limit(SAYS_SAME_S)
                link.send({"size": size})
                link.send_file(lent.fds[0], offset, size)
            finally:
                self._streams.release()
        finally:
            lent.close()

    def _lent(self, link: MemberLink, until: float, asked: Message) -> Answer | None:
        """A loan, with its descriptor; None: the worker gives nothing, or not in time."""
        number, future = self._worker.ask(asked)
        try:
            while not self._came(future) and time.monotonic() < until:
                link.send({"wait": True})
        except BaseException:
            self._return(self._worker.forget(number, future))
            raise
        answer = future.result() if future.done() else self._worker.forget(number, future)
        if answer is None or answer.fds:
            return answer
        return None

    def _return(self, answer: Answer | None) -> None:
        if answer is not None:
            answer.close()
            self.unwanted(answer.said)

    def unwanted(self, answer: Message) -> None:
        """An answer of the worker came too late: whatever it lends goes back."""
        if "loan" in answer:
            self._worker.tell({"do": "end", "loan": answer["loan"]})

    @staticmethod
    def _came(future: Future[Answer]) -> bool:
        with contextlib.suppress(FutureTimeoutError):
            future.result(NEWS_S)
            return True
        return False


def _told(answer: Answer) -> Message:
    return {name: value for name, value in answer.said.items() if name != "re"}


def _refusal(why: str) -> Message:
    return {"refused": why}


def _write_parts(fd: int, position: int, parts: Iterable[memoryview]) -> str:
    """One behind the other; why they could not be written, or "". All are received."""
    why = ""
    for part in parts:
        done = 0
        try:
            while not why and done < len(part):
                done += os.pwrite(fd, part[done:], position + done)
        except OSError as error:
            why = os.strerror(error.errno or 0)
        position += done
    return why


def _available(answer: Answer) -> Message:
    return Availability.heard(answer.said).told()


def listening_on(fds: list[int]) -> list[socket.socket]:
    """Listeners that the worker has bound."""
    return [socket.socket(fileno=os.dup(fd)) for fd in fds]
