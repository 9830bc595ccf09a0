"""TLS between two processes of acpfs: each presents a certificate, and takes one certificate of the
other, byte for byte, not whoever that might sign.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from acpfs.errors import RefusedError
from acpfs.links.keys import CERTIFICATE, KEY


def certificate_of(directory: Path) -> bytes:
    """The certificate that lies there, as a peer presents it (DER)."""
    return ssl.PEM_cert_to_DER_cert((directory / CERTIFICATE).read_text(encoding="ascii"))


def mutual(directory: Path, trusted: bytes, way_out: str, *, server: bool) -> ssl.SSLContext:
    """TLS 1.3 that presents the certificate of a directory, and wants `trusted` (DER).

    The caller looks whether the peer's is that one (`SSLSocket.getpeercert`): one that it has
    signed is not. `way_out`: what to do where the key cannot be used.

    Raises:
        RefusedError: the key is not the user's own secret.
        OSError: there is no key, or it cannot be read.
    """
    key = directory / KEY
    status = key.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
        raise RefusedError(
            f"{key} is not this user's own, or others may read it; remove {directory}, {way_out}"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(directory / CERTIFICATE, key)
    context.load_verify_locations(cadata=trusted)
    return context
