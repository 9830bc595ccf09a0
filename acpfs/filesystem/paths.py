"""Paths below the mount point, followed as the kernel would follow them, for those who name a file
without opening it.

Asks the backing directory through `LowerView` as a lookup does. Coroutines wait as described in
`steps`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.types import ROOT, Ino

SYMLINKS_MAX = 40
"""As many as the kernel follows."""


class Paths:
    """See above."""

    def __init__(self, table: NodeTable, view: LowerView, mountpoint: Path) -> None:
        self._table = table
        self._view = view
        self._mountpoint = os.fsencode(mountpoint)

    def of(self, ino: Ino) -> bytes:
        """Where a node lies in the mount now, "" also for one that has no name; under the lock."""
        return (
            self._table.path(ino)
            if ino in self._table and (self._table[ino].names or ino == ROOT)
            else b""
        )

    async def child(self, parent: Node, name: bytes) -> Node | None:
        """What a name in a directory leads to, now."""
        if not parent.is_dir:
            return None
        ino = await self._view.child(parent, name)
        return self._table.get(ino) if ino else None

    async def find(self, path: bytes) -> Node:
        """What lies at a path; symlinks are not followed.

        Raises:
            OSError: ENOENT, there is nothing.
        """
        node = self._table[ROOT]
        for name in path.split(b"/") if path else ():
            child = await self.child(node, name)
            if child is None:
                raise _error(errno.ENOENT, path)
            node = child
        return node

    async def follow(self, path: bytes) -> list[bytes]:
        """What makes up a path: each symlink on the way, and at last the path that they lead to.

        Raises:
            OSError: ENOENT, there is nothing; EXDEV, a symlink leads out of the mount; ELOOP.
        """
        todo = path.split(b"/")[::-1]
        links = list[bytes]()
        nodes = [self._table[ROOT]]
        names = list[bytes]()
        while todo:
            name = todo.pop()
            if name == b"..":
                if not names:
                    raise _error(errno.EXDEV, path)
                nodes.pop()
                names.pop()
                continue
            if name in (b"", b"."):
                continue
            child = await self.child(nodes[-1], name)
            if child is None:
                raise _error(errno.ENOENT, path)
            if not stat.S_ISLNK(child.mode):
                nodes.append(child)
                names.append(name)
                continue
            links.append(b"/".join((*names, name)))
            if len(links) > SYMLINKS_MAX:
                raise _error(errno.ELOOP, path)
            target = await self._view.load_target(child)
            if target.startswith(b"/"):
                if not (target + b"/").startswith(self._mountpoint + b"/"):
                    raise _error(errno.EXDEV, path)
                target = target[len(self._mountpoint) :]
                del nodes[1:], names[:]
            todo += target.split(b"/")[::-1]
        return [*links, b"/".join(names)]


def _error(number: int, path: bytes) -> OSError:
    return OSError(number, os.strerror(number), path)
