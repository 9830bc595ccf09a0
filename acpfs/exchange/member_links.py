"""A connection between two members: who is at the other end, frames, and bytes of files.

Each side says its node id and shows its certificate in plain; the other compares that with the
fingerprint in the member's record, and takes it as the only one in a mutual TLS 1.3 handshake,
which proves that the key is there, too. In it they agree on one of three ways for all that follows:
plain, where both have `peer_encryption = off`; in sealed pieces, where both can; else in TLS.
Blocks; one thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from acpfs.errors import unknown_version
from acpfs.exchange.exchange_records import EXCHANGE_VERSION, MemberAddress, Message
from acpfs.exchange.link_streams import FRAME_BYTES_MAX, LinkFailedError, LinkStream
from acpfs.exchange.sealed_stream import SealedStream, new_secret, secret_of
from acpfs.links.frames import framed
from acpfs.links.tls import certificate_of, mutual

MAGIC = b"acpfs exchange\n"
CERTIFICATE_BYTES_MAX = 1 << 13
WAY_OUT = "the next mount makes it anew"


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
    seals: bool
    """Whether it can send and take sealed pieces."""


class MemberLink:
    """One connection; owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = LinkStream(connection)
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
                secret = new_secret() if own.seals else None
                link._say(_offer(own.is_plain, secret))
                link._agree(own, link._received(), secret, called=True)
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
            said = self._received()
            is_plain = said.get("plain") is True and own.is_plain
            seals = own.seals and not is_plain and secret_of(said.get("sealed")) is not None
            secret = new_secret() if seals else None
            self._say(_offer(is_plain, secret))
            self._agree(own, {**said, "plain": is_plain}, secret, called=False)
        return node

    def _agree(self, own: OwnName, said: Message, secret: str | None, *, called: bool) -> None:
        """Go on in the way that both have said, with what the other one has."""
        ours = secret_of(secret)
        theirs = secret_of(said.get("sealed"))
        if said.get("plain") is True and own.is_plain:
            self._stream = LinkStream(_unwrapped(self._stream.socket))
        elif ours is not None and theirs is not None:
            both = ours + theirs if called else theirs + ours
            self._stream = SealedStream(_unwrapped(self._stream.socket), both, called=called)

    def _introduce(self, own: OwnName) -> None:
        said = {"version": EXCHANGE_VERSION, "volume": own.volume, "node": own.node}
        self._stream.socket.sendall(
            MAGIC
            + framed(json.dumps(said).encode(), FRAME_BYTES_MAX)
            + framed(certificate_of(own.directory), CERTIFICATE_BYTES_MAX)
        )

    def _introduced(self) -> tuple[Message, bytes]:
        if self._stream.exactly(len(MAGIC)) != MAGIC:
            raise LinkFailedError("no exchange of acpfs")
        said = self._received()
        return said, self._stream.frame(CERTIFICATE_BYTES_MAX)

    def _secure(self, own: OwnName, certificate: bytes, *, server: bool) -> None:
        context = mutual(own.directory, certificate, WAY_OUT, server=server)
        if server:
            context.num_tickets = 0  # nobody comes back with one
        secured = context.wrap_socket(self._stream.socket, server_side=server)
        self._stream = LinkStream(secured)
        # What it has signed is not it.
        if secured.getpeercert(binary_form=True) != certificate:
            raise LinkFailedError("another certificate than it said")

    # -- afterwards

    @property
    def way(self) -> str:
        """How what is sent is protected: one of `link_streams.WAYS`."""
        return self._stream.way

    @property
    def is_spent(self) -> bool:
        """Whether it is better made anew than used once more."""
        return self._stream.is_spent

    def limit(self, timeout_s: float) -> None:
        """How long each call may take from now on without a byte."""
        self._stream.socket.settimeout(timeout_s)

    def _limit(self, until: float) -> None:
        self._stream.socket.settimeout(max(0.001, until - time.monotonic()))

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LinkFailedError: it does not go out.
        """
        with _failing():
            self._say(message)

    def receive(self) -> Message:
        """The next message.

        Raises:
            LinkFailedError: none comes, or it is none.
        """
        with _failing():
            return self._received()

    def _say(self, message: Message) -> None:
        self._stream.send(json.dumps(message).encode())

    def _received(self) -> Message:
        return _object(self._stream.receive())

    def receive_into(self, view: memoryview, within_s: float) -> None:
        """Exactly so many bytes of a file, all of them within that time; where that fails none of
        them counts.

        Raises:
            LinkFailedError: they do not come, or not as they were sent.
        """
        with _failing():
            self._stream.receive_into(view, time.monotonic() + within_s)

    def receive_parts(self, size: int, within_s: float) -> Iterator[memoryview]:
        """Exactly so many bytes of a file, one part after the other, all of them within that time;
        each is good until the next one. What came before it fails did come as it was sent.

        Raises:
            LinkFailedError: they do not come, or not as they were sent.
        """
        with _failing():
            yield from self._stream.receive_parts(size, time.monotonic() + within_s)

    def send_file(self, fd: int, offset: int, size: int, *, is_steady: bool = False) -> None:
        """Bytes of a file, as they are now. `is_steady`: nobody makes it shorter meanwhile; who
        does ends this process.

        Raises:
            LinkFailedError: they do not go out, or the file has become shorter.
        """
        with _failing():
            self._stream.send_file(fd, offset, size, is_steady=is_steady)

    def close(self) -> None:
        """Also to wake who waits in here in another thread."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._stream.socket, socket.SHUT_RDWR)
        self._stream.socket.close()


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


def _offer(is_plain: bool, secret: str | None) -> Message:
    return {"plain": is_plain, **({} if secret is None else {"sealed": secret})}


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
