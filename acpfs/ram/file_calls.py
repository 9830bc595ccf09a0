"""System calls on RAM files whose inode lock an application may keep for as long as it likes.

A write(2) in the passthrough lane has the RAM file's inode lock until its last page has come.
Whether a page comes is the caller's business: its buffer may be mapped from a storage that hangs,
or from this very mount. So whoever changes such a file, sets its times or looks for its holes may
wait for ever. No thread that others need does so: these calls are made here, in threads that nobody
else needs. Each RAM file has one of them at most, so that one file does not take all, and its calls
are made in the order in which they came.

A worker that is killed leaves such a call behind: it is in the kernel as long as the application
likes, and may still be carried out. So each is noted in records that outlive the worker, and the
next worker makes none on the same file before that one is over.

Owns which RAM files the kernel writes for applications (`hand_over`, `take_back`), and those
threads. Does not know what is called. Thread-safe; `hand_over` and `take_back` are called under the
file system's lock, and so is whoever relies on `is_handed_over` to make such a call at once.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from acpfs.descriptors import readable
from acpfs.ram.mapped_records import NO_SLOT, Slots
from acpfs.runtime.threads import Threads
from acpfs.types import TierId

T = TypeVar("T")

THREADS_MAX = 256
"""Each is in a call that an application holds up, or has nothing to do.

Files beyond that wait for one of these to end.
"""
IDLE_MAX = 2
"""Threads that wait for the next call. One that must be started first costs 50 us more."""
CROWDED = THREADS_MAX // 2
"""With so many calls held up no further file gets the passthrough lane."""


@dataclass(slots=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    answer: Future[Any]


class RamFileCalls:
    """Makes calls on RAM files that applications may hold up."""

    def __init__(self, threads: Threads) -> None:
        self._starts = threads
        self._handed_over: Counter[TierId] = Counter()
        self._when_back: dict[TierId, list[Callable[[], None]]] = {}
        self._waiting: dict[TierId, deque[_Call]] = {}
        """RAM file → its calls that no thread has begun;

        the key is there as long as a thread is at work on it, or is to be.
        """
        self._due: deque[TierId] = deque()
        """Files that wait for a thread."""
        self._came = threads.condition()
        self._records: Slots | None = None
        self._threads = 0
        self._idle = 0

    # -- which files

    def hand_over(self, tier_id: TierId) -> None:
        """One more open file through which an application may write to it in the kernel."""
        self._handed_over[tier_id] += 1

    def take_back(self, tier_id: TierId) -> None:
        """One of these open files is gone, and every write(2) through it has returned."""
        self._handed_over[tier_id] -= 1
        if self._handed_over[tier_id] <= 0:
            del self._handed_over[tier_id]
            for action in self._when_back.pop(tier_id, ()):
                action()

    def is_handed_over(self, tier_id: TierId) -> bool:
        """Whether an application may have the file's inode lock, for as long as it likes."""
        return tier_id in self._handed_over

    def when_back(self, tier_id: TierId, action: Callable[[], None]) -> None:
        """Do what takes the file's inode lock, now or when no application can have that any
        more.
        """
        if self.is_handed_over(tier_id):
            self._when_back.setdefault(tier_id, []).append(action)
        else:
            action()

    # -- calls

    def take_over(self, records: Slots, end_of: Callable[[int, int], int]) -> set[TierId]:
        """Note calls there from now on; files on which killed workers still make one.

        `end_of`: descriptor, ours from now on, that is readable when the call of a process' thread
        is over; -1: it is. Before anything else is asked for.
        """
        self._records = records
        held_up: set[TierId] = set()
        for slot, (process, thread, number) in list(records):
            end = end_of(process, thread)
            if end < 0:
                records.free(slot)
                continue
            tier_id = TierId(number)
            held_up.add(tier_id)
            self.submit(tier_id, self._wait_over, slot, end)
        return held_up

    def _wait_over(self, slot: int, end: int) -> None:
        readable(end, None)
        os.close(end)
        assert self._records is not None
        with self._came:
            self._records.free(slot)

    def must_queue(self, tier_id: TierId) -> bool:
        """Whether a call on the file is to be made in its thread.

        An application can hold it up, or others come first.
        """
        return tier_id in self._handed_over or tier_id in self._waiting

    def is_crowded(self) -> bool:
        """Whether applications hold up so many calls that no more files should be handed over."""
        return len(self._waiting) >= CROWDED

    def submit(self, tier_id: TierId, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Make a call in the file's thread, after those that were asked for before."""
        call = _Call(function, arguments, Future())
        with self._came:
            if (others := self._waiting.get(tier_id)) is not None:
                others.append(call)
            else:
                self._waiting[tier_id] = deque((call,))
                self._due.append(tier_id)
                self._see_to_threads()
        return call.answer

    def _see_to_threads(self) -> None:
        if self._idle >= len(self._due):
            self._came.notify()
        elif self._threads < THREADS_MAX:
            self._threads += 1
            self._starts.start("ram-file", self._work)

    def _work(self) -> None:
        while (tier_id := self._next()) is not None:
            with self._came:
                call = self._waiting[tier_id].popleft()
                slot = self._note(tier_id)
            _make(call)
            del call  # a thread that waits must not keep what the last one needed
            with self._came:
                if self._records is not None and slot != NO_SLOT:
                    self._records.free(slot)
                if self._waiting[tier_id]:
                    self._due.append(tier_id)  # behind the others
                else:
                    del self._waiting[tier_id]

    def _note(self, tier_id: TierId) -> int:
        if self._records is not None:
            with suppress(OSError):  # no page for it: it counts as one on the backing directory
                return self._records.add(os.getpid(), threading.get_native_id(), tier_id)
        return NO_SLOT

    def _next(self) -> TierId | None:
        """The file whose call is due; None: enough threads wait already."""
        with self._came:
            if not self._due and self._idle >= IDLE_MAX:
                self._threads -= 1
                return None
            self._idle += 1
            while not self._due:
                self._came.wait()
            self._idle -= 1
            return self._due.popleft()


def _make(call: _Call) -> None:
    if not call.answer.set_running_or_notify_cancel():
        return
    try:
        result = call.function(*call.arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it was, it belongs to who asked
        call.answer.set_exception(error)
    else:
        call.answer.set_result(result)
