"""POSIX ACLs of nodes: what the kernel is told of them, what is inherited, what changes with the
mode.

An ACL stands among a node's extended attributes, as it does on the backing directory. What it has
in common with the mode (owner, mask, others) is the mode's; so a chmod of a node whose attributes
are not known yet changes it all the same. The kernel does the checking (`FUSE_POSIX_ACL`). Pure;
knows neither the backing directory nor the log.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import NamedTuple

from acpfs.backing import posix_acl
from acpfs.backing.posix_acl import ACCESS, DEFAULT, GROUP_OBJ, MASK, OTHER, USER_OBJ, Entry


class NewRights(NamedTuple):
    """What a new node has."""

    mode: int
    acls: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class HandedOn:
    """What a directory hands on to what is made in it."""

    default: bytes | None = None
    """Its default ACL, if it has one."""
    is_known: bool = True

    def to_new(self, mode: int, umask: int) -> NewRights:
        """Rights of a new node for which this mode was asked for."""
        if stat.S_ISLNK(mode):
            return NewRights(mode, {})
        if not self.is_known:  # it may be anything: nobody but the owner gets what it might refuse
            return NewRights(mode & ~umask & ~0o077, {})
        if self.default is None:
            return NewRights(mode & ~umask, {})
        allowed, access = posix_acl.inherited(self.default, mode)
        acls = {} if access is None else {ACCESS: access}
        if stat.S_ISDIR(mode):
            acls[DEFAULT] = self.default
        return NewRights(allowed, acls)


def shown(node_mode: int, name: bytes, value: bytes) -> bytes:
    """An ACL among the attributes of a node with this mode, as it is now."""
    return posix_acl.after_chmod(value, node_mode) if name == ACCESS else value


def mode_after(mode: int, access: bytes, *, kills_set_gid: bool) -> int:
    """The mode of a node to which this access ACL is given.

    Raises:
        OSError: EINVAL: it is no ACL.
    """
    new_mode = mode & ~0o777 | posix_acl.mode_bits(access)
    return new_mode & ~stat.S_ISGID if kills_set_gid else new_mode


def unknown(mode: int) -> bytes:
    """In place of an ACL that may be there and cannot be asked for: it lets the owner in, and whom
    no ACL keeps out.
    """
    owner = Entry(USER_OBJ, mode >> 6 & 0o7)
    return posix_acl.encode([owner, Entry(GROUP_OBJ, 0), Entry(MASK, 0), Entry(OTHER, 0)])
