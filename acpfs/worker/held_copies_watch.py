"""Looks after what this member holds for others: a session of which nobody speaks any more goes,
unless it is the one that counts, by the mark of its origin on the backing directory.

In a thread of its own, as the backing directory may hang.
"""

from __future__ import annotations

from acpfs.backing.lower import Lower
from acpfs.runtime.given import Runtime
from acpfs.writeback.copies.held_copies import HeldCopies
from acpfs.writeback.sources.mirror import read_mark

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

    def close(self) -> None:
        """The mount ends."""
        self._stopping.set()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            self._holding.delete_gone()
            is_over = self._stopping.wait(LOOK_S)
            for origin in () if is_over else self._holding.idle():
                self._look(origin)

    def _look(self, origin: str) -> None:
        try:
            mark = read_mark(self._lower, origin)
        except (OSError, ValueError):  # it cannot be told now, so nothing goes
            return
        session = None if mark is None else mark.get("session")
        self._holding.judge(origin, lambda token: token == session)
