"""Pages of a file that is about to be written, taken at its open: all it is expected to need, and
as large as they come.

Linux gives a tmpfs file that grows pages as large as the write. What is written in small pieces
would so be mapped in small pages for as long as it is in RAM. Pages that are allocated beyond the
end of a file are large whatever is written, and its size does not show them: so a writer that is
killed, and a daemon that is, leave a file that is as long as what was written. What was not needed
goes when the last writer in the passthrough lane has gone and no other write is under way. Nothing
is taken that others may need: a file must be expected, RAM plentiful beside it, and who pays for
the pages the same as if its writer had made them. Used under the file system's lock.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Protocol

from acpfs.backing.calls import CallPool
from acpfs.filesystem.admission import Admission
from acpfs.filesystem.content.body import UNSEEN, Body
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.nodes import Node
from acpfs.ram.tier import (
    BLOCK_BYTES,
    FALLOC_KEEP_SIZE,
    HUGE_PAGE_BYTES,
    Tier,
    fallocate,
    punch_hole,
)
from acpfs.types import TierId

BYTES_MIN = 2 * HUGE_PAGE_BYTES
"""Smaller files have few pages anyway."""
PIECE_BYTES = 64 << 20
"""Taken or given back at a time under the lock: 0.2 ms, or 15 where memory is in small pieces.

