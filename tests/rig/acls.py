"""POSIX ACLs for tests: written as `setfacl` takes them, `u:2001:rw,g::r,m::rw`, set and read by
their attributes.
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

ACCESS = "system.posix_acl_access"
DEFAULT = "system.posix_acl_default"
_TAGS = {"u": (0x01, 0x02), "g": (0x04, 0x08), "m": (0x10, 0x10), "o": (0x20, 0x20)}
_NO_ID = 0xFFFFFFFF


def encoded(text: str) -> bytes:
    """The attribute; all of `u::`, `g::` and `o::` are to be there, and `m::` where anybody is
    named.
    """
    entries = []
    for part in text.split(","):
        kind, who, rights = part.split(":")
        tag = _TAGS[kind][bool(who)]
        may = sum(bit for letter, bit in (("r", 4), ("w", 2), ("x", 1)) if letter in rights)
        entries.append((tag, int(who) if who else _NO_ID, may))
    # in the order that the kernel wants: by tag, then by id
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, may, who) for tag, who, may in sorted(entries)
    )


def shown(value: bytes) -> str:
    """`encoded`, backwards."""
    parts = []
    for tag, may, who in struct.iter_unpack("<HHI", value[4:]):
        kind = next(kind for kind, tags in _TAGS.items() if tag in tags)
        rights = "".join(letter for letter, bit in (("r", 4), ("w", 2), ("x", 1)) if may & bit)
        parts.append(f"{kind}:{'' if who == _NO_ID else who}:{rights}")
    return ",".join(parts)


def set_acl(path: Path, text: str, name: str = ACCESS) -> None:
    os.setxattr(path, name, encoded(text), follow_symlinks=False)


def acl_of(path: Path, name: str = ACCESS) -> str:
    """ "": it has none."""
    try:
        return shown(os.getxattr(path, name, follow_symlinks=False))
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return ""
