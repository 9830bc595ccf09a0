"""Deleted files that are still open, and whose bytes only the backing directory has: one descriptor
of each.

A handle opens its file on the backing directory at its first read, by name; so before the last name
goes, a descriptor is taken from which later readers copy theirs, and from which the bytes come when
they are to be changed. So it is with a staging file: what it has is stored under the name that
goes, and deleted with it. The supervisor is handed it as well (`Notices.keep`), for the next worker
of the session. Who deletes a file on the backing directory itself asks nobody: of that one nothing
is had (exception X8). Used under the file system's lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Awaitable, Callable

from acpfs.backing.calls import BackingTimeoutError, CallPool
from acpfs.filesystem.nodes import Identity, Node
from acpfs.filesystem.notices import Notices
from acpfs.filesystem.steps import wait
from acpfs.runtime.given import Runtime
from acpfs.types import Ino

Source = tuple[Identity | None, str]
"""Of which file a descriptor is: what the backing directory has, and a staging file beside it."""
KEPT_MAX = 32
"""The supervisor hands over 64 descriptors at most; of deleted files beyond these the next worker
has none.
"""


class Nameless:
    """Node → descriptor."""

    def __init__(
        self,
        open_bytes: Callable[[Node], Awaitable[int]],
        close_later: Callable[[int], None],
        patience_s: float,
        notices: Notices,
        runtime: Runtime,
    ) -> None:
        """`open_bytes`: opens what has a node's bytes on the backing directory. `patience_s`: for
        so long a removal waits for the supervisor.
        """
        self._open_bytes = open_bytes
        self._close_later = close_later
        self._patience_s = patience_s
        self._notices = notices
        self._fds: dict[Ino, tuple[int, Source]] = {}
        self._handed_over: set[Ino] = set()
        self.calls = CallPool("keep", 1, runtime)
        """One thread: the supervisor is told in this order."""

    async def before_removal(self, node: Node) -> None:
        """A name of the node is about to go; neither a file that cannot be opened nor a supervisor
        that does not answer holds that up.
        """
        if (
            not node.handles
            or not (node.body.is_cold or node.body.is_overflowed)
            or not stat.S_ISREG(node.mode)
            or len(node.names) > 1
            or self._has(node)
        ):
            return
        try:
            fd = await self._open_bytes(node)
        except InterruptedError:
            raise  # whoever removes it was killed while it waited, and those who read it keep it
        except OSError:
            return
        if self._has(node) or not node.handles:
            self._close_later(fd)
            return
        self._drop(node.ino)
        self._fds[node.ino] = (fd, _source(node))
        if self._notices.keeps and len(self._handed_over) < KEPT_MAX:
            await self._hand_over(node, fd)

    def _has(self, node: Node) -> bool:
        """Of the file as it is; one that was taken for a removal that did not come about is
        outdated when the file was written anew.
        """
        return node.ino in self._fds and self._fds[node.ino][1] == _source(node)

    async def _hand_over(self, node: Node, fd: int) -> None:
        self._handed_over.add(node.ino)
        future = self.calls.submit("keep", self._notices.keep, node.ino, [fd])
        try:
            with contextlib.suppress(BackingTimeoutError):
                await wait(self.calls.patient(future, self._patience_s))
        except BaseException:
            if node.names:  # whoever removes it has gone, and it has not
                self._drop(node.ino)
            raise

    def copy(self, node: Node) -> int:
        """A descriptor of a deleted file, the caller's to close; -1: there is none."""
        return os.dup(self._fds[node.ino][0]) if node.ino in self._fds and not node.names else -1

    def closed(self, node: Node) -> None:
        """Nobody has it open any more."""
        if node.ino in self._fds:
            self._drop(node.ino)

    def _drop(self, ino: Ino) -> None:
        if ino not in self._fds:
            return
        fd, _of = self._fds.pop(ino)
        if ino in self._handed_over:
            self._handed_over.remove(ino)
            self.give_back(ino, fd)
        else:
            self._close_later(fd)

    def give_back(self, ino: Ino, fd: int) -> None:
        """The supervisor forgets it first: until then it may have to be handed to another one."""
        self.calls.later("forget", self._forget, ino, fd)

    def _forget(self, ino: Ino, fd: int) -> None:
        try:
            self._notices.keep(ino, [])
        finally:
            self._close_later(fd)

    def restore(self, node: Node, fd: int) -> None:
        """What the last worker of the session had of a node; not of one that has a name: it was not
        removed after all.
        """
        if not node.handles or node.names:
            self.give_back(node.ino, fd)
            return
        self._fds[node.ino] = (fd, _source(node))
        self._handed_over.add(node.ino)


def _source(node: Node) -> Source:
    return node.identity, node.body.staging
