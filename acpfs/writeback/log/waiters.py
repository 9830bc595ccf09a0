"""Who waits for operations to be persisted.

Part of the operation log; used under its lock. Outcomes are collected under the lock and delivered
outside of it, because a waiter's continuation may be a file system step that runs at once in the
delivering thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from acpfs.types import Ino, Seq


@dataclass(slots=True, eq=False)
class Waiter:
    """Waits for everything up to `seq`; with `node`, other members' parked operations do not
    matter.
    """

    seq: Seq
    node: Ino | None
    future: Future[None] = field(default_factory=Future)

    def deliver(self, error: int | None) -> None:
        """Complete the future; a cancelled one is left alone."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(OSError(error, os.strerror(error)))


Judge = Callable[[Waiter], "int | None"]
"""errno to fail with, 0 for done, None for not yet."""


class Waiters:
    """All waiters of a log."""

    def __init__(self) -> None:
        self._waiting: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiter: Waiter) -> None:
        """Not done yet."""
        self._waiting.append(waiter)

    def covers(self, seq: Seq) -> bool:
        """Whether anybody waits for the operation."""
        return any(waiter.seq >= seq for waiter in self._waiting)

    def inherit(self, seq: Seq, heir: Seq) -> None:
        """Operation `seq` will not be carried out, `heir` stands for it: whoever waits for the one,
        or for one between them, waits for the other.
        """
        for waiter in self._waiting:
            if seq <= waiter.seq < heir:
                waiter.seq = heir

    def collect(self, judge: Judge) -> list[tuple[Waiter, int]]:
        """Take out those for whom the answer is known."""
        known = []
        waiting = []
        for waiter in self._waiting:
            answer = judge(waiter)
            if answer is None:
                waiting.append(waiter)
            else:
                known.append((waiter, answer))
        self._waiting = waiting
        return known