The first at the open or close.
"""
HOLES_MAX = 256
"""So many holes are given back; what has more is made of small pieces, and large pages in it are
few.
"""


@dataclass(slots=True)
class _Taken:
    """What is taken for a tier file, and how much of it is given back already."""

    size: int
    end: int
    """Where it ends; what lies beyond the end of the file goes from here downwards."""
    at: int = 0
    """Then holes in it, from here upwards."""
    holes: int = 0

    def again(self) -> None:
        """Somebody may have written, or punched holes, where it was looked at."""
        self.at = 0
        self.holes = 0


class ReadyMemory(Protocol):
    """Memory that was made ready for writers."""

    def give_back(self) -> None:
        """A file is about to be opened for writing, under the lock."""

    def hand_over(self, size: int, waits: bool) -> None:
        """Before so many bytes are taken: that much comes free for them; `waits`: even if that has
        to wait.
        """


class NoReadyMemory:
    """None was made ready."""

    def give_back(self) -> None:
        """See `ReadyMemory`."""

    def hand_over(self, size: int, waits: bool) -> None:
        """See `ReadyMemory`."""


class PagesAhead:
    """Takes pages for writers in the passthrough lane, and gives back what they did not need."""

    def __init__(
        self,
        tier: Tier,
        contents: Contents,
        admission: Admission,
        threads: CallPool,
        lock: RLock,
        ready: ReadyMemory,
    ) -> None:
        """`threads`: where all but the first piece is taken."""
        self._tier = tier
        self._contents = contents
        self._admission = admission
        self._threads = threads
        self._lock = lock
        self._taken: dict[TierId, _Taken] = {}
        self._ready = ready

    def give_back(self) -> None:
        """Somebody is about to write: memory that was made ready comes back."""
        self._ready.give_back()

    def take(self, handle: Handle) -> None:
        """Take pages for a writer that was promised room, and is the first."""
        node = handle.node
        body = node.body
        if (
            not body.is_whole_in_ram
            or node.size
            or node.kernel_writers
            or body.in_flight
            or not self._tier.large_pages
        ):
            return
        if self._tier.allocated_bytes(body.tier):
            return
        size = self._admission.sure_bytes(handle) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if size < BYTES_MIN:
            return
        for gone in [tier_id for tier_id in self._taken if not self._tier.allocated_bytes(tier_id)]:
            del self._taken[
                gone
            ]  # its bytes were replaced, and its end is nobody's business any more
        self._taken[body.tier] = _Taken(size, 0)
        fd = self._contents.opened(body)
        st = os.fstat(fd)
        first = min(size, PIECE_BYTES)
        self._ready.hand_over(first, False)
        taken = self._take(body, 0, first)
        os.utime(fd, ns=(st.st_atime_ns, st.st_mtime_ns))  # nobody has written
        if taken and first < size:
            self._take_next(node, body, first, size)

    def _take(self, body: Body, start: int, size: int) -> bool:
        """One piece; with less than all of them the writer goes on as it would with none."""
        if not self._has_room(size):
            return False
        try:
            fallocate(self._contents.opened(body), FALLOC_KEEP_SIZE, start, size)
            self._taken[body.tier].end = start + size
            body.ahead_to = start + size
        except OSError:
            return False
        finally:
            self._tier.settle_fd(body.tier, self._contents.opened(body))
        return True

    def _has_room(self, size: int) -> bool:
        """A tmpfs that is full for a moment fails others."""
        return self._tier.free_bytes() >= size and self._tier.space_left_bytes() >= 2 * size

    def _take_next(self, node: Node, body: Body, start: int, size: int) -> None:
        """While the file is written, so in its own thread, which has to wait for the writer.

        Piece by piece: what somebody else wants of the same file gets in between.
        """
        if start < size:
            self._tier.calls.submit(body.tier, self._take_piece, node, body, start, size)

    def _take_piece(self, node: Node, body: Body, start: int, size: int) -> None:
        """The file's mtime becomes that of now, so only until somebody goes by that.

        Whoever marks the file does so in the same thread, but for calls for which the kernel holds
        back writers: one of those in this moment costs that the same bytes are stored twice.
        """
        piece = min(PIECE_BYTES, size - start)
        self._ready.hand_over(piece, True)
        with self._lock:
            if not self._goes_on(node, body) or not self._has_room(piece):
                return
            fd = os.dup(self._contents.opened(body))
            # Its bytes stay in RAM meanwhile: where one is gone that stands behind its writer by
            # the time that the kernel allocates, zeros would take its place.
            body.keep_open()
        try:
            fallocate(fd, FALLOC_KEEP_SIZE, start, piece)
        except OSError:
            return
        finally:
            self._taken_piece(node, body, start + piece, fd)
        self._take_next(node, body, start + piece, size)

    def _goes_on(self, node: Node, body: Body) -> bool:
        return (
            node.body is body
            and body.is_whole_in_ram
            and node.kernel_writers > 0
            and body.tier in self._taken
            and body.seen == UNSEEN
            and not body.marking
            and not body.reserved
        )

    def _taken_piece(self, node: Node, body: Body, end: int, fd: int) -> None:
        """The writer may have gone meanwhile: then what came too late goes at once."""
        with self._lock:
            if node.body is body:
                self._tier.settle_fd(body.tier, fd)
            os.close(fd)
            body.let_go()
            if node.body is body and body.is_whole_in_ram:
                taken = self._taken.setdefault(body.tier, _Taken(end, end))
                taken.end = max(taken.end, end)
                body.ahead_to = 0 if body.reserved else max(body.ahead_to, end)
                if not node.kernel_writers:
                    self.cut(node)

    def found(self, node: Node) -> None:
        """An earlier worker had the file, and may have taken pages for it."""
        body = node.body
        if body.is_whole_in_ram and self._tier.allocated_bytes(body.tier) > _whole_pages(node.size):
            end = self._tier.allocated_bytes(body.tier) + _whole_pages(node.size)
            self._taken[body.tier] = _Taken(end, end)
            self.cut(node)

    def cut(self, node: Node) -> None:
        """Give back what was not written, unless somebody may still write it unseen.

        The file looks as before, its times too.
        """
        body = node.body
        if body.is_cold or body.tier not in self._taken:
            return
        self._taken[body.tier].again()
        if not self._cut(node, body):
            self._threads.submit("pages", self._cut_rest, node, body)

    def _cut_rest(self, node: Node, body: Body) -> None:
        while True:
            with self._lock:
                if self._cut(node, body):
                    return

    def _cut(self, node: Node, body: Body) -> bool:
        """A piece; whether there is none left, or none that may go now."""
        taken = self._taken.get(body.tier)
        if (
            taken is None or node.body is not body or node.kernel_writers
        ):  # the last one of those will cut
            return True
        if body.in_flight:  # a write without the lock may be on its way to where nothing is yet
            body.call_when_idle(partial(self.cut, node))
            return True
        if body.is_whole_in_ram and not body.reserved and self._give_back(node, body, taken):
            return False
        del self._taken[body.tier]
        if node.blocks * BLOCK_BYTES < taken.size // 2:
            self._admission.unsure(node)
        self._tier.room_changed()
        return True

    def _give_back(self, node: Node, body: Body, taken: _Taken) -> bool:
        """Whether there may be more."""
        assert not self._tier.calls.is_handed_over(body.tier), node.ino
        was_open = body.fd >= 0 and not body.closing
        fd = self._contents.opened(body)
        st = os.fstat(fd)
        self._tier.look_full()
        bytes_left = PIECE_BYTES
        piece = 1
        while piece and bytes_left > 0:
            piece = _punch_end(fd, st.st_size, taken, bytes_left) or _punch_hole(
                fd, st.st_size, taken, bytes_left
            )
            bytes_left -= piece
        os.utime(fd, ns=(st.st_atime_ns, st.st_mtime_ns))
        node.blocks = self._tier.settle_fd(body.tier, fd).st_blocks
        if not was_open:
            body.close()
        return piece > 0


def _whole_pages(size: int) -> int:
    return -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _punch_end(fd: int, size: int, taken: _Taken, bytes_max: int) -> int:
    """What lies beyond the end of the file, or a part of it; how many bytes."""
    start = max(_whole_pages(size), taken.end - bytes_max)
    piece = max(0, taken.end - start)
    if piece:
        punch_hole(fd, start, piece)
        taken.end = start
    return piece


def _punch_hole(fd: int, size: int, taken: _Taken, bytes_max: int) -> int:
    """What nobody wrote between two pieces that were written, or a part of it; how many bytes."""
    with suppress(OSError):  # ENXIO: nothing behind it
        start = os.lseek(fd, taken.at, os.SEEK_HOLE)
        if start >= size or taken.holes >= HOLES_MAX:
            return 0
        end = size
        with suppress(OSError):  # ENXIO: it is the last one
            end = os.lseek(fd, start, os.SEEK_DATA)
        taken.at = min(end, start + bytes_max)
        taken.holes += taken.at == end
        punch_hole(fd, start, taken.at - start)
        return taken.at - start
    return 0
