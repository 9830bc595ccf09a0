"""What killed workers have left in the kernel: threads in system calls that have not returned, and
what each is about.

A call on the backing directory must not be overtaken by what this worker does there. One on a file
in RAM, which an application holds up, concerns that file alone; workers note those
(`ram.file_calls`).

Knows processes and descriptors; does not know who waits. One per start of a worker, in its thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from acpfs.supervisor import stuck_processes


class Remains:
    """Threads of killed workers that are in a call."""

    def __init__(self, stuck: Sequence[int]) -> None:
        """`stuck`: pidfds of such workers, which stay whose they are."""
        self._ends: dict[tuple[int, int], int] = {}
        """(process, thread) → descriptor, ours, that is readable when its call is over."""
        for pidfd in stuck:
            self._look(pidfd)

    def _look(self, pidfd: int) -> None:
        process = stuck_processes.number_of(pidfd)
        if process <= 0:
            return
        try:
            threads = stuck_processes.left_threads(process)
        except OSError:  # who knows what it does: all of it counts
            self._ends[process, 0] = os.dup(pidfd)
            return
        for thread in threads:
            end = stuck_processes.thread_end(thread)
            if end >= 0 or stuck_processes.has_thread(process, thread):
                self._ends[process, thread] = end if end >= 0 else os.dup(pidfd)

    def take(self, process: int, thread: int) -> int:
        """It is known what this one does: its descriptor, for the caller to close; -1: it is
        gone.
        """
        return self._ends.pop((process, thread), -1)

    def take_others(self) -> list[int]:
        """Descriptors of those of which it is not known: perhaps on the backing directory."""
        others = list(self._ends.values())
        self._ends.clear()
        return others


def wait_over(ends: Sequence[int]) -> None:
    """Wait, without a limit, until these calls have come back; closes the descriptors."""
    stuck_processes.wait_ended(ends)
    for end in ends:
        os.close(end)
