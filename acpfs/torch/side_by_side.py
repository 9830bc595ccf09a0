"""Carries out many pieces of work by several threads, the caller's among them.

The threads are made for one call and are gone behind it: a fork has none to miss, and a process
that ends has none to wait for. Where no thread can be started there are fewer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

THREADS_MAX = 4
"""The kernel lets one write at a time to a file: more threads would not write faster."""
LOOK_AGAIN_S = 0.0005
"""So often it is looked whether all threads have ended; a piece takes about as long."""


def usable_threads() -> int:
    """How many make sense here."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0))))


class _Pieces:
    """What is left to do, for all threads."""

    def __init__(self, pieces: Iterable[int]) -> None:
        self._pieces = iter(pieces)
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self.is_over = False
        """Nobody begins another one."""

    def take(self) -> int | None:
        """The next piece; None: no more, for there is none or one has failed."""
        with self._lock:
            return None if self.is_over else next(self._pieces, None)

    def carry_out(self, do: Callable[[int], object]) -> None:
        while not self.is_over and (piece := self.take()) is not None:
            do(piece)

    def failed(self, error: BaseException) -> None:
        """In a thread of its own; the caller raises it."""
        self._errors.append(error)
        self.is_over = True

    def raise_first(self) -> None:
        if self._errors:
            raise self._errors[0]


class _Hand:
    """One thread beside the caller's.

    A signal may interrupt the caller anywhere, also within `Thread.start`, so that nobody knows the
    thread, which runs all the same. So it says itself whether it is at work, and does nothing where
    all is over: it says so first and looks then, and the caller does both the other way round. No
    lock: one that an interrupted caller had kept would hold up the threads for ever.
    """

    def __init__(self, left: _Pieces, do: Callable[[int], object]) -> None:
        self._left = left
        self._do = do
        self.is_busy = False

    def work(self) -> None:
        """What the thread does."""
        self.is_busy = True
        try:
            self._left.carry_out(self._do)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self._left.failed(error)
        finally:
            self.is_busy = False


def side_by_side(workers: Sequence[Callable[[int], object]], pieces: Iterable[int]) -> None:
    """Hand each piece to one of `workers`, each of which has a thread; the first is this one's.

    Raises:
        BaseException: the first error of any, or a signal's; none of them touches anything then.
    """
    left = _Pieces(pieces)
    hands = [_Hand(left, worker) for worker in workers[1:]]
    interrupted: BaseException | None = None
    try:
        for hand in hands:
            try:
                threading.Thread(target=hand.work, name="acpfs-bytes").start()
            except RuntimeError:  # none left, or the interpreter ends
                break
        left.carry_out(workers[0])
    finally:
        left.is_over = True  # a store, between which and the error no signal is looked at
        while True:
            try:
                while any(hand.is_busy for hand in hands):
                    time.sleep(LOOK_AGAIN_S)
                break
            except BaseException as error:  # noqa: BLE001 - they use what the caller closes
                interrupted = error
    if interrupted is not None:
        raise interrupted
    left.raise_first()
