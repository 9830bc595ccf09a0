"""Requests that hang a worker: the next worker, which gets them again, does not hang with them.

A thread that does not come back from a request is seen by a thread that needs nothing of the file
system, and the request is noted in records that outlive the worker. The kernel sends it again to
the next worker, which carries it out in a thread that nobody else needs. Where it hangs that
worker too, because it does so with the lock of the file system, the one after that answers EIO:
its caller is told of an error, and all others go on.

Owns these records, and who is to blame. Does not know what requests mean. `HungRequests` is
thread-safe; `Watch` has one thread.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from acpfs.ram.kept import HANGS_MAX, Kept
from acpfs.runtime.threads import THREADS, Running
from acpfs.transport.native.request import plain, resent

Seats = Callable[[], list[tuple[int, int]]]
"""Threads that serve requests: the thread's identity, and the kernel's number of its request."""
LOOKS = 8
"""In the time after which a thread counts as hung."""
_HANGS = 1
_OWNER = re.compile(r"owner=(\d+)")


class HungRequests:
    """Notes requests, and knows those that hung an earlier worker."""

    def __init__(self, kept: Kept) -> None:
        """Take over what the last workers noted."""
        self._slots = kept.hung
        self._lock = threading.Lock()
        self._known = {unique: slot for slot, (unique, _hangs) in self._slots}
        self._noted: set[int] = set()
        """By this worker."""
        self.to_set_apart = frozenset(
            resent(unique) for _slot, (unique, hangs) in self._slots if hangs < HANGS_MAX
        )
        """As the kernel sends them again."""

    def note(self, unique: int) -> None:
        """It has kept its thread for so long that this worker will be taken for hung."""
        number = plain(unique)
        with self._lock, suppress(OSError):  # no page for it: then it is like any other
            if number in self._noted:
                return
            self._noted.add(number)
            slot = self._known.get(number)
            if slot is None:
                self._known[number] = self._slots.add(number, 1)
            else:
                self._slots.record(slot)[_HANGS] += 1

    def ended(self, unique: int) -> None:
        """It is answered, or left its thread."""
        number = plain(unique)
        with self._lock:
            self._noted.discard(number)
            slot = self._known.pop(number, None)
            if slot is not None:
                self._slots.free(slot)


class Watch:
    """Looks who stays with a request, in a thread of its own.

    Whoever waits for the lock of the file system is not to blame for it: where the lock is not let
    go, that is who has it. Nobody is, where that is no thread that serves requests.
    """

    def __init__(self, hung: HungRequests, seats: Seats, lock: object, hung_after_s: float) -> None:
        """`lock`: of the file system."""
        self._hung = hung
        self._seats = seats
        self._lock = lock
        self._hung_after_s = hung_after_s
        self._since: dict[tuple[int, int], float] = {}
        """Seat → monotonic time, seconds, of the first look at which it was taken so."""
        self._owner = 0
        self._owner_since = 0.0
        self._noted: set[tuple[int, int]] = set()
        self._end = threading.Event()
        self._thread: Running | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread = THREADS.start("fuse-watch", self._run)

    def stop(self) -> None:
        """Look no more."""
        self._end.set()
        if self._thread is not None:
            self._thread.end()

    def _run(self) -> None:
        while not self._end.wait(self._hung_after_s / LOOKS):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Once."""
        taken = [seat for seat in self._seats() if seat[1]]
        owner = owner_of(self._lock)
        if owner != self._owner:
            self._owner = owner
            self._owner_since = now
        self._since = {seat: self._since.get(seat, now) for seat in taken}
        long = {seat for seat, since in self._since.items() if self._is_long(since, now)}
        if owner and self._is_long(self._owner_since, now):
            long = {seat for seat in long if seat[0] == owner}
        for _thread, unique in long - self._noted:
            self._hung.note(unique)
        for seat in self._noted - set(taken):
            self._hung.ended(seat[1])
        self._noted = (self._noted & set(taken)) | long

    def _is_long(self, since: float, now: float) -> bool:
        return now - since >= self._hung_after_s


def owner_of(lock: object) -> int:
    """The thread that has an RLock; 0: none. Python says it nowhere but in the lock's name."""
    found = _OWNER.search(repr(lock))
    return 0 if found is None else int(found[1])
