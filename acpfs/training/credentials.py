"""TLS between members and coordinators of one job: one key and one self-signed certificate, which
both sides must present.

The first coordinator makes them in the job's directory: who may write the job's checkpoints may
join the job. What is trusted is that one certificate, byte for byte, not whoever it might sign. The
`openssl` program makes it, once per job, in a hundredth of a second: Python's ssl has no way to,
and the package `cryptography` would be a dependency of every training process for these two calls.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from acpfs.errors import MachineError, RefusedError
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
BEGINS = "20000101000000Z"
ENDS = "20991231235959Z"
"""A job's certificate ends with its directory; nodes' clocks need not agree."""
_CONFIG = """[ca]
default_ca = job
[job]
database = {d}/index
new_certs_dir = {d}
serial = {d}/serial
default_md = sha256
policy = any
[any]
commonName = supplied
[req]
distinguished_name = name
prompt = no
[name]
CN = acpfs training job
"""


@dataclass(frozen=True)
class Credentials:
    """Where key and certificate lie."""

    directory: Path

    @cached_property
    def der(self) -> bytes:
        """The certificate, as a peer presents it."""
        return ssl.PEM_cert_to_DER_cert(
            (self.directory / "certificate.pem").read_text(encoding="ascii")
        )

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
        key = self.directory / "key.pem"
        certificate = self.directory / "certificate.pem"
        status = key.stat()
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
            raise RefusedError(
                f"{key} is not this user's own, or others may read it; remove {self.directory}, "
                "the next job makes it anew"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is the name
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(certificate)
        return context

    def vouch_for(self, presented: bytes | None) -> bool:
        """Whether the peer has the job's certificate itself."""
        return presented == self.der


def make_credentials(job_directory: Path, begins: str = BEGINS, ends: str = ENDS) -> Credentials:
    """Those of this job; made unless somebody else did, or does at the same time.

    Raises:
        MachineError: the program `openssl` is missing, or fails.
    """
    found = Credentials(job_directory / NAME)
    if found.directory.exists():
        return found
    job_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=job_directory))
    try:
        with tempfile.TemporaryDirectory(prefix="acpfs-tls-") as scratch:
            _generate(Path(scratch), begins, ends)
            for name in ("key.pem", "certificate.pem"):
                target = made / name
                target.touch(mode=0o600)
                target.write_bytes((Path(scratch) / name).read_bytes())
        try:
            made.rename(found.directory)
        except OSError:
            if not found.directory.exists():  # not because another coordinator was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return found


def _generate(scratch: Path, begins: str, ends: str) -> None:
    (scratch / "config").write_text(_CONFIG.format(d=scratch), encoding="utf-8")
    (scratch / "index").touch()
    (scratch / "serial").write_text(os.urandom(8).hex().replace("0", "1") + "\n", encoding="ascii")
    config = ["-config", str(scratch / "config")]
    _openssl(
        "req",
        "-new",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        *config,
        *_files(scratch, "keyout", "key.pem", "out", "request"),
    )
    _openssl(
        *("ca", "-batch", "-notext", "-selfsign", "-startdate", begins, "-enddate", ends, *config),
        *_files(scratch, "keyfile", "key.pem", "in", "request", "out", "certificate.pem"),
    )


def _files(scratch: Path, *pairs: str) -> list[str]:
    return [
        part
        for option, name in zip(pairs[::2], pairs[1::2], strict=True)
        for part in (f"-{option}", str(scratch / name))
    ]


def _openssl(*arguments: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except FileNotFoundError:
        raise MachineError(
            "the program openssl is not installed; it makes the job's certificate (or tls=off)"
        ) from None
    if done.returncode:
        raise MachineError(
            f"openssl {arguments[0]}: "
            f"{done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
        )


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
            connected = secured = credentials.calling.wrap_socket(
                plain
            )  # from here on `plain` owns nothing
            if not credentials.vouch_for(secured.getpeercert(binary_form=True)):
                raise LinkClosedError(f"{address}: another certificate than the job's")
        connected.settimeout(HANDSHAKE_S)  # what is said later is no part of connecting
        return SocketLink(connected)
    except BaseException:
        connected.close()
        raise
