"""The table of open files: which there are, whose they are, and their records.

Gives out their numbers, which no worker of the session uses twice. Who of them is at a file,
`FileWriters` says; what becomes of what they wrote, `Closes`. Used under the file system's lock;
nothing here waits.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator

from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.durations import Durations
from acpfs.filesystem.file_writers import FileWriters, Opening
from acpfs.filesystem.kept_handles import Handle, KeptHandles
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.last_close import Openers
from acpfs.filesystem.loads import Loads
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import Caller, Lane
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import HandleId


class Handles:
    """Open files."""

    def __init__(
        self,
        upper: UpperLayer,
        contents: Contents,
        lanes: Lanes,
        kept: KeptHandles,
        openers: Openers,
        durations: Durations,
        loads: Loads,
    ) -> None:
        """`openers`: what is known of the processes that open files."""
        self._now = upper.runtime.clock.now
        self._table = upper.table
        self._contents = contents
        self._lanes = lanes
        self._openers = openers
        self._durations = durations
        self._loads = loads
        self.kept = kept
        self.changed = kept.changed
        self.writers = FileWriters(contents.kernel, openers)
        self._handles: dict[HandleId, Handle] = {}
        self._of_users: Counter[int] = Counter()
        """User → how many they have open."""
        self._last_number = kept.first_number
        self._unanswered: dict[int, Handle] = {}
        """Request → open file of the last worker that it opened; some of these requests come
        again.
        """

    def __iter__(self) -> Iterator[Handle]:
        return iter(list(self._handles.values()))

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, number: object) -> bool:
        return number in self._handles

    def handle(self, number: HandleId) -> Handle:
        """The open file of a number.

        Raises:
            OSError: EBADF when there is none.
        """
        handle = self._handles.get(number)
        if handle is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return handle

    def find(self, number: HandleId) -> Handle | None:
        """The open file of a number, if there is one."""
        return self._handles.get(number)

    def writes_to_storage(self, number: HandleId) -> bool:
        """Whether what is written through it goes to its staging file."""
        handle = self._handles.get(number)
        return handle is not None and handle.node.body.is_overflowed

    def files_of(self, uid: int) -> tuple[int, int]:
        """How many files a user has open, and all users together."""
        return self._of_users[uid], len(self._handles)

    def open_nodes(self) -> set[Node]:
        """Nodes that somebody has open."""
        return {handle.node for handle in self._handles.values()}

    def mapped_in_kernel(self) -> set[Node]:
        """Those whose tier file somebody may change through a mapping, beside others whom the
        kernel serves.
        """
        return {handle.node for handle in self._handles.values() if handle.unseen}

    def writers_of(self, node: Node) -> list[int]:
        """Processes that opened the file to write, as far as they are known."""
        writing = (one for one in self._handles.values() if one.node is node and one.writable)
        return sorted({one.process or one.pid for one in writing} - {0})

    def lane_of(self, node: Node) -> str:
        """How a file's bytes travel now, or would at the next open for reading."""
        if node.kernel_handles:
            return Lane.PASSTHROUGH.value
        return self._lanes.daemon_lane.value if node.handles else "-"

    def open_lanes(self) -> dict[str, int]:
        """Lane → open files that use it."""
        used = Counter(handle.lane.value for handle in self._handles.values())
        return {lane: used[lane] for lane in {*self._lanes.offered(), *used}}

    # -- from open to release

    def opening(self, caller: Caller) -> Opening:
        """An open begins."""
        return Opening(self._now(), caller.pid)

    def new(self, node: Node, flags: int, caller: Caller, opening: Opening) -> Handle:
        """One that has no lane yet, and is in no table."""
        self._last_number += 1
        is_reader = flags & os.O_ACCMODE == os.O_RDONLY
        handle = Handle(
            HandleId(self._last_number),
            node,
            flags,
            pid=caller.pid,
            process=0 if is_reader else self._openers.process_of(caller.pid),
            uid=caller.uid,
            unique=caller.unique,
        )
        handle.former_bytes = opening.size
        handle.opened_at = opening.at
        handle.place = opening.place
        if handle.writable and handle.may_map and not node.size and node.names:
            handle.begun_as = self._table.path(node.ino)
        return handle

    def add(self, handle: Handle) -> None:
        """It has its lane, and is open from now on.

        Raises:
            OSError: no page is left for its record; a file that the next worker would not know is
                not opened.
        """
        others = list(self.writers.of(handle.node)) if handle.writable else []
        handle.is_shared_or_synced |= bool(others)
        self.kept.opened(handle)
        for other in others:
            if not other.is_shared_or_synced:
                other.is_shared_or_synced = True
                self.changed(other)
        self._put(handle)

    def restored(self) -> Iterator[tuple[Handle, int]]:
        """Those of the session's last worker, which go on; see `KeptHandles.restore`."""
        for handle, first_seq in self.kept.restore(self._table):
            self._put(handle)
            if handle.unique:  # else it never comes again, and the next one without is another
                self._unanswered[handle.unique] = handle
            yield handle, first_seq

    def _put(self, handle: Handle) -> None:
        self._handles[handle.number] = handle
        self._count(handle, 1)

    def take_out(self, number: HandleId) -> Handle | None:
        """It is closed for good, or never was open to anybody; None: there is none of that number.

        It is one of those who may have written to its file until `left`.
        """
        handle = self._handles.pop(number, None)
        if handle is not None and self._unanswered:
            self._unanswered.pop(handle.unique, None)
        return handle

    def left(self, handle: Handle) -> None:
        """It is at its file no more."""
        self._count(handle, -1)

    def _count(self, handle: Handle, change: int) -> None:
        self._of_users[handle.uid] += change
        if not self._of_users[handle.uid]:
            del self._of_users[handle.uid]
        if handle.writable:
            self._contents.writers += change
            handle.node.open_writers += change
            if change > 0:
                self._contents.may_change(handle.node)
                self.writers.add(handle)
            else:
                self.writers.remove(handle)

    def was_read(self, handle: Handle) -> None:
        """Measure what was opened here to be read, and is closed now."""
        if handle.opened_at and not handle.writable:
            self._loads.closed(handle.node, handle.opened_at, handle.place)

    def was_saved(self, handle: Handle) -> None:
        """Measure what was opened here, and is closed for the first time."""
        if handle.opened_at and not handle.closed_at:
            self._durations.save.observe(self._now() - handle.opened_at)

    # -- requests that the last worker carried out, and did not answer

    def comes_again(self, unique: int) -> bool:
        """Whether the last worker opened something for that request, and did not answer it."""
        return unique in self._unanswered

    def made_before(self, unique: int) -> Handle | None:
        """What the last worker made and opened for that request."""
        handle = self._unanswered.get(unique)
        return handle if handle is not None and handle.created else None

    def opened_before(self, unique: int) -> Handle | None:
        """What it opened."""
        return self._unanswered.get(unique)

    def answered(self, unique: int) -> None:
        """The request has its answer now."""
        del self._unanswered[unique]
