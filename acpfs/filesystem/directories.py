"""Open directories: opendir, readdir, releasedir.

An open directory is a snapshot of its names, taken at the first readdir and again at a rewind; an
offset is a position in it. So no entry is reported twice or skipped, whatever is made and removed
meanwhile; entries removed since are left out.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from acpfs.filesystem.attribute_calls import AttributeCalls
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.names import Names, fail
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.records import DirEntry
from acpfs.ram.kept import Kept
from acpfs.types import HandleId, Ino

ENTRIES_PER_CALL = 256
"""More than fit into the kernel's buffer would be looked up in vain."""
Fitting = Callable[[Sequence[bytes]], int]
"""How many of these names there is room for."""
FIRST_NAME_OFFSET = 2
"""Offsets 0 and 1 are `.` and `..`."""


@dataclass(slots=True, eq=False)
class OpenDirectory:
    """One open directory."""

    node: Node
    slot: int
    """Its record in `ram.kept`."""
    unique: int = 0
    """Of the request that opened it."""
    names: list[bytes] | None = None


class Directories:
    """Calls on open directories."""

    def __init__(
        self,
        table: NodeTable,
        names: Names,
        attributes: AttributeCalls,
        view: LowerView,
        kept: Kept,
    ) -> None:
        self._table = table
        self._names = names
        self._attributes = attributes
        self._view = view
        self._kept = kept
        self._handles: dict[HandleId, OpenDirectory] = {}
        self._last_handle = kept.first_number
        self._unanswered: dict[int, HandleId] = {}
        """Request → directory that it opened with the last worker; some of these requests come
        again.
        """

    def restore(self) -> None:
        """Open directories of the session's last worker go on where they were."""
        for slot, (number, unique, ino) in self._kept.directories:
            node = self._table.get(Ino(ino))
            if node is None or not node.is_dir:
                self._kept.directories.free(slot)
                continue
            node.handles += 1
            self._handles[HandleId(number)] = OpenDirectory(
                node, slot, unique, self._kept.read_listing(number)
            )
            if unique:  # else it never comes again, and the next one without is another
                self._unanswered[unique] = HandleId(number)

    def opendir(self, ino: Ino, unique: int = 0) -> HandleId:
        """Open a directory; `unique`: as `Caller.unique`."""
        if unique in self._unanswered:
            return self._unanswered.pop(unique)
        node = self._names.node(ino)
        number = HandleId(self._last_handle + 1)
        slot = self._kept.directories.add(number, unique, ino)  # fails where no page is left for it
        self._last_handle += 1
        node.handles += 1
        self._handles[number] = OpenDirectory(node, slot, unique)
        return number

    def releasedir(self, number: HandleId) -> None:
        opened = self._handles.pop(number, None)
        if opened is not None:
            self._unanswered.pop(opened.unique, None)
            self._kept.directories.free(opened.slot)
            if opened.names is not None:
                self._kept.remove_listing(number)
            opened.node.handles -= 1
            self._view.reap(opened.node)

    def node(self, number: HandleId) -> Node:
        """The directory of a handle, or EBADF."""
        opened = self._handles.get(number)
        if opened is None:
            raise fail(errno.EBADF)
        return opened.node

    async def readdir(
        self,
        number: HandleId,
        offset: int,
        *,
        with_attributes: bool,
        without_fails: bool = False,
        fitting: Fitting = len,
    ) -> list[DirEntry]:
        """At most `ENTRIES_PER_CALL` entries from `offset` on; [] at the end.

        As `FileSystem.readdir`.
        """
        opened = self._handles.get(number)
        if opened is None:
            raise fail(errno.EBADF)
        if opened.names is None or offset == 0:
            opened.names = sorted(await self._view.names(opened.node))
            self._kept.write_listing(number, opened.names)
        entries = self._dots(opened.node, offset)
        position = max(offset, FIRST_NAME_OFFSET)
        following = opened.names[
            position - FIRST_NAME_OFFSET : position
            - FIRST_NAME_OFFSET
            + ENTRIES_PER_CALL
            - len(entries)
        ]
        count = max(1, fitting([*(dot.name for dot in entries), *following]))
        while len(entries) < count and position - FIRST_NAME_OFFSET < len(opened.names):
            start = position - FIRST_NAME_OFFSET
            chunk = opened.names[start : start + count - len(entries)]
            position += len(chunk)
            if with_attributes:
                await self._view.fill(opened.node, chunk, whole=without_fails)
            entries += self._entries(
                opened.node, chunk, position - len(chunk), with_attributes=with_attributes
            )
        return entries

    def _dots(self, node: Node, offset: int) -> list[DirEntry]:
        above = node.names[0][0] if node.names else node.ino
        dots = [
            DirEntry(b".", node.ino, node.mode, 1, None),
            DirEntry(b"..", above, node.mode, 2, None),
        ]
        return dots[offset:] if offset < FIRST_NAME_OFFSET else []

    def _entries(
        self, parent: Node, names: list[bytes], position: int, *, with_attributes: bool
    ) -> list[DirEntry]:
        entries = []
        for number, name in enumerate(names, position + 1):
            entry = self._entry(parent, name, number, with_attributes=with_attributes)
            if entry is not None:
                entries.append(entry)
        return entries

    def _entry(
        self, parent: Node, name: bytes, next_offset: int, *, with_attributes: bool
    ) -> DirEntry | None:
        child = parent.dir.children.get(name)
        if child is not None and (child.ino or child.pins or with_attributes):
            if not child.ino:
                return None
            node = self._table[child.ino]
            if with_attributes:
                node.lookups += 1
            return DirEntry(
                name,
                node.ino,
                node.mode,
                next_offset,
                self._attributes.of(node) if with_attributes else None,
            )
        listed = self._view.listed_entry(parent, name)
        return (
            None
            if listed is None
            else DirEntry(name, Ino(listed.ino % (1 << 64)), listed.mode, next_offset, None)
        )
