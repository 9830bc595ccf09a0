"""POSIX ACLs as Linux has them in extended attributes: what they say of a mode, what a mode says of
them, and what files inherit.

The rules are those of POSIX 1003.1e draft 17 and of the kernel's `posix_acl.c`. Where an ACL has a
mask, the mode's group bits are the mask, and not what the owning group may do. Pure functions over
bytes; no calls.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

ACCESS = b"system.posix_acl_access"
DEFAULT = b"system.posix_acl_default"
NAMES = frozenset({ACCESS, DEFAULT})

USER_OBJ = 0x01
USER = 0x02
GROUP_OBJ = 0x04
GROUP = 0x08
MASK = 0x10
OTHER = 0x20
_HEADER = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")
_VERSION = 2
NO_ID = 0xFFFFFFFF
_ALL = 0o7
_NAMED = frozenset({USER, GROUP})


class Entry(NamedTuple):
    """Who, and what they may do: bits of `rwx`, as in a mode."""

    tag: int
    may: int
    id: int = NO_ID


def decode(value: bytes) -> list[Entry]:
    """What an attribute says.

    Raises:
        OSError: EINVAL: it is no ACL.
    """
    whole, rest = divmod(len(value) - _HEADER.size, _ENTRY.size)
    if whole < 0 or rest or _HEADER.unpack_from(value)[0] != _VERSION:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return [Entry(*fields) for fields in _ENTRY.iter_unpack(value[_HEADER.size :])]


def encode(entries: Iterable[Entry]) -> bytes:
    """The attribute."""
    return _HEADER.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)


def of_mode(mode: int) -> bytes:
    """The ACL that says no more than a mode; where it is set, the file has none afterwards."""
    owner = mode >> 6 & _ALL
    group = mode >> 3 & _ALL
    other = mode & _ALL
    return encode([Entry(USER_OBJ, owner), Entry(GROUP_OBJ, group), Entry(OTHER, other)])


def says_more(value: bytes) -> bool:
    """Whether it says more than a mode can."""
    return any(entry.tag in _NAMED or entry.tag == MASK for entry in decode(value))


def mode_bits(value: bytes) -> int:
    """The nine bits of the mode of a file that has it."""
    may = {entry.tag: entry.may for entry in decode(value)}
    group = may.get(MASK, may.get(GROUP_OBJ, 0))
    return may.get(USER_OBJ, 0) << 6 | group << 3 | may.get(OTHER, 0)


def after_chmod(value: bytes, mode: int) -> bytes:
    """What chmod makes of it: the group bits are the mask's, if there is one."""
    entries = decode(value)
    has_mask = any(entry.tag == MASK for entry in entries)
    bits = {USER_OBJ: mode >> 6, MASK if has_mask else GROUP_OBJ: mode >> 3, OTHER: mode}
    return encode(
        entry._replace(may=bits[entry.tag] & _ALL) if entry.tag in bits else entry
        for entry in entries
    )


def inherited(default: bytes, mode: int) -> tuple[int, bytes | None]:
    """Mode and ACL of what is made in a directory with this default ACL; the umask does not count
    there. None: the mode says all.
    """
    allowed = mode & mode_bits(default) | mode & ~0o777
    return allowed, after_chmod(default, allowed) if says_more(default) else None


def narrow(value: bytes, mode: int) -> int:
    """A mode that gives nobody more than the ACL does, for where only a mode can be had.

    The owning group, and all others, may do what they may by the ACL, and what each user and group
    that is named there may: those count among them now.
    """
    entries = decode(value)
    mask = next((entry.may for entry in entries if entry.tag == MASK), _ALL)
    named = _ALL
    for entry in entries:
        if entry.tag in _NAMED:
            named &= entry.may & mask
    own = next((entry.may for entry in entries if entry.tag == GROUP_OBJ), 0)
    return mode & ~0o077 | (mode >> 3 & own & mask & named) << 3 | mode & named
