"""A connection between two members: who is at the other end, frames, and bytes of files.

Each side says its node id and shows its certificate in plain; the other compares that with the
fingerprint in the member's record, and takes it as the only one in a mutual TLS 1.3 handshake,
which proves that the key is there, too. With `peer_encryption = off` at both ends TLS ends there,
and what follows is plain. Blocks; one thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from acpfs.errors import unknown_version
from acpfs.exchange.exchange_records import EXCHANGE_VERSION, MemberAddress, Message
from acpfs.links.frames import LENGTH_BYTES, framed, length_of
from acpfs.links.tls import certificate_of, mutual

MAGIC = b"acpfs exchange\n"
FRAME_BYTES_MAX = 1 << 16
CERTIFICATE_BYTES_MAX = 1 << 13
SEND_BYTES = 1 << 18
"""Read from a file at a time where it cannot be sent by the kernel alone."""
WAY_OUT = "the next mount makes it anew"


class LinkFailedError(OSError):
    """The other member is gone, does not answer in time, or is not who it says."""


class OtherVersionError(LinkFailedError):
    """A member is there, and speaks another version of what members say to each other."""

    def __init__(self, node: str, version: object, why: str) -> None:
        super().__init__(f"{node}: {why}")
        self.node = node
        self.version = version


def fingerprint(certificate: bytes) -> str:
    """As records have it; `certificate`: DER."""
    return hashlib.sha256(certificate).hexdigest()


@dataclass(frozen=True, slots=True)
class OwnName:
    """What this member says of itself."""

    volume: str
    node: str
    directory: Path
    """Of key and certificate."""
    is_plain: bool
    """Whether it would do without encryption behind the handshake."""


class MemberLink:
    """One connection; owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket: socket.socket = connection
        self.used_at = time.monotonic()

    # -- beginning

    @classmethod
    def called(cls, own: OwnName, to: MemberAddress, timeout_s: float) -> MemberLink:
        """Connect to a member.

        Raises:
            OtherVersionError: its acpfs speaks another version.
            LinkFailedError: nobody is there within that time, or it is somebody else.
        """
        until = time.monotonic() + timeout_s
        link = cls(_connected(to, timeout_s))
        try:
            with _failing():
                link._limit(until)
                link._introduce(own)
                said, certificate = link._introduced()
                if not _is(certificate, to.key) or said.get("node") != to.node:
                    raise LinkFailedError(f"{to.node}: another certificate than its record's")
                _check_version(to.node, said)
                link._secure(own, certificate, server=False)
                link.send({"plain": own.is_plain})
                if link._received().get("plain") is True and own.is_plain:
                    link._socket = _unwrapped(link._socket)
        except BaseException:
            link.close()
            raise
        return link

    def answer(self, own: OwnName, key_of: Callable[[str, str], bool]) -> str:
        """The other side's beginning, where somebody has connected to us; returns its node id.

        `key_of(node, fingerprint)`: whether that member has that key; may take a while. The caller
        closes the link when the handshake takes too long.

        Raises:
            OtherVersionError: it is a member, and speaks another version. It has been told ours.
            LinkFailedError: it is no member.
        """
        with _failing():
            said, certificate = self._introduced()
            node = said.get("node")
            if said.get("volume") != own.volume:
                raise LinkFailedError("of another volume")
            if not isinstance(node, str) or not key_of(node, fingerprint(certificate)):
                raise LinkFailedError("no member that is known")
            self._introduce(own)
            _check_version(node, said)
            self._secure(own, certificate, server=True)
            is_plain = self._received().get("plain") is True and own.is_plain
            self.send({"plain": is_plain})
            if is_plain:
                self._socket = _unwrapped(self._socket)
        return node

    def _introduce(self, own: OwnName) -> None:
        said = {"version": EXCHANGE_VERSION, "volume": own.volume, "node": own.node}
        self._socket.sendall(
            MAGIC
            + framed(json.dumps(said).encode(), FRAME_BYTES_MAX)
            + framed(certificate_of(own.directory), CERTIFICATE_BYTES_MAX)
        )

    def _introduced(self) -> tuple[Message, bytes]:
        if self._exactly(len(MAGIC)) != MAGIC:
            raise LinkFailedError("no exchange of acpfs")
        said = _object(self._frame(FRAME_BYTES_MAX))
        return said, self._frame(CERTIFICATE_BYTES_MAX)

    def _secure(self, own: OwnName, certificate: bytes, *, server: bool) -> None:
        context = mutual(own.directory, certificate, WAY_OUT, server=server)
        if server:
            context.num_tickets = 0  # nobody comes back with one
        secured = context.wrap_socket(self._socket, server_side=server)
        self._socket = secured
        # What it has signed is not it.
        if secured.getpeercert(binary_form=True) != certificate:
            raise LinkFailedError("another certificate than it said")

    # -- afterwards

    def limit(self, timeout_s: float) -> None:
        """How long each call may take from now on without a byte."""
        self._socket.settimeout(timeout_s)

    def _limit(self, until: float) -> None:
        self._socket.settimeout(max(0.001, until - time.monotonic()))

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LinkFailedError: it does not go out.
        """
        with _failing():
            self._socket.sendall(framed(json.dumps(message).encode(), FRAME_BYTES_MAX))

    def receive(self) -> Message:
        """The next message.

        Raises:
            LinkFailedError: none comes, or it is none.
        """
        with _failing():
            return self._received()

    def _received(self) -> Message:
        return _object(self._frame(FRAME_BYTES_MAX))

    def _frame(self, bytes_max: int) -> bytes:
        return self._exactly(length_of(self._exactly(LENGTH_BYTES), bytes_max))

    def _exactly(self, count: int) -> bytes:
        found = bytearray(count)
        with memoryview(found) as view:
            self._fill(view)
        return bytes(found)

    def _fill(self, view: memoryview, until: float = math.inf) -> None:
        done = 0
        while done < len(view):
            if time.monotonic() >= until:
                raise LinkFailedError("the other member is too slow")
            got = self._socket.recv_into(view[done:])
            if not got:
                raise LinkFailedError("the other member has closed")
            done += got

    def receive_into(self, view: memoryview, within_s: float) -> None:
        """Exactly so many bytes of a file, all of them within that time.

        Raises:
            LinkFailedError: they do not come.
        """
        with _failing():
            self._fill(view, time.monotonic() + within_s)

    def send_file(self, fd: int, offset: int, size: int) -> None:
        """Bytes of a file, as they are now.

        Raises:
            LinkFailedError: they do not go out, or the file has become shorter.
        """
        with _failing():
            if isinstance(self._socket, ssl.SSLSocket):
                self._send_through(fd, offset, size)
            else:
                self._send_by_kernel(fd, offset, size)

    def _send_through(self, fd: int, offset: int, size: int) -> None:
        buffer = memoryview(bytearray(min(size, SEND_BYTES)))
        done = 0
        while done < size:
            part = buffer[: min(len(buffer), size - done)]
            got = os.preadv(fd, [part], offset + done)
            if not got:
                raise LinkFailedError("the file has become shorter")
            self._socket.sendall(part[:got])
            done += got

    def _send_by_kernel(self, fd: int, offset: int, size: int) -> None:
        out = self._socket.fileno()
        patience_s = self._socket.gettimeout()
        waiting = select.poll()
        waiting.register(out, select.POLLOUT)
        done = 0
        while done < size:
            try:
                got = os.sendfile(out, fd, offset + done, size - done)
            except BlockingIOError:
                if not waiting.poll(None if patience_s is None else patience_s * 1000):
                    raise LinkFailedError("the other member takes nothing") from None
                continue
            if not got:
                raise LinkFailedError("the file has become shorter")
            done += got

    def close(self) -> None:
        """Also to wake who waits in here in another thread."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._socket.close()


