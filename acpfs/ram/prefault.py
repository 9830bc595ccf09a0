"""Memory made ready before a save needs it: pages are allocated in the background, and freed as a save takes memory.

What a save then gets is memory that the host has backed, that is in one piece (huge pages), and that no page cache has to be reclaimed for.
The pages lie in a file of their own, not in the tier: they count neither as used nor against the budget of a writer. Together with what
is used they never exceed the budget for longer than one look. They come free a little ahead of what is written and no faster, because free
memory does not stay ready: page cache takes it, and a virtual machine gives it back to its host within seconds, so that the second file of
a save would find nothing. A thread of its own, since allocating takes time and must be interruptible; it takes no lock of the file system.
`give_back` may be called from any thread and does not wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from acpfs.ram.memory import headroom_bytes
from acpfs.ram.shortage import available_bytes

STEP_BYTES = 32 << 20
"""About 5 ms of writing: how long giving back may have to wait. Written and not fallocated: that takes pages, but does not touch them."""
REST = 1.0
"""Rest between two steps, in times of what the step took: half of one processor, and never two steps in a row."""
LOOK_S = 1.0
LEAD_BYTES = 256 << 20
"""So much more than was written has come free at each look during a save; writers take it in the meantime, 160 MB at 8 GB/s."""
FOLLOW_S = 0.02
"""Between two looks during a save."""
QUIET_S = 10.0
"""No file was opened for writing and RAM has not grown by a step for so long: the save is over. A log that stays open is no save."""
QUIET_S_MAX = 3600.0
WORTH_BYTES = 64 << 20
"""Where less than this was written since the memory was given back, it was not for a save: next time the wait is twice as long."""
LONG_REST_S = 10.0
"""After the kernel refused memory."""
FLOOR_SHARE = 10
FLOOR_BYTES = 512 << 20
"""What is left to everybody else: a tenth of memory, and at least this."""
_ZEROS = memoryview(bytes(2 << 20))


def takeable_bytes() -> int:
    """What this process may still take without hurting others: the machine's, or less where its control group has less."""
    room = headroom_bytes()
    return available_bytes() if room is None else min(available_bytes(), room)


class Prefault:
    """Keeps up to `wanted()` bytes ready while nobody writes."""

    def __init__(
        self,
        make_file: Callable[[int], int | None],
        wanted: Callable[[], int],
        budget: Callable[[], int],
        used: Callable[[], int],
        available: Callable[[], int],
        machine_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        why: str = "set",
    ) -> None:
        """`make_file`: a file without a name that may take so many bytes. `budget`, `used`: the RAM tier's bytes, also those unseen.

        `available`: bytes that this process may still take. `why`: so much is wanted, for people.
        """
        self._make_file, self._wanted, self._budget, self._used = make_file, wanted, budget, used
        self._available, self._clock = available, clock
        self.why = why
        self._floor_bytes = max(FLOOR_BYTES, machine_bytes // FLOOR_SHARE)
        self._changed = threading.Condition()
        self._fd, self._file_bytes = -1, 0
        self._closed = self._asked = False
        self._following = False
        """A save is under way; only the thread changes it."""
        self._ready_before = self._used_before = self._taken = 0
        """When it began, and how much it has taken since."""
        self._thread: threading.Thread | None = None
        self._active_at, self._quiet_s = -QUIET_S, QUIET_S
        self._used_seen = 0
        self.ready_bytes = 0
        """Allocated and not given back yet."""

    # -- any thread

    def start(self) -> None:
        """Begin, if anything is wanted."""
        if self._wanted() > 0:
            self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)
            self._thread.start()

    def give_back(self) -> None:
        """Somebody is about to write: memory comes back from now on, ahead of what is written (the kernel frees some 200 GiB/s)."""
        self._active_at = self._clock()
        if self.ready_bytes and not (self._asked or self._following):
            with self._changed:
                self._asked = True
                self._changed.notify()

    def close(self) -> None:
        """Give everything back and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._shrink(0)

    # -- the thread

    def _run(self) -> None:
        while True:
            rest_s = self.look()
            with self._changed:
                if not (self._closed or self._asked):
                    self._changed.wait(rest_s)
                if self._closed:
                    return

    def look(self) -> float:
        """Allocate a step more, give back what is too much, or neither; seconds until the next look."""
        target = self._target() // STEP_BYTES * STEP_BYTES
        if self.ready_bytes > target:
            self._shrink(target)
        elif self.ready_bytes < target:
            return self._grow()
        return FOLLOW_S if self._following and self.ready_bytes else LOOK_S

    def _target(self) -> int:
        """How much may be ready now."""
        used = self._used()
        if used > self._used_seen + STEP_BYTES:
            self._active_at = self._clock()
        if abs(used - self._used_seen) > STEP_BYTES:
            self._used_seen = used
        self._follow(used)
        if not self.ready_bytes and self._clock() - self._active_at < self._quiet_s:
            return 0
        spare = self._available() - self._floor_bytes
        most = min(self._wanted(), self._budget() - used, self.ready_bytes + spare)
        if self._following:
            most = min(most, self.ready_bytes, self._ready_before - self._taken - LEAD_BYTES)
        return max(0, most)

    def _follow(self, used: int) -> None:
        """Whether a save is under way, and how far it is."""
        with self._changed:
            asked, self._asked = self._asked, False
        if asked:
            self._following, self._active_at = True, self._clock()
            self._ready_before, self._used_before, self._taken = self.ready_bytes, used, 0
        if self._following:
            self._taken = max(self._taken, used - self._used_before)
            if self._clock() - self._active_at >= self._quiet_s:
                self._following = False
                self._quiet_s = min(QUIET_S_MAX, self._quiet_s * 2) if self._taken < WORTH_BYTES else QUIET_S
                self._active_at = self._clock() - self._quiet_s  # that is for the next time

    def _shrink(self, target: int) -> None:
        if self._fd < 0:
            return
        os.ftruncate(self._fd, target)
        if target == 0:
            os.close(self._fd)  # the next one may have another size
            self._fd = -1
        else:
            os.ftruncate(self._fd, self._file_bytes)  # for huge pages, when it grows again
        self.ready_bytes = target

    def _grow(self) -> float:
        began = self._clock()
        if self._fd < 0 and not self._begin():
            return LONG_REST_S
        try:
            written = os.pwritev(self._fd, [_ZEROS] * (STEP_BYTES // len(_ZEROS)), self.ready_bytes)
        except OSError:  # memory is shorter than it looked
            written = 0
        if written < STEP_BYTES:
            self._shrink(self.ready_bytes)
            return LONG_REST_S
        self.ready_bytes += STEP_BYTES
        return REST * (self._clock() - began)

    def _begin(self) -> bool:
        """A new file, as long as it may become: a tmpfs with huge=within_size gives huge pages only below the end of a file."""
        size = self._wanted()
        fd = self._make_file(size)
        if fd is None:
            return False
        os.ftruncate(fd, size)
        self._fd, self._file_bytes = fd, size
        return True
