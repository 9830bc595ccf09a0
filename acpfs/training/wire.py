"""Messages as frames on a stream: four bytes of length, then JSON; a side for trio, and one for
threads that own a socket.

A link is not usable after an error. Both sides bound what they take: a frame that claims more is
refused before a byte of it is kept. `SocketLink` may be sent on by several threads while one
receives: an SSL object bears no two calls at a time, so no call is made without the lock, none
waits inside it, and waiting is done on the descriptor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import trio

from acpfs.links.frames import FrameSplitter, FrameTooLongError, framed
from acpfs.training.messages import Sent, decode, encode
from acpfs.training.records import MalformedError

FRAME_BYTES_MAX = 16 << 20
"""A manifest of 50,000 files."""
RECEIVE_BYTES = 1 << 16
_Result = TypeVar("_Result")


class LinkClosedError(ConnectionError):
    """The other side is gone, or this side has closed."""


class LinkTimeoutError(TimeoutError):
    """Nothing came in time; the link is as it was."""


def frame(sent: Sent) -> bytes:
    """A message with its length.

    Raises:
        MalformedError: it is longer than anybody would take.
    """
    try:
        return framed(encode(sent), FRAME_BYTES_MAX)
    except FrameTooLongError as error:
        raise MalformedError(str(error)) from None


def notice_silence(connection: socket.socket | trio.socket.SocketType) -> None:
    """Have the kernel end a connection whose other side is gone without a word, after ten
    seconds.
    """
    for option, value in (
        (socket.TCP_KEEPIDLE, 3),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 10_000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Frames:
    """Bytes in, messages out."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frames = FrameSplitter(bytes_max)

    def take(self, data: bytes | bytearray) -> list[Sent]:
        """The messages that are complete with these bytes.

        Raises:
            MalformedError: a frame that is too long, or that is no message.
        """
        try:
            found = self._frames.take(data)
        except FrameTooLongError as error:
            raise MalformedError(str(error)) from None
        return [decode(one) for one in found]

    @property
    def inside(self) -> bool:
        """Whether a frame has begun that is not complete."""
        return self._frames.inside


