"""Closes of which it is not known yet whether they were those of their files: what they made is
withdrawn, or counts.

The kernel tells at once of a close, and of the last one (RELEASE) a moment later; in between, a
version that the close made is in doubt (`Handle.store`). Whatever relies on it meanwhile
decides here what it was: a write through the same descriptor, the last close, what /proc tells, or
somebody who is about to do something to the file's names.

What somebody says is good is fixed here, too: that version is not in doubt, and ends for all what
they had begun.

Knows handles, their records and the log's changes; what a close publishes is `OpenFiles`' business.
Used under the file system's lock; the coroutine waits as described in `steps`.
"""

from __future__ import annotations

from acpfs.filesystem.changes import Changes
from acpfs.filesystem.close_states import CloseEvent
from acpfs.filesystem.handles import Handles
from acpfs.filesystem.kept_handles import UNTOLD, Handle
from acpfs.filesystem.last_close import Left, Openers
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import unlocked
from acpfs.writeback.log.ops import Op


class DoubtfulCloses:
    """Settles them, and fixes what is good whatever they were."""

    def __init__(self, handles: Handles, changes: Changes, openers: Openers) -> None:
        """`openers`: knows what is left to who opened a file."""
        self._handles = handles
        self._writers = handles.writers
        self._changes = changes
        self._openers = openers

    def went_on(self, handle: Handle) -> None:
        """The close that made its version, if one did, was that of a copy: it was written through
        it since, or somebody else has one.

        Others may have closed the file before, and have what they wrote in that version.
        """
        op = handle.store
        if op is None:
            return
        others = self._of_same_version(handle, op)
        handle.take(CloseEvent.WENT_ON)
        self._changes.withdraw(op)
        handle.by_opener = False
        for one in others:
            one.take(CloseEvent.OTHER_WENT_ON)
            self._handles.changed(one)
        self._handles.changed(handle)

    def ended(self, handle: Handle) -> None:
        """The close that made its version, if one did, was that of the file: the version counts
        when that is known of all whose closes made it.
        """
        op = handle.store
        if op is None:
            return
        others = self._of_same_version(handle, op)
        handle.take(CloseEvent.ENDED)
        handle.is_fixed()
        if not others:
            self._changes.confirm(op)
        self._handles.changed(handle)

    def _of_same_version(self, handle: Handle, op: Op) -> list[Handle]:
        writers = self._writers.of(handle.node)
        return [one for one in writers if one.store is op and one is not handle]

    def fix(self, node: Node, *, quiet: bool = False) -> Op | None:
        """Fix the content as it is, whoever else is at it: somebody says that it is good, or it is
        at any moment.

        Whatever anybody has written is in that version, and the version counts. So nobody is at the
        file any more for what he wrote until now: who goes on is at it from his next write on,
        which is seen (`FileWriters`). Not so who is in a call that changes the file: of that
        nothing is told yet. `quiet`: as `Changes.freeze` has it.
        """
        op = self._changes.freeze(node, quiet=quiet)
        if not node.body.interrupted:
            self._changes.rely_on(node)
        if node.body.modified:
            return op  # a half: no version has what was written
        for handle in self._writers.of(node):
            if not handle.changing:
                handle.take(CloseEvent.FIXED)
                handle.killed = False
                handle.is_fixed()
                self._handles.changed(handle)
        return op

    def fix_unless_another_writes(self, node: Node, pid: int) -> None:
        """The same, in a call that holds the inode's lock, unless a process that is not the
        thread's own is in the middle of it.
        """
        if not self._writers.is_another_at_it(node, pid):
            self.fix(node, quiet=True)

    async def before_names_change(self, node: Node, pid: int = 0) -> None:
        """Withdraw the version of a close that was that of a copy, before an operation on a name of
        the file relies on it.

        So it is where the process that opened the file has it open still, or one that wrote through
        a copy. Not where the thread `pid` is that one's, and nobody else is at the file: who writes
        it, and names it, says that it is good. Where nothing can be told, the close counts: most
        often a program has ended its save, and what stands behind the operation may rely on the
        file.
        """
        if pid and not self._writers.is_another_at_it(node, pid):
            return
        for handle in self._writers.of(node):
            await self._settle(handle, pid)

    async def before_sync(self, handle: Handle) -> None:
        """The same, before the file is synced through `handle`: that says that it is good as it is
        now, and nothing of what others had made of it at such a close; it may be truncated since.
        """
        for one in self._writers.beside(handle):
            await self._settle(one)

    async def _settle(self, handle: Handle, pid: int = 0) -> None:
        """Withdraw its version if the close was that of a copy, as far as that can be told."""
        op = handle.store
        if op is None or not op.tentative or not handle.process:
            return
        if await self._is_held(handle, pid) and handle.store is op:
            handle.has_copies = True
            self.went_on(handle)

    async def _is_held(self, handle: Handle, pid: int) -> bool:
        """Whether who opened the file has it open still, or somebody who wrote through a copy."""
        ino = handle.node.ino
        writers = {handle.process, *handle.wrote_by} - {UNTOLD}
        for process in sorted(writers):
            if await unlocked(self._openers.left, process, ino) is Left.SOME:
                return True
        if UNTOLD not in handle.wrote_by:
            return False
        # An earlier worker knew who: it may be whoever has it by now, but for the one that calls,
        # and says that it is good.
        known = {*writers, self._openers.process_of(pid) if pid else 0}
        return await unlocked(self._openers.has_any_but, known, ino)
