"""Which errno the kernel is told for what a call raised. The one place."""

from __future__ import annotations

import errno
import struct

_ERRNO_MAX = 511
"""The kernel takes replies below -511 for protocol violations."""


class MalformedError(Exception):
    """A request that does not parse: a bug of the kernel or of this transport."""


def errno_of(error: BaseException) -> int | None:
    """The errno of an expected failure; None for a bug, which is EIO to the application and a stack
    to the log.
    """
    if isinstance(error, OSError):
        number = error.errno
        return number if number is not None and 0 < number <= _ERRNO_MAX else errno.EIO
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, MalformedError):
        return errno.EIO
    return None


MALFORMED = (struct.error, ValueError, IndexError)
"""What decoding raises on bytes that are not the request they say they are."""
