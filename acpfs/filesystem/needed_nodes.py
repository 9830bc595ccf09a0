"""`user.acpfs.needs`: whom the next pointer that a file or directory becomes waits for.

It is no data of the file: it is not listed, not copied with it and never on the backing directory,
and it is gone once a pointer has it. The kernel lets whoever may write to a file set its
attributes; this one is for its owner. Used under the file system's lock.
"""

from __future__ import annotations

import errno

from acpfs.filesystem.names import fail
from acpfs.filesystem.nodes import Node
from acpfs.writeback.log.needs import Needs, parse

XATTR_CREATE = 1
XATTR_REPLACE = 2


class NeededNodes:
    """The attribute's calls."""

    def __init__(self, needs: Needs) -> None:
        self._needs = needs

    def value(self, node: Node) -> bytes:
        """As it was set."""
        nodes = self._needs.told(node.ino)
        if nodes is None:
            raise fail(errno.ENODATA)
        return ",".join(nodes).encode()

    def set(self, node: Node, value: bytes, flags: int, uid: int) -> None:
        """Raises OSError: EPERM, EINVAL, and what the flags ask for."""
        self._check_owner(node, uid)
        known = self._needs.told(node.ino) is not None
        if flags & XATTR_CREATE and known:
            raise fail(errno.EEXIST)
        if flags & XATTR_REPLACE and not known:
            raise fail(errno.ENODATA)
        try:
            nodes = parse(value)
        except ValueError:
            raise fail(errno.EINVAL) from None
        self._needs.tell(node.ino, nodes)

    def remove(self, node: Node, uid: int) -> None:
        """The next pointer waits for all."""
        self._check_owner(node, uid)
        if self._needs.told(node.ino) is None:
            raise fail(errno.ENODATA)
        self._needs.tell(node.ino, None)

    @staticmethod
    def _check_owner(node: Node, uid: int) -> None:
        if uid not in (0, node.uid):
            raise fail(errno.EPERM)
