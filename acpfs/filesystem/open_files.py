"""Open files from their last reference on, and over the deaths of workers.

What is mapped outlives its RELEASE; what was open when a worker died goes on with the next one
(`kept_handles`). Opening is `Opens`' business, and what a close publishes that of `Closes`. Used
under the file system's lock; the coroutines wait as described in `steps`.
"""

from __future__ import annotations

from functools import partial

from acpfs.filesystem.close_states import CloseEvent
from acpfs.filesystem.closes import Closes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.handles import Handles
from acpfs.filesystem.lane_use import LaneUse
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.node_use import NodeUse
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import HandleId, Seq
from acpfs.writeback.log.stages import Step

MAPPED_LOOKS_S = (0.0, 0.001, 0.004, 0.016)
"""When it is looked, after RELEASE, whether a mapping lives on: the kernel may let go of the file a
moment after it has sent that.
"""


class OpenFiles:
    """How open files end, and go on."""

    def __init__(
        self,
        upper: UpperLayer,
        handles: Handles,
        closes: Closes,
        lane_use: LaneUse,
        contents: Contents,
        view: LowerView,
        outgrown: OutgrownFiles,
        use: NodeUse,
    ) -> None:
        self._clock = upper.runtime.clock
        self._log = upper.log
        self._handles = handles
        self._closes = closes
        self._lane_use = lane_use
        self._contents = contents
        self._view = view
        self._outgrown = outgrown
        self._use = use

    async def goes_on_mapped(self, number: HandleId) -> bool:
        """Before `release`: whether a mapping that was made through an open file may live on, so
        that it is not over.

        In passthrough the kernel maps the tier file itself. The mapping keeps that open, and not
        the mount's file: RELEASE comes when the descriptor is closed, and nothing is heard of what
        is written after that. The file stays open here until the mapping is gone
        (`settle_mappings`).
        """
        handle = self._handles.find(number)
        if handle is None or not handle.maps_unseen:
            return False
        if handle.leaves_trace and not self._contents.kernel.may_be_mapped(handle.node):
            return False
        for delay_s in MAPPED_LOOKS_S:
            if delay_s:
                await wait(self._clock.after(delay_s))
            if number not in self._handles or not self._contents.is_mapped(handle.node):
                return False
        handle.is_released = True
        self._handles.changed(handle)
        return True

    async def settle_mappings(self) -> None:
        """Release what was mapped, and is not any more.

        Who has the file open to write still may be one who mapped it.
        """
        for handle in self._handles:
            if not handle.is_released or handle.number not in self._handles:
                continue
            reader = partial(self._contents.open_kernel_target, handle.node)
            self._view.notices.mapped(handle.number, reader)
            if not self._contents.is_mapped(handle.node):
                # Before another open can give the node another file, which the kernel would not
                # get.
                self._view.notices.forgotten(handle.number)
                await self.release(handle.number)

    async def release(self, number: HandleId) -> None:
        """The last reference of an open file is gone; the clean-up must not depend on FLUSH, which
        may be missing after an I/O error.
        """
        handle = self._handles.take_out(number)
        if handle is None:
            return
        self._handles.was_read(handle)
        if handle.writable and handle.node.kernel_writers:
            await self._closes.mark(handle.node)
        self._lane_use.learn_use(handle)
        self._handles.left(handle)  # not before: until here it is one of those who may have written
        self._lane_use.leave(handle)
        self._closes.released(handle)
        self._handles.kept.closed(handle)
        self._view.reads.left(handle)
        node = handle.node
        if handle.writable and node.body.modified:
            # No FLUSH came, or a shared mapping wrote after the last one, or others waited for this
            # one.
            self._closes.publish_if_done(node)
        if (
            handle.writable
            and (node.body.is_outgrown or node.body.is_overflowed)
            and not node.kernel_writers
            and not node.body.interrupted
        ):
            await self._outgrown.finish(node)
        if not node.names:
            self._closes.let_go_of_half(node)
        self._use.closed(node)
        if node.body.failed:
            self._closes.give_up_lost(node)

    async def finish_outgrown(self, node: Node) -> None:
        """What came in an earlier daemon before its last close could be finished."""
        node.handles += 1
        await self._outgrown.finish(node)
        self._use.closed(node)

    def restore(self) -> None:
        """Open files of the session's last worker go on; before anything is served or streamed."""
        for handle, first_seq in self._handles.restored():
            node = handle.node
            if handle.writable:
                node.writer_pid = handle.pid
            node.handles += 1
            self._lane_use.restored(handle)
            op = self._log.last_but_attributes_of(node.ino) if first_seq else None
            if op is not None and self._closes.is_closed_since(op, first_seq):
                op.take(Step.CLOSED)
                handle.take(CloseEvent.FOUND, op)
                # 0: an earlier acpfs has recorded it
                handle.closed_at = handle.closed_at or self._clock.now()
        for former, seq in self._handles.kept.former():
            self._closes.settle_former(former, Seq(seq))
