"""Looks after what this member holds for others: deletes what is not needed any more, when that is
said; and a session of which nobody speaks any more goes, unless it is the one that counts, by the
mark of its origin on the backing directory.

In threads of its own, as a tmpfs takes its time for large files, and the backing directory may
hang: a mark that cannot be read keeps no RAM.
"""

from __future__ import annotations

from acpfs.backing.lower import Lower
from acpfs.runtime.given import Runtime
from acpfs.writeback.copies.held_copies import HeldCopies
from acpfs.writeback.copies.journal_marks import read_mark

LOOK_S = 10.0


class HeldCopiesWatch:
    """Of one worker."""

    def __init__(self, holding: HeldCopies, lower: Lower, runtime: Runtime) -> None:
        self._holding = holding
        self._lower = lower
        self._threads = runtime.threads
        self._stopping = runtime.threads.event()

    def begin(self) -> None:
        """Look from now on."""
        self._threads.start("held copies", self._run)
        self._threads.start("what was held", self._delete)

    def close(self) -> None:
        """The mount ends."""
        self._stopping.set()
        self._holding.bell.set()

    def _delete(self) -> None:
        while not self._stopping.is_set():
            self._holding.bell.clear()  # first: what is said from here on rings again
            self._holding.delete_gone()
            self._holding.bell.wait()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            for origin in self._holding.idle():
                self._look(origin)

    def _look(self, origin: str) -> None:
        try:
            mark = read_mark(self._lower, origin)
        except (OSError, ValueError):  # it cannot be told now, so nothing goes
            return
        session = None if mark is None else mark.get("session")
        self._holding.judge(origin, lambda token: token == session)
