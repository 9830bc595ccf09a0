"""Processes of a history, and what /proc would tell of them: who has which file open, and how a
process comes to close.

Outlives the lives of the daemon. Knows neither files nor calls. As in the kernel, a descriptor is
gone from the table before the daemon hears of its close, and all of a process that ends are gone at
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from acpfs.filesystem.closing import Closing
from acpfs.filesystem.last_close import Close, Copies, Left, Openers
from acpfs.types import HandleId, Ino
from tests.rig.runtime import REAL

FIRST_PID = 1000
THREADS_MAX = 10
"""Numbers of one process and its other threads; the next one has its own behind them."""


@dataclass(eq=False)
class Description:
    """An open file of the kernel, to which several descriptors may lead (dup, fork)."""

    ino: Ino
    handle: HandleId
    opener: int
    """The process that opened it."""


@dataclass(eq=False)
class Process:
    """One process; each entry in `files` is a descriptor that can write."""

    pid: int
    stack: int
    """Where its stack begins: the same after a fork, another one after an exec."""
    closing: Closing = Closing.CALL
    """How it closes what it closes now."""
    files: list[Description] = field(default_factory=list)


class ProcessTable:
    """All that live, and those that end and have not closed all yet."""

    def __init__(self) -> None:
        self.living: dict[int, Process] = {}
        self._last = FIRST_PID
        self._stacks = 0

    def start(self) -> Process:
        """One that has nothing open."""
        self._last += THREADS_MAX
        self._stacks += 1
        process = Process(self._last, self._stacks)
        self.living[process.pid] = process
        return process

    def fork(self, parent: Process) -> Process:
        """A child, with a copy of each descriptor."""
        child = self.start()
        child.stack = parent.stack
        child.files = list(parent.files)
        return child

    def exec(self, process: Process) -> None:
        """It becomes another program."""
        self._stacks += 1
        process.stack = self._stacks

    def gone(self, process: Process) -> None:
        """It has ended, and closed all that it had."""
        del self.living[process.pid]

    def process_of(self, thread: int) -> int:
        """Of a thread's number; others than ours are their own processes."""
        pid = thread - (thread - FIRST_PID) % THREADS_MAX
        return pid if pid in self.living else thread * (thread < FIRST_PID)

    def closing(self, thread: int) -> Closing:
        """How it closes what it closes now."""
        process = self.living.get(self.process_of(thread))
        return Closing.CALL if process is None else process.closing

    def has(self, pid: int, description: Description) -> bool:
        """Whether a process has a descriptor of it."""
        process = self.living.get(pid)
        return process is not None and description in process.files

    def is_held(self, description: Description) -> bool:
        """Whether anybody has one."""
        return any(description in process.files for process in self.living.values())


class SeenProcesses(Openers):
    """What the daemon learns of them; what follows from that is its own business."""

    def __init__(self, table: ProcessTable, counts: Counter[str]) -> None:
        """`counts`: which answers were given."""
        super().__init__("", REAL.threads)
        self._table = table
        self._counts = counts

    def process_of(self, thread: int) -> int:
        return self._table.process_of(thread)

    def counts(self, close: Close) -> bool:
        answer = super().counts(close)
        self._counts[f"closes that {'count' if answer else 'do not count'}"] += 1
        return answer

    def left(self, process: int, ino: Ino) -> Left:
        found = self._table.living.get(process)
        if found is None:
            return Left.GONE
        return Left.SOME if any(one.ino == ino for one in found.files) else Left.NONE

    def has_any_but(self, processes: Collection[int], ino: Ino) -> bool:
        others = (one for pid, one in self._table.living.items() if pid not in processes)
        return any(file.ino == ino for one in others for file in one.files)

    def _copies(self, process: int, ino: Ino) -> Copies:
        opener = self._table.living.get(process)
        found = Copies.NONE_SEEN
        for other in self._table.living.values():
            if other is opener or all(one.ino != ino for one in other.files):
                continue
            if opener is None or other.stack != opener.stack:
                return Copies.PROGRAM
            found = Copies.BY_CHANCE
        return found