class _failing(contextlib.AbstractContextManager[None]):  # noqa: N801 - used like a function
    """Whatever goes wrong with a connection is one kind of error: what arrives is somebody
    else's.
    """

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError | ValueError) and not isinstance(error, LinkFailedError):
            raise LinkFailedError(str(error)) from error


def unknown_exchange(version: object) -> str:
    """Why nothing is exchanged with a member that speaks this version; "": it is ours."""
    return unknown_version(
        "what it speaks",
        version,
        EXCHANGE_VERSION,
        "nothing is exchanged, and the storage is read instead, until both have one acpfs",
        oldest=EXCHANGE_VERSION,
    )


def _check_version(node: str, said: Message) -> None:
    version = said.get("version")
    if why := unknown_exchange(version):
        raise OtherVersionError(node, version, why)


def _is(certificate: bytes, key: str) -> bool:
    return hmac.compare_digest(fingerprint(certificate), key)


def _object(data: bytes) -> Message:
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("no message") from None
    if not isinstance(found, dict):
        raise ValueError("no message")  # noqa: TRY004 - of content
    return found


def _unwrapped(secured: socket.socket) -> socket.socket:
    """What is returned by `unwrap` is an SSLSocket still, from which nothing goes by sendfile."""
    assert isinstance(secured, ssl.SSLSocket)
    timeout_s = secured.gettimeout()
    secured.unwrap()
    bare = socket.socket(fileno=secured.detach())
    bare.settimeout(timeout_s)
    return bare


def _connected(to: MemberAddress, timeout_s: float) -> socket.socket:
    """To the first of its addresses that answers, each with its share of the time."""
    failed: OSError | None = None
    for address in to.addresses:
        try:
            made = socket.create_connection(
                (address, to.port), timeout_s / max(1, len(to.addresses))
            )
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        except OSError as error:
            failed = error
    raise LinkFailedError(f"{to.node}: {failed or 'it has no address'}")