class TrioLink:
    """A link in a trio program. Several tasks may send; one receives."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._frames = Frames()
        self._ready: deque[Sent] = deque()
        self._sending = trio.Lock()

    async def send(self, sent: Sent) -> None:
        """Hand a message to the kernel.

        Raises:
            LinkClosedError: nobody is there to take it.
        """
        await self.send_frame(frame(sent))

    async def send_frame(self, data: bytes) -> None:
        """The same for what `frame` made, which may go to many."""
        try:
            async with self._sending:
                await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError, OSError) as error:
            raise LinkClosedError(str(error)) from error

    async def receive(self) -> Sent:
        """The next message.

        Raises:
            LinkClosedError: the other side is gone.
            MalformedError: it sent what is no message.
        """
        while not self._ready:
            try:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            except (
                trio.BrokenResourceError,
                trio.ClosedResourceError,
                ssl.SSLError,
                OSError,
            ) as error:
                raise LinkClosedError(str(error)) from error
            if not data:
                raise LinkClosedError(
                    "in the middle of a message" if self._frames.inside else "closed"
                )
            self._ready.extend(self._frames.take(data))
        return self._ready.popleft()

    async def close(self) -> None:
        """Close, without a farewell that would wait for the other side."""
        await trio.aclose_forcefully(self._stream)


Identity = tuple[int, int]
"""Of a socket: device and inode, whatever number its descriptor has."""


def identity_of(descriptor: int) -> Identity:
    """Of an open one."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class SocketLink:
    """A link for threads.

    In a forked child it is closed: a data loader's workers must not keep a dead rank's connection
    open.
    """

    def __init__(self, connected: socket.socket) -> None:
        """`connected`: TLS or not; its handshake is done. Owned from here on."""
        connected.setblocking(False)
        self._socket = connected
        self._frames = Frames()
        self._ready: deque[Sent] = deque()
        self._touching = threading.Lock()
        """Held for one call that does not wait."""
        self._sending = threading.Lock()
        """Held for one frame."""
        self._closed = False
        self.identity = identity_of(connected.fileno())
        with _noting:
            _links.add(self)

    @property
    def closed(self) -> bool:
        """By this side."""
        return self._closed

    def fileno(self) -> int:
        """For poll; look at `buffered` first."""
        return self._socket.fileno()

    @property
    def buffered(self) -> bool:
        """Whether something can be received that poll does not know of."""
        with self._touching:
            return bool(self._ready) or (
                isinstance(self._socket, ssl.SSLSocket)
                and not self._closed
                and self._socket.pending() > 0
            )

    def send(self, sent: Sent, timeout_s: float = 30.0) -> None:
        """Hand a message to the kernel.

        Raises:
            LinkClosedError: nobody takes it, or nobody did in time.
        """
        view = memoryview(frame(sent))
        deadline = time.monotonic() + timeout_s
        with self._sending:
            while view:
                try:
                    send = functools.partial(self._socket.send, view)
                    taken = self._attempt(send, select.POLLOUT, deadline)
                    view = view[taken:]
                except LinkTimeoutError as error:
                    self.close()
                    raise LinkClosedError("the other side takes nothing") from error

    def receive(self, timeout_s: float | None = None) -> Sent:
        """The next message; None waits for ever.

        Raises:
            LinkClosedError: the other side is gone.
            LinkTimeoutError: nothing came.
            MalformedError: it sent what is no message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            data = self._attempt(lambda: self._socket.recv(RECEIVE_BYTES), select.POLLIN, deadline)
            if not data:
                raise LinkClosedError(
                    "in the middle of a message" if self._frames.inside else "closed"
                )
            self._ready.extend(self._frames.take(data))
        return self._ready.popleft()

    def farewell(self, timeout_s: float = 5.0) -> None:
        """Close behind what was sent, when the other side has closed too.

        A plain close with something unread makes the kernel drop what was sent and not yet taken:
        GOODBYE would look like a death.
        """
        with self._touching, contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(LinkClosedError, LinkTimeoutError, MalformedError):
            while True:
                self.receive(deadline - time.monotonic())
        self.close()

    def close(self) -> None:
        """Close; a thread that waits in here gets `LinkClosedError`. May be called twice."""
        with self._touching:
            if not self._closed:
                self._closed = True
                with contextlib.suppress(OSError):  # the other side was faster
                    socket.socket.shutdown(
                        self._socket, socket.SHUT_RDWR
                    )  # wakes who polls; a close alone does not
                self._socket.close()

    def _attempt(self, call: Callable[[], _Result], events: int, deadline: float | None) -> _Result:
        """One call that does not wait, again until it goes through."""
        while True:
            with self._touching:
                if self._closed:
                    raise LinkClosedError("closed")
                descriptor = self._socket.fileno()
                try:
                    return call()
                except (BlockingIOError, ssl.SSLWantReadError):
                    wanted = (
                        events if not isinstance(self._socket, ssl.SSLSocket) else select.POLLIN
                    )
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
                except OSError as error:  # SSLError is one
                    raise LinkClosedError(str(error)) from error
            _wait(descriptor, wanted, deadline)

    def close_in_child(self) -> None:
        """After a fork, in the child: the descriptor only, since the connection is the parent's,
        and locks may be held by nobody.
        """
        self._closed = True
        descriptor = socket.socket.detach(self._socket)
        if descriptor >= 0:
            os.close(descriptor)


def _wait(descriptor: int, events: int, deadline: float | None) -> None:
    """Until the descriptor is ready, in short turns: another thread may have taken what this one
    waits for.

    Raises:
        LinkTimeoutError: the deadline passed.
    """
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise LinkTimeoutError("nothing came in time")
    poll = select.poll()
    poll.register(descriptor, events)
    poll.poll(1000 if left is None else min(1000, left * 1000))


@contextlib.contextmanager
def dialling(host: str, port: int, timeout_s: float) -> Iterator[socket.socket]:
    """A connection that is to become a link, which is acpfs's own from its first moment on
    (`own_sockets`). The block owns it.

    Raises:
        OSError: nobody is there.
    """
    known: list[Identity] = []
    try:
        yield _connected(host, port, timeout_s, known)
    finally:
        with _noting:
            _on_their_way.difference_update(known)


def _connected(host: str, port: int, timeout_s: float, known: list[Identity]) -> socket.socket:
    """As `socket.create_connection`, which shows nobody a socket before it is connected."""
    failed: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        made = socket.socket(family, kind, protocol)
        try:
            known.append(identity_of(made.fileno()))
            with _noting:
                _on_their_way.add(known[-1])
            made.settimeout(timeout_s)
            made.connect(address)
        except OSError as error:
            made.close()
            failed = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise failed or OSError(f"{host} has no address")


def own_sockets() -> set[Identity]:
    """Connections of acpfs itself in this process.

    Whoever ends a program's connections leaves these alone.
    """
    with _noting:
        return {link.identity for link in _links if not link.closed} | _on_their_way


_noting = threading.Lock()
_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()
_on_their_way: set[Identity] = set()


def _close_all_in_child() -> None:
    for link in list(_links):
        link.close_in_child()


os.register_at_fork(
    before=_noting.acquire, after_in_parent=_noting.release, after_in_child=_noting.release
)
os.register_at_fork(after_in_child=_close_all_in_child)
