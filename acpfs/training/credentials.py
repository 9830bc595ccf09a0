"""TLS between members and coordinators of one job: one key and one self-signed certificate, which
both sides must present.

The first coordinator makes them in the job's directory: who may write the job's checkpoints may
join the job. What is trusted is that one certificate, byte for byte, not whoever it might sign
(`acpfs.links`).
"""

from __future__ import annotations

import math
import socket
import ssl
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from acpfs.links.keys import BEGINS, ENDS, make_key
from acpfs.links.tls import certificate_of, mutual
from acpfs.training.wire import LinkClosedError, SocketLink, dialling

NAME = "tls"
"""Below the job's directory."""
CONNECT_S = 5.0
"""So long a node is called that may be gone; the kernel answers for a process that is busy."""
HANDSHAKE_S = 30.0
"""For the process at the other end, which may have a thousand others to speak with, or stand still
for a while.
"""
_LEAST_S = 0.001
_NEXT = "the next job makes it anew"
_WAY_OUT = "the job's certificate (or tls=off)"


@dataclass(frozen=True)
class Credentials:
    """Where key and certificate lie."""

    directory: Path

    @cached_property
    def der(self) -> bytes:
        """The certificate, as a peer presents it."""
        return certificate_of(self.directory)

    @cached_property
    def listening(self) -> ssl.SSLContext:
        """`context` for a server, made once: a thousand members come."""
        return self.context(server=True)

    @cached_property
    def calling(self) -> ssl.SSLContext:
        """The same for whoever calls."""
        return self.context(server=False)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3 that presents the certificate and wants one.

        Raises:
            RefusedError: the key is not the user's own secret.
        """
        return mutual(self.directory, self.der, _NEXT, server=server)

    def vouch_for(self, presented: bytes | None) -> bool:
        """Whether the peer has the job's certificate itself."""
        return presented == self.der


def make_credentials(job_directory: Path, begins: str = BEGINS, ends: str = ENDS) -> Credentials:
    """Those of this job; made unless somebody else did, or does at the same time.

    Raises:
        MachineError: the program `openssl` is missing, or fails.
    """
    found = Credentials(job_directory / NAME)
    make_key(found.directory, "acpfs training job", _WAY_OUT, begins, ends)
    return found


def connect(
    address: str, credentials: Credentials | None, timeout_s: float | None = None
) -> SocketLink:
    """A link to a coordinator, for a thread; without credentials without TLS.

    `timeout_s`: for all of it. None: a node that is gone is given up soon, and a process that is
    busy has its time for the handshake.

    Raises:
        LinkClosedError: nobody is there, or it has not the job's certificate.
    """
    host, _, port = address.rpartition(":")
    connect_s = CONNECT_S if timeout_s is None else timeout_s
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    try:
        with dialling(host.strip("[]"), int(port), connect_s) as plain:
            # Never 0, which would mean not to wait at all, and be another error.
            plain.settimeout(max(_LEAST_S, min(HANDSHAKE_S, until - time.monotonic())))
            return _link(address, plain, credentials)
    except LinkClosedError:
        raise
    except (OSError, ValueError) as error:
        raise LinkClosedError(f"{address}: {error}") from error


def _link(address: str, plain: socket.socket, credentials: Credentials | None) -> SocketLink:
    """Owns the connection; TLS over it, with credentials."""
    connected = plain
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if credentials is not None:
            secured = credentials.calling.wrap_socket(plain)
            connected = secured  # from here on `plain` owns nothing
            if not credentials.vouch_for(secured.getpeercert(binary_form=True)):
                raise LinkClosedError(f"{address}: another certificate than the job's")
        connected.settimeout(HANDSHAKE_S)  # what is said later is no part of connecting
        return SocketLink(connected)
    except BaseException:
        connected.close()
        raise
