"""Fixing the content of files that stay open: fsync, and age.

Decides when a file's content is fixed (a version) without being closed. Used under the file
system's lock; the coroutines wait as described in `steps`.
"""

from __future__ import annotations

from collections.abc import Iterable

from acpfs.config import FsyncMode
from acpfs.filesystem.attribute_calls import AttributeCalls
from acpfs.filesystem.close_states import CloseEvent
from acpfs.filesystem.closes import Closes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.content.writable import Writable
from acpfs.filesystem.handles import Handles
from acpfs.filesystem.node_use import NodeUse
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import HandleId, Seq


class Syncing:
    """See above."""

    def __init__(
        self,
        upper: UpperLayer,
        handles: Handles,
        closes: Closes,
        attributes: AttributeCalls,
        contents: Contents,
        writable: Writable,
        outgrown: OutgrownFiles,
        use: NodeUse,
    ) -> None:
        self._now = upper.runtime.clock.now
        self._table = upper.table
        self._log = upper.log
        self._handles = handles
        self._closes = closes
        self._attributes = attributes
        self._contents = contents
        self._writable = writable
        self._outgrown = outgrown
        self._use = use

    async def fsync(self, number: HandleId, *, is_durable: bool = False) -> None:
        """Fix the content in the order; in durable mode, or where that is asked for, wait until it
        is persisted; in copied mode until another member has it, too, if that is sooner.

        Raises:
            OSError: ENOSPC: it outgrew RAM in the passthrough lane, opened before it was durable;
                it is persisted after its last close. Or it stands behind such a file, which is
                open.
        """
        handle = self._handles.handle(number)
        await self._outgrown.check(handle.node)
        await self._closes.before_sync(handle)
        # not before: who only syncs, and is told that it failed, has written nothing, and keeps
        # nothing back
        handle.take(CloseEvent.WROTE)
        self._closes.goes_on(handle)
        self._closes.sync(handle)
        self._closes.report_refusal(handle.node)
        mode = FsyncMode.DURABLE if handle.synchronous or is_durable else None
        if mode is None:
            mode = await self._attributes.fsync_mode(handle.node)
        can_be_copied = self._writable.can_be_copied and not handle.node.body.is_outgrown
        if mode is FsyncMode.COPIED and can_be_copied:
            await self._writable.copied(handle.node)
        elif mode is not FsyncMode.ORDERED:
            if handle.writes_unseen:
                self._outgrown.refuse_to_wait(handle.node)
            seen = None
            while (
                last := self._log.last_of(handle.node.ino)
            ) is not None and last is not seen:  # others may store it anew meanwhile
                seen = last
                if open_ones := await self._outgrown.in_the_way(last.seq):
                    self._outgrown.refuse_to_wait(self._table[open_ones[0].ino])
            await self._writable.persisted(handle.node)

    async def fsync_directory(self, node: Node) -> None:
        """In durable mode, wait until its names and its own attributes are persisted; an open file
        has no name yet that could be. In copied mode, until another member has them, too.

        Raises:
            OSError: ENOSPC: some of that stands behind an open file that outgrew RAM.
        """
        mode = await self._attributes.fsync_mode_in(node)
        if mode is FsyncMode.ORDERED:
            return
        if mode is FsyncMode.COPIED and self._writable.can_be_copied:
            await self._writable.copied(node, self._log.last_seq)
            return
        newest = self._log.newest()
        if newest is None or not (self._log.pending_in(node.ino) or self._log.is_pending(node.ino)):
            return
        open_ones = await self._outgrown.in_the_way(newest.seq)
        # not the one from before the wait: a store may have been replaced by one with a larger
        # number
        seq = self._log.last_seq
        if open_ones:
            later = (
                op
                for op in self._log.since(open_ones[0].seq)
                if op not in open_ones and op.concerns(node.ino)
            )
            if any(self._log.stands_since(op) <= newest.logged_at for op in later):
                self._outgrown.refuse_to_wait(self._table[open_ones[0].ino])
            seq = Seq(open_ones[0].seq - 1)
        await wait(self._log.when_done(seq, node.ino))

    # -- files that stay open

    def due_older_than(self, age_s: float) -> list[Node]:
        """Logs that are open and whose first unfixed change is older."""
        changed = self._changed()
        due = self._now() - age_s
        return [
            node
            for node in changed
            if not node.body.is_cold
            and node.body.modified_since <= due
            and self._closes.is_log(node)
        ]

    def freeze_older_than(self, age_s: float) -> int:
        """Fix such logs, but for those that the kernel writes (`freeze_marked`); how many."""
        return self._freeze(n for n in self.due_older_than(age_s) if not n.kernel_writers)

    async def freeze_marked(self, node: Node) -> None:
        """Fix the content of a log that the kernel writes.

        A write that is under way gets done first, which may take for ever.
        """
        node.handles += 1
        try:
            await self._contents.mark(node)
            if node.body.modified and not node.body.interrupted and self._closes.is_log(node):
                self._closes.fix(node)
        finally:
            self._use.closed(node)

    def freeze_the_closed(self) -> int:
        """Nobody can write any more: fix the content of open files, but for one that was never
        closed and is no log. Returns how many.

        Where the session ended beneath its users, that one is a half, and found as one whose writer
        was lost.
        """
        return self._freeze(
            n for n in self._changed() if self._closes.is_log(n) or self._closes.was_closed(n)
        )

    def look_at_writers(self) -> None:
        """Hear what the kernel wrote by itself until now."""
        for node in self._handles.open_nodes():
            if node.kernel_writers:
                self._contents.kernel.look(node)

    def _freeze(self, nodes: Iterable[Node]) -> int:
        return sum(self._closes.fix(node) is not None for node in list(nodes))

    def _changed(self) -> list[Node]:
        """Open files that hold something unfixed and can be fixed."""
        self.look_at_writers()
        return [
            n
            for n in self._handles.open_nodes()
            if n.body.modified and not n.body.interrupted and not n.body.is_outgrown
        ]
