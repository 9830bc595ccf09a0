"""Carries out many pieces of work by several threads, the caller's among them.

The threads are made for one call and are gone behind it: a fork has none to miss, and a process
that ends has none to wait for. Where no thread can be started there are fewer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence

THREADS_MAX = 4
"""The kernel lets one write at a time to a file: more threads would not write faster."""


def usable_threads() -> int:
    """How many make sense here."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0))))


class _Pieces:
    """What is left to do, for all threads."""

    def __init__(self, pieces: Iterable[int]) -> None:
        self._pieces = iter(pieces)
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._is_over = False

    def take(self) -> int | None:
        """The next piece; None: no more, for there is none or one has failed."""
        with self._lock:
            return None if self._is_over else next(self._pieces, None)

    def stop(self) -> None:
        """Nobody begins another one."""
        self._is_over = True

    def work(self, do: Callable[[int], object]) -> None:
        """In a thread of its own."""
        try:
            self.carry_out(do)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self._errors.append(error)

    def carry_out(self, do: Callable[[int], object]) -> None:
        try:
            while (piece := self.take()) is not None:
                do(piece)
        finally:
            self.stop()

    def raise_first(self) -> None:
        if self._errors:
            raise self._errors[0]


def side_by_side(workers: Sequence[Callable[[int], object]], pieces: Iterable[int]) -> None:
    """Hand each piece to one of `workers`, each of which has a thread; the first is this one's.

    Raises:
        BaseException: the first error of any; all have stopped by then.
    """
    left = _Pieces(pieces)
    threads = []
    try:
        for worker in workers[1:]:
            thread = threading.Thread(target=left.work, args=(worker,), name="acpfs-bytes")
            try:
                thread.start()
            except RuntimeError:  # none left, or the interpreter ends
                break
            threads.append(thread)
        left.carry_out(workers[0])
    finally:
        left.stop()
        _join(threads)
    left.raise_first()


def _join(threads: Sequence[threading.Thread]) -> None:
    """Until all have ended, whatever signals come meanwhile: they use what the caller closes."""
    interrupted: BaseException | None = None
    while True:
        try:
            for thread in threads:
                thread.join()
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupted = error
    if interrupted is not None:
        raise interrupted
