"""Who has a file open to write, and who of them is not done with it.

Several programs may have one file open at once, each with a region of its own. When one of them
closes the file, what the others have written so far may be half of what is to come: then nothing of
it is published before they have closed it, too (S468). Whose writes the daemon sees is at it from
its first write on, and no sooner: who keeps a file open and writes nothing holds up nobody (S469).

Knows handles and what the kernel wrote; what is done about it is `OpenFiles`' business. Used under
the file system's lock; nothing here waits.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from dataclasses import dataclass

from acpfs.filesystem.close_states import CloseState
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.kernel_writes import KernelWrites
from acpfs.filesystem.last_close import Openers
from acpfs.filesystem.nodes import Node
from acpfs.types import Ino


@dataclass(slots=True, eq=False)
class Opening:
    """An open that is under way, and what held when it began."""

    at: float
    """Monotonic time, seconds."""
    pid: int
    """The thread that opens; 0: not known."""
    size: int = -1
    """Of the file; -1: it is made."""
    place: str = ""
    """Where its bytes were, which opening it may change."""
    was_modified: bool = False
    """Before it took any, somebody had written to it what is in no version."""
    found_half: bool = False
    """The file was a half then, or became one meanwhile by somebody else: that is not for this open
    to end, but by succeeding.
    """
    has_truncated: bool = False
    """It has taken bytes from the file, or those that a half had left: the file is a half from then
    until this has its handle.
    """


class FileWriters:
    """Open files that may be written to, by their nodes."""

    def __init__(self, kernel: KernelWrites, openers: Openers) -> None:
        """`openers`: knows the process of a thread."""
        self._kernel = kernel
        self._openers = openers
        self._by_node: defaultdict[Ino, list[Handle]] = defaultdict(list)
        self._opening: defaultdict[Ino, list[Opening]] = defaultdict(list)
        """Those that make the file or truncate it."""

    def add(self, handle: Handle) -> None:
        """It may write from now on."""
        self._by_node[handle.node.ino].append(handle)

    def remove(self, handle: Handle) -> None:
        """It is gone."""
        ino = handle.node.ino
        self._by_node[ino].remove(handle)
        if not self._by_node[ino]:
            del self._by_node[ino]

    def begins(self, node: Node, opening: Opening) -> None:
        """An open that makes the file or truncates it is at it from before that on: it is about to
        write.

        Whoever calls this says `has_opened`, and where the open failed, sees to those who waited
        for it.
        """
        self._opening[node.ino].append(opening)

    def has_opened(self, node: Node, opening: Opening) -> None:
        """That open has ended: its handle is at the file now, or nobody is."""
        self._opening[node.ino].remove(opening)
        if not self._opening[node.ino]:
            del self._opening[node.ino]

    def is_opening(self, node: Node) -> bool:
        """Whether an open that makes or truncates the file is under way."""
        return node.ino in self._opening

    def opening(self, node: Node) -> list[Opening]:
        """Such opens."""
        return list(self._opening.get(node.ino, ()))

    def of(self, node: Node) -> list[Handle]:
        """All of a file."""
        return list(self._by_node.get(node.ino, ()))

    def beside(self, handle: Handle) -> list[Handle]:
        """The others of its file."""
        return [one for one in self._by_node.get(handle.node.ino, ()) if one is not handle]

    def is_anybody_at_it(self, node: Node) -> bool:
        """Whether somebody is not done with the file; also one who is about to open it, and has
        truncated it.
        """
        return node.ino in self._opening or any(map(self.is_at_it, self.of(node)))

    def is_another_at_it(self, node: Node, pid: int) -> bool:
        """Whether somebody is at it who is known to be another process than that of the thread
        `pid`.
        """
        opening = self._opening.get(node.ino, ())
        if not pid or not (node.open_writers or opening):
            return False
        process = self._openers.process_of(pid)
        if not process:
            return False
        if any(self._openers.process_of(one.pid) not in (0, process) for one in opening):
            return True
        others = (one for one in self.of(node) if self.is_of_another(one, process))
        return any(one.state is CloseState.WAITING or self.is_at_it(one) for one in others)

    @staticmethod
    def is_of_another(handle: Handle, process: int) -> bool:
        """Whether somebody else is known to write through it, be it who opened it or one that has a
        copy.
        """
        if handle.wrote_by:
            return handle.wrote_by != {process}
        return handle.process not in (0, process)

    def has_anybody_written(self, node: Node) -> bool:
        """Whether somebody who has the file open is at it, of those alone whose writes are seen."""
        return any(one.wrote or one.changing for one in self.of(node))

    def at_it(self, node: Node) -> list[int]:
        """Processes of those who are at it, as far as they are known."""
        handles = (one.process or one.pid for one in self.of(node) if self.is_at_it(one))
        opening = (self._openers.process_of(one.pid) or one.pid for one in self.opening(node))
        return sorted({*handles, *opening} - {0})

    def is_anybody_writing(self, node: Node) -> bool:
        """Whether somebody who has the file open is at it, but for those who have closed it, of
        whom it is only not known whether that was a copy.
        """
        return any(
            one.wrote or one.changing or (one.store is None and self.is_at_it(one))
            for one in self.of(node)
        )

    def is_at_it(self, handle: Handle) -> bool:
        """Whether it has written something, or may have, and was not closed since.

        So has one of which a close was heard that may be that of a copy, and of which a version is
        in doubt for that: which it was is soon known, and a second version cannot be in doubt for
        the first one's writer.
        """
        if handle.wrote or handle.changing:
            return True
        if handle.store is not None:
            return handle.store.tentative
        return handle.state is CloseState.CLEAN and self.may_have_written(handle)

    def is_version_in_doubt(self, node: Node) -> bool:
        """Whether the last version may have to be withdrawn, as the close that made it may have
        been that of a copy.
        """
        return any(one.is_in_doubt for one in self.of(node))

    def may_have_written(self, handle: Handle) -> bool:
        """Whether the kernel may have written for it what is in no version; it does not tell for
        whom it writes.
        """
        node = handle.node
        if handle.writes_unseen and not node.body.modified:
            self._kernel.look(node)  # also without a trace: it may be mapped
        return handle.writes_unseen and node.body.modified

    def mapped_beside(self, handle: Handle, offset: int, size: int) -> list[Handle]:
        """Who else may have written through a mapping what came through `handle`.

        The kernel sends what was written through a mapping by way of any descriptor that was
        mapped, in whole pages, but for the last one of the file.
        """
        end = offset + size
        if not handle.may_map or offset % mmap.PAGESIZE or end > handle.node.size:
            return []
        if end % mmap.PAGESIZE and end != handle.node.size:
            return []
        return [one for one in self.beside(handle) if one.may_map]
