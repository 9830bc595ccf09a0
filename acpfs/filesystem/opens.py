"""Opening files: by number, by making them, and without a name.

What truncates a file and what makes its handle known to the next worker is one step. Knows lanes
and contents by their faces; what an open that fails leaves is `Closes`' business. Used under the
file system's lock; the coroutines wait as described in `steps`.
"""

from __future__ import annotations

import os
import stat

from acpfs.filesystem.close_states import CloseEvent
from acpfs.filesystem.closes import Closes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.writable import Writable
from acpfs.filesystem.file_writers import Opening
from acpfs.filesystem.handles import Handles
from acpfs.filesystem.lane_use import LaneUse
from acpfs.filesystem.loads import Loads
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.names import Names
from acpfs.filesystem.node_use import NodeUse
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import Caller, Lane, OpenFile
from acpfs.types import HandleId, Ino


class Opens:
    """Calls that open."""

    def __init__(
        self,
        handles: Handles,
        closes: Closes,
        lane_use: LaneUse,
        names: Names,
        view: LowerView,
        contents: Contents,
        writable: Writable,
        use: NodeUse,
    ) -> None:
        self._handles = handles
        self._writers = handles.writers
        self._closes = closes
        self._lane_use = lane_use
        self._names = names
        self._view = view
        self._contents = contents
        self._writable = writable
        self._use = use

    async def open(self, ino: Ino, flags: int, caller: Caller) -> OpenFile:
        """Open an existing regular file; close-to-open: its attributes are renewed first.

        What truncates it and what makes the handle known to the next worker is one step: a worker
        that dies between them has done neither. Where it is not (others have the file in the
        kernel, or the lane is waited for), the next one finds a half, which is none as soon as the
        request comes again; it may not, where its caller is gone.
        """
        node = self._names.node(ino)
        opening = self._handles.opening(caller)
        if self._handles.comes_again(caller.unique):
            self._forget_unanswered(caller.unique)
        await self._view.renew(node)
        # from here on its content may not be evicted; counted before the waits below, which let
        # others in
        node.handles += 1
        truncates = bool(flags & os.O_TRUNC)
        if truncates:
            self._writers.begins(node, opening)
        try:
            opened = await self._open_ready(node, flags, caller, opening)
        except BaseException as error:
            if truncates:
                self._writers.has_opened(node, opening)
            await self._closes.not_opened(node, opening, error)
            self._use.closed(node)
            raise
        if truncates:
            self._writers.has_opened(node, opening)
        return opened

    async def _open_ready(
        self, node: Node, flags: int, caller: Caller, opening: Opening
    ) -> OpenFile:
        if flags & os.O_TRUNC and node.kernel_writers:
            self._contents.kernel.look(node)
        opening.size = node.size
        opening.place = Loads.place(node)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            node.writer_pid = caller.pid
        if flags & os.O_TRUNC:
            # what cannot be opened is not truncated
            if node.body.moving_out is not None:
                await self._closes.closed_in_the_kernel(node)
            opening.was_modified = node.body.modified and not node.body.interrupted
            opening.found_half = node.body.interrupted
            has_taken = await self._writable.truncate(node, 0, opens=True)
            if has_taken or opening.found_half:
                opening.has_truncated = True
                self._closes.leave_half(node)
        elif flags & os.O_ACCMODE != os.O_RDONLY:
            await self._writable.bring_up(node)
        else:
            await self._lane_use.warming.before_reading(node)
        opened = await self._opened(node, flags, caller, opening, wrote=bool(flags & os.O_TRUNC))
        if flags & os.O_TRUNC:
            # it is this one's from now on, whoever had left a half of it meanwhile
            self._contents.go_on(node)
        return opened

    async def _opened(
        self,
        node: Node,
        flags: int,
        caller: Caller,
        opening: Opening,
        *,
        wrote: bool,
        created: bool = False,
    ) -> OpenFile:
        """Give the file its handle; where that fails, its caller says `Closes.not_opened`."""
        if node.body.moving_out is not None:
            await self._closes.closed_in_the_kernel(node)
        handle = self._handles.new(node, flags, caller, opening)
        if wrote:
            handle.take(CloseEvent.WROTE)
        handle.created = created
        try:
            backing_fd = await self._lane_use.take(handle)
        except BaseException:
            node.bound_handles -= handle.bound
            self._view.reads.left(handle)
            raise
        try:
            self._handles.add(handle)
        except OSError:
            self._lane_use.leave(handle)
            self._view.reads.left(handle)
            raise
        self._use.needed(node)
        keep = node.keep_cache
        node.keep_cache = True
        self._contents.retention.settle(node)
        if handle.writable:
            self._lane_use.attributes.foresee_fsync(node)
        return OpenFile(handle.number, keep, handle.lane, backing_fd)

    async def _open_new(self, node: Node, flags: int, caller: Caller) -> OpenFile:
        """Open a file that the call has made."""
        opening = self._handles.opening(caller)
        self._writers.begins(node, opening)
        try:
            opened = await self._opened(node, flags, caller, opening, wrote=True, created=True)
        except BaseException as error:
            self._writers.has_opened(node, opening)
            await self._closes.not_opened(node, opening, error)
            self._use.closed(node)
            raise
        self._writers.has_opened(node, opening)
        return opened

    def refuse_passthrough(self, number: HandleId) -> None:
        """The kernel would not take the file: the handle goes on in the daemon's lane."""
        handle = self._handles.handle(number)
        self._lane_use.refused(handle)
        self._handles.changed(handle)

    async def create(
        self, parent_ino: Ino, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[OpenFile, Node]:
        """Make and open a regular file; one that exists is opened, unless O_EXCL."""
        parent = self._names.node(parent_ino)
        again = self._created_before(caller.unique)
        if again is not None:
            return again
        hands_on = await self._view.handed_on(parent)
        # before the look: nothing may come between that and the birth of the name
        await self._names.check_own(parent, name)
        look = self._names.taken_by if flags & os.O_EXCL else self._view.child
        ino = await look(parent, name)
        if ino and not flags & os.O_EXCL:
            opened = await self.open(ino, flags, caller)
            node = self._names.node(ino)
        else:
            self._names.check_vacant(parent, name, ino)
            rights = stat.S_IFREG | stat.S_IMODE(mode)
            node = self._names.new_node(parent, rights, caller, hands_on)
            node.handles += 1
            node.writer_pid = caller.pid
            self._names.give_birth(parent, name, node)
            opened = await self._open_new(node, flags, caller)
        node.lookups += 1
        return opened, node

    async def tmpfile(
        self, parent_ino: Ino, mode: int, flags: int, caller: Caller
    ) -> tuple[OpenFile, Node]:
        """O_TMPFILE: a file without a name, until linkat gives it one."""
        parent = self._names.node(parent_ino)
        again = self._created_before(caller.unique)
        if again is not None:
            return again
        hands_on = await self._view.handed_on(parent)
        node = self._names.new_node(parent, stat.S_IFREG | stat.S_IMODE(mode), caller, hands_on)
        node.handles += 1
        self._contents.create(node)
        opened = await self._open_new(node, flags, caller)
        node.lookups += 1
        return opened, node

    def _created_before(self, unique: int) -> tuple[OpenFile, Node] | None:
        """The answer to a request that made and opened a file, which the last worker carried out
        and did not give.
        """
        handle = self._handles.made_before(unique)
        if handle is None:
            return None
        self._handles.answered(unique)
        node = handle.node
        node.lookups += 1
        fd = (
            self._contents.opened(node.body)
            if handle.lane is Lane.PASSTHROUGH and not node.body.is_cold
            else -1
        )
        return OpenFile(handle.number, keep_cache=False, lane=handle.lane, backing_fd=fd), node

    def _forget_unanswered(self, unique: int) -> None:
        """What the last worker opened for a request that comes again is opened anew: the kernel
        never learned that number.
        """
        handle = self._handles.opened_before(unique)
        if handle is not None and self._handles.take_out(handle.number) is not None:
            self._lane_use.leave(handle)
            self._handles.kept.forgotten(handle)
            self._handles.left(handle)
            self._view.notices.forgotten(handle.number)
            handle.node.handles -= 1
