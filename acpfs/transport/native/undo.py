"""Giving back what the kernel does not hold (any more): references of nodes, open files.

Used for FORGET, for directory entries that did not fit into a reply, and for replies that nobody
waited for. None of them waits. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import Attributes, DirEntry, OpenFile
from acpfs.transport.native.kernel_lanes import KernelLanes
from acpfs.transport.native.references import References
from acpfs.types import HandleId, Ino


class Undo:
    """The counterparts of lookup, open and opendir."""

    def __init__(self, fs: FileSystem, lanes: KernelLanes, references: References) -> None:
        self._fs = fs
        self._lanes = lanes
        self._references = references

    def references(self, counts: Sequence[tuple[int, int]]) -> None:
        """Give kernel references back: (node, how many)."""
        self._references.taken_back(counts)
        self._fs.forget([(Ino(ino), count) for ino, count in counts])

    def entries(self, entries: Iterable[DirEntry]) -> None:
        """Entries of readdirplus that had no room in the reply; those without attributes carry no
        reference.
        """
        self._fs.forget([(entry.ino, 1) for entry in entries if entry.attributes is not None])

    def entry(self, attributes: Attributes) -> None:
        """A LOOKUP, or the like, whose reply was not taken."""
        self.references([(attributes.ino, 1)])

    def opened(self, file: OpenFile) -> None:
        """An OPEN whose reply was not taken."""
        self._lanes.released(file.handle)
        self._fs.steps.run(self._fs.release(file.handle))

    def opened_directory(self, handle: HandleId) -> None:
        """An OPENDIR whose reply was not taken."""
        self._fs.steps.run(self._fs.releasedir(handle))

    def created(self, value: tuple[OpenFile, Attributes]) -> None:
        """A CREATE whose reply was not taken; the file stays, as after an interrupted open(2)."""
        self.opened(value[0])
        self.entry(value[1])
