"""What an open file does to its node's lane: taking it at open, leaving it at close, and looking at
what the kernel wrote meanwhile.

Which lane it is, `lanes` decides; this module keeps the node's counts of who uses which, and has
versions out of the way before the kernel may write. Knows handles, contents and admission, not the
calls that open and close. Used under the file system's lock.
"""

from __future__ import annotations

import os

from acpfs.filesystem.admission import Admission
from acpfs.filesystem.attribute_calls import AttributeCalls
from acpfs.filesystem.close_states import CloseEvent
from acpfs.filesystem.content.contents import COPY_AT_FREEZE_BYTES_MAX, Contents
from acpfs.filesystem.content.unseen_room import Lengthening
from acpfs.filesystem.content.warming import Warming
from acpfs.filesystem.expectations import Use
from acpfs.filesystem.hold import Hold
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.lower_reads import came_to_ram
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.pages_ahead import PagesAhead
from acpfs.filesystem.records import Lane
from acpfs.types import TierId

MAPPING_GOES_ON_S = 60.0
"""Longer after its close a mapping is no part of a save: its file keeps its place in RAM."""


class LaneUse:
    """Takes and leaves lanes."""

    def __init__(
        self,
        lanes: Lanes,
        attributes: AttributeCalls,
        contents: Contents,
        admission: Admission,
        hold: Hold,
        view: LowerView,
        warming: Warming,
        ahead: PagesAhead,
    ) -> None:
        self._lanes = lanes
        self.attributes = attributes
        self._contents = contents
        self._admission = admission
        self._hold = hold
        self._view = view
        self.warming = warming
        self._ahead = ahead

    async def take(self, handle: Handle) -> int:
        """Decide the handle's lane; returns the descriptor for the kernel, -1 outside
        passthrough.
        """
        if handle.writable:
            self._ahead.give_back()
        try:
            handle.lane = await self._lane_for(handle)
            fd = self._descriptor(handle) if handle.lane is Lane.PASSTHROUGH else -1
        except BaseException:
            self._admission.left(handle)  # it may have been admitted
            raise
        if handle.lane is Lane.PASSTHROUGH:
            self._take_kernel(handle)
        else:
            if handle.writable:
                self._admission.left(handle)
            await self._take_daemon(handle)
        return fd

    async def _take_daemon(self, handle: Handle) -> None:
        node = handle.node
        if self._lanes.bind(handle):
            # from the first byte: a mapping is written to anywhere
            await self._contents.protect(node, 0)
            self._contents.kernel.expect(node)
            handle.unseen = True
            node.kernel_rewriters += 1
            self._admission.beside(handle)
        node.daemon_mappers += handle.may_map
        if not handle.bound:
            node.daemon_opened_at = self._lanes.now()

    def _take_kernel(self, handle: Handle) -> None:
        node = handle.node
        if handle.writable:
            self._ahead.take(handle)
            if handle.may_map:
                self._contents.kernel.expect_mappings(node)
            self._contents.kernel.expect(node)
            node.kernel_mappers += handle.maps_in_kernel
            node.kernel_rewriters += handle.rewrites_unseen
            self._hold.add(node)
        node.kernel_handles += 1
        node.kernel_target = node.body.tier if not node.body.is_cold else TierId(0)

    async def _lane_for(self, handle: Handle) -> Lane:
        node = handle.node
        if (
            handle.writable
            and not handle.flags & os.O_APPEND
            and self._contents.frozen_bytes(node) > COPY_AT_FREEZE_BYTES_MAX
        ):
            lane = (
                self._lanes.daemon_lane
            )  # bytes that versions need are copied aside only where they are really changed
        elif self._contents.earlier.may_write(node.body.tier):
            lane = self._lanes.daemon_lane
        else:
            lane = self._choose(handle)
        if lane is Lane.PASSTHROUGH and node.body.is_cold and not node.size and not node.in_kernel:
            lane = self._lanes.daemon_for(
                "empty"
            )  # in passthrough it would keep writers out (exception X7), for nothing
        if (
            lane is Lane.PASSTHROUGH
            and node.body.is_cold
            and (why := self.warming.through_daemon(node))
        ):
            lane = self._lanes.daemon_for(why)
            # As in the other lane it reads on in this file, whatever its name is by then.
            await self._own_descriptor(handle)
        if lane is Lane.PASSTHROUGH and node.body.is_cold:
            await self._own_descriptor(handle)
            # much may have happened meanwhile (S335): a writer may have brought the file up, or
            # opened it
            lane = self._choose(handle)
        if lane is Lane.PASSTHROUGH and handle.writable:
            start = node.size if handle.flags & os.O_APPEND else 0
            waits = node.body.busy is not None or self._contents.frozen_bytes(node) > start
            await self._contents.protect(node, start)
            if waits:
                lane = self._choose(
                    handle
                )  # again: its bytes may have moved out meanwhile, or somebody may have mapped it
        return lane

    async def _own_descriptor(self, handle: Handle) -> None:
        """On the backing directory's file, unless it is in RAM by then."""
        try:
            await self._view.reads.ready(handle)
        except OSError as error:
            if not came_to_ram(handle.node, error):
                raise

    def _descriptor(self, handle: Handle) -> int:
        """For the kernel.

        What may fail (no descriptors left) comes before anything is counted, and would not be
        counted back.
        """
        if not handle.node.body.is_cold:
            return self._contents.opened(handle.node.body)
        self.warming.watch(handle)
        return handle.lower_fd

    def _choose(self, handle: Handle) -> Lane:
        return self._lanes.choose(handle.node, handle.flags, lambda: self._refuse(handle))

    def _refuse(self, handle: Handle) -> str:
        """Why a writer may not have the passthrough lane: what outgrows RAM there is complete at
        its close, so no fsync is durable.
        """
        return (
            "fsync is durable here"
            if self.attributes.is_durable(handle.node)
            else self._admission.refuse(handle)
        )

    def refused(self, handle: Handle) -> None:
        """The kernel would not take the file: the handle goes on in the daemon's lane."""
        self.leave(handle)
        handle.lane = self._lanes.daemon_lane
        handle.bound = False
        handle.node.daemon_mappers += handle.may_map
        handle.node.daemon_opened_at = self._lanes.now()

    def leave(self, handle: Handle) -> None:
        """The handle is gone, or changes its lane."""
        node = handle.node
        if handle.lane is not Lane.PASSTHROUGH:
            node.daemon_mappers -= handle.may_map
            node.bound_handles -= handle.bound
        else:
            node.kernel_handles -= 1
            if not handle.writes_unseen:
                self._contents.read_in_kernel(node)
        if handle.writes_unseen:
            self.look(handle)
            self._contents.kernel.left(node)
            node.kernel_rewriters -= handle.rewrites_unseen
            node.kernel_mappers -= handle.maps_in_kernel
            self._admission.left(handle)
            if not node.kernel_writers:
                self._ahead.cut(node)
                self._contents.kernel_ended(node)
                self._hold.look_soon()
        self._contents.left_by_kernel(node)
        self.warming.released(node)

    def learn(self, handle: Handle) -> None:
        """It was closed: what its file took is what the next one like it will take."""
        self._admission.learn(handle.node)
        self.learn_use(handle)

    def learn_use(self, handle: Handle) -> None:
        """The same of whether it was read, or mapped."""
        if not handle.begun_as:
            return  # it is not one of those of which that is learnt
        if handle.maps_unseen and self._contents.kernel.may_be_mapped(handle.node):
            handle.only_written = False
        use = Use.ONLY_WRITTEN if handle.only_written else Use.READ_BACK
        if use is Use.READ_BACK and (handle.is_shared_or_synced or self._lives_on(handle)):
            use = Use.OTHER
        self._admission.learn_use(handle, use)

    def _lives_on(self, handle: Handle) -> bool:
        """Whether its mapping has gone on for long after the descriptor was closed."""
        return bool(handle.closed_at) and self._lanes.now() - handle.closed_at > MAPPING_GOES_ON_S

    async def lengthens(self, node: Node, length: Lengthening) -> None:
        """Reserve room for stores through a mapping, before the file becomes so long; waits for it
        as a write does. `resized` follows, whatever becomes of it.

        Raises:
            OSError: ENOSPC: there will be none.
        """
        if node.kernel_writers:
            self._contents.kernel.look(node)
            await self._admission.grow(node, length)

    def resized(self, node: Node, length: Lengthening | None) -> None:
        """The file has the length now that it is to have, or will not have it: what was reserved
        for more goes.
        """
        self._admission.trim(node, length)

    def restored(self, handle: Handle) -> None:
        """The handle was opened with an earlier worker, and goes on."""
        node = handle.node
        if handle.lane is not Lane.PASSTHROUGH:
            node.daemon_mappers += handle.may_map
            node.bound_handles += handle.bound
        else:
            node.kernel_handles += 1
        if handle.writes_unseen:
            node.kernel_rewriters += handle.rewrites_unseen
            node.kernel_mappers += handle.maps_in_kernel
            self._contents.kernel.restored(node)  # before: how long the file is
            self._admission.restored(handle)
            self._hold.add(node)

    def look(self, handle: Handle) -> None:
        """Whether the kernel wrote for this handle; of a mapping it does not tell, so that is
        assumed.
        """
        self._contents.kernel.look(handle.node)
        if handle.maps_unseen and self._contents.kernel.may_be_mapped(handle.node):
            handle.unseen = True
        # a stat meanwhile may have looked before: then the content is modified, by whichever handle
        if handle.unseen or handle.node.body.modified:
            handle.take(CloseEvent.WROTE)
        if handle.unseen:
            self._contents.kernel.assume_changed(handle.node)
