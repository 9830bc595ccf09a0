"""What the tier files of files that the kernel may write to looked like when they were last looked
at: rows in the state database.

Owns the rows; what a mark is and what a difference means is `kernel_writes`' business. A row is
there as long as somebody may write unseen, so a worker that finds one knows that its file may hold
more than its node says. Used under the file system's lock; rows are written at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from acpfs.filesystem.content.body import UNSEEN
from acpfs.ram.state import StateDatabase
from acpfs.types import Ino

DDL = "CREATE TABLE IF NOT EXISTS mark (ino INTEGER PRIMARY KEY, mtime_ns INTEGER, size INTEGER)"


class Marks:
    """Node → (mtime in ns, size) that its tier file was marked with; `UNSEEN`: it was not."""

    def __init__(self, state: StateDatabase) -> None:
        """Load what the last worker left."""
        self._state = state
        self._changed: dict[Ino, None] = {}
        state.create(DDL)
        self._marks = {
            Ino(ino): (int(mtime_ns), size)
            for ino, mtime_ns, size in state.rows("SELECT ino, mtime_ns, size FROM mark")
        }
        state.before_commit(self._changed, self._flush_rows)

    def __contains__(self, ino: Ino) -> bool:
        return ino in self._marks

    def __iter__(self) -> Iterator[Ino]:
        return iter(self._marks)

    def get(self, ino: Ino) -> tuple[int, int] | None:
        """The mark of the node's tier file; None: nobody writes to it unseen."""
        return self._marks.get(ino)

    def set(self, ino: Ino, mark: tuple[int, int] = UNSEEN) -> None:
        """Somebody may write to the file unseen."""
        if self._marks.get(ino) != mark:
            self._marks[ino] = mark
            self._changed[ino] = None

    def forget(self, ino: Ino) -> None:
        """Nobody does any more."""
        if self._marks.pop(ino, None) is not None:
            self._changed[ino] = None

    def _flush_rows(self) -> None:
        for ino in self._changed:
            mark = self._marks.get(ino)
            if mark is None:
                self._state.change("DELETE FROM mark WHERE ino = ?", (ino,))
            else:
                self._state.change("INSERT OR REPLACE INTO mark VALUES (?, ?, ?)", (ino, *mark))
        self._changed.clear()
