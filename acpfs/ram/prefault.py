"""Memory made ready before a save needs it: pages are allocated in the background, and freed as a
save takes memory.

What a save then gets is memory that the host has backed, that is in one piece (huge pages), and
that no page cache has to be reclaimed for. The pages lie in a file of their own, not in the tier:
they count neither as used nor against the budget of a writer. Together with what is used they never
exceed the budget for longer than one look. They come free a little ahead of what is written and no
faster, because free memory does not stay ready: page cache takes it, and a virtual machine gives it
back to its host within seconds, so that the second file of a save would find nothing. For the same
reason memory is made ready again as soon as a save is over: what it left of its lead, and what an
older checkpoint gives up when it leaves, is still warm then, and costs a twentieth of memory that
is cold. A thread of its own, since allocating takes time and must be interruptible; it takes no
lock of the file system. `give_back` may be called from any thread and does not wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from acpfs.ram.memory import headroom_bytes
from acpfs.ram.shortage import available_bytes
from acpfs.runtime.given import Runtime
from acpfs.runtime.threads import Running

STEP_BYTES = 32 << 20
"""Written and not fallocated: that takes pages, but does not touch them.

5 ms of warm memory, 150 of cold.
"""
PIECE_BYTES = 4 << 20
"""So much of a step goes on when somebody is about to write: 20 ms of cold memory."""
REST = 1.0
"""Rest between two steps, in times of what the step took: half of one processor, and never two
steps in a row.
"""
LOOK_S = 1.0
LEAD_BYTES = 256 << 20
"""So much more than was written has come free at each look during a save; writers take it in the
meantime, 160 MB at 8 GB/s.
"""
FOLLOW_S = 0.02
"""Between two looks during a save."""
SOON_S = 0.1
"""The same where there is nothing to follow, and a save may be over soon: what it did not use stays
warm for a second or two.
"""
CLOSED_S = 0.3
"""No file is open for writing any more, none was opened and RAM has not grown by a step for so
long: the save is over.
"""
QUIET_S = 2.0
"""The same where one stays open: a log is no save."""
QUIET_S_MAX = 3600.0
WORTH_BYTES = 64 << 20
"""Where less than this was written since the memory was given back, it was not for a save: next
time the wait is twice as long.
"""
LONG_REST_S = 10.0
"""After the kernel refused memory."""
FLOOR_SHARE = 10
FLOOR_BYTES = 512 << 20
"""What is left to everybody else: a tenth of memory, and at least this."""
_ZEROS = memoryview(bytes(2 << 20))


def takeable_bytes() -> int:
    """What this process may still take without hurting others: the machine's, or less where its
    control group has less.
    """
    room = headroom_bytes()
    return available_bytes() if room is None else min(available_bytes(), room)


def with_lead(save_bytes: int) -> int:
    """What has to be ready for a save of that size, with what comes free ahead of it; nothing for
    none.
    """
    return save_bytes + LEAD_BYTES if save_bytes else 0


@dataclass(frozen=True, slots=True)
class MemoryNow:
    """How much there is, bytes; asked in any thread."""

    budget: Callable[[], int]
    """Of the RAM tier."""
    used: Callable[[], int]
    """Of that, also those unseen."""
    available: Callable[[], int]
    """That this process may still take."""
    machine_bytes: int


class Prefault:
    """Keeps up to `wanted()` bytes ready while nobody writes."""

    def __init__(
        self,
        make_file: Callable[[int], int | None],
        wanted: Callable[[], int],
        memory: MemoryNow,
        runtime: Runtime,
        why: str = "set",
        writers: Callable[[], int] = lambda: 0,
    ) -> None:
        """`make_file`: a file without a name that may take so many bytes.

        `why`: so much is wanted, for people.
        `writers`: descriptors open for writing.
        """
        self._make_file = make_file
        self._wanted = wanted
        self._budget = memory.budget
        self._used = memory.used
        self._available = memory.available
        self._writers = writers
        self._clock = runtime.clock.now
        self._threads = runtime.threads
        self.why = why
        self._floor_bytes = max(FLOOR_BYTES, memory.machine_bytes // FLOOR_SHARE)
        self._changed = runtime.threads.condition()
        self._fd = -1
        self._file_bytes = 0
        self._pages = threading.Lock()
        """Held while what is ready changes, or how far a save is."""
        self._closed = False
        self._asked = False
        self._following = False
        """A save is under way; only the thread changes it."""
        self._ready_before = 0
        """Bytes, when it began."""
        self._used_before = 0
        """Bytes, when it began."""
        self._taken = 0
        """Bytes that it has taken since."""
        self._thread: Running | None = None
        self._active_at = -QUIET_S
        self._for_nothing = 0
        """How often in a row memory was given back, and no save came."""
        self._used_seen = 0
        self.ready_bytes = 0
        """Allocated and not given back yet."""

    # -- any thread

    def start(self) -> None:
        """Begin, if anything is wanted."""
        if self._wanted() > 0:
            self._thread = self._threads.start("prefault", self._run)

    def give_back(self) -> None:
        """Somebody is about to write: memory comes back from now on, ahead of what is written (the
        kernel frees some 200 GiB/s).
        """
        self._active_at = self._clock()
        if self.ready_bytes and not (self._asked or self._following):
            with self._changed:
                self._asked = True
                self._changed.notify()

    def hand_over(self, size: int, waits: bool) -> None:
        """As `give_back`, for somebody who takes so many bytes now: they come free before it
        returns. `waits`: also if that takes 20 ms.
        """
        self.give_back()
        if self.ready_bytes and self._pages.acquire(blocking=waits):
            try:
                if not self._following:
                    with self._changed:
                        self._asked = False
                    self._begin_following(self._used())
                self._taken += size
                self._shrink(
                    max(0, min(self.ready_bytes, self._ready_before - self._taken - LEAD_BYTES))
                )
            finally:
                self._pages.release()

    def close(self) -> None:
        """Give everything back and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.end()
        with self._pages:
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
        """Allocate a step more, give back what is too much, or neither; seconds until the next
        look.
        """
        with self._pages:
            target = self._target() // STEP_BYTES * STEP_BYTES
            if self.ready_bytes > target:
                self._shrink(target)
        if self.ready_bytes < target:
            return self._grow(target)
        if self._following:
            return FOLLOW_S if self.ready_bytes else SOON_S
        return SOON_S if self._clock() - self._active_at < QUIET_S else LOOK_S

    def _target(self) -> int:
        """How much may be ready now."""
        used = self._used()
        grown = used > self._used_seen + STEP_BYTES
        if grown:
            self._active_at = self._clock()
        if abs(used - self._used_seen) > STEP_BYTES:
            self._used_seen = used
        self._follow(used, grown=grown)
        if not self.ready_bytes and not self._is_quiet():
            return 0
        spare = self._available() - self._floor_bytes
        most = min(self._wanted(), self._budget() - used, self.ready_bytes + spare)
        if self._following:
            most = min(most, self.ready_bytes, self._ready_before - self._taken - LEAD_BYTES)
        return max(0, most)

    def _follow(self, used: int, *, grown: bool) -> None:
        """Whether a save is under way, and how far it is.

        One that waits long between open and write shows by what it writes.
        """
        with self._changed:
            asked = self._asked
            self._asked = False
        if asked or (grown and self.ready_bytes and not self._following):
            self._begin_following(used)
        if self._following:
            self._taken = max(self._taken, used - self._used_before)
            if self._is_quiet():
                self._following = False
                self._for_nothing = self._for_nothing + 1 if self._taken < WORTH_BYTES else 0
                self._active_at = self._clock() - QUIET_S_MAX  # a longer wait is for the next time

    def _begin_following(self, used: int) -> None:
        self._following = True
        self._active_at = self._clock()
        self._ready_before = self.ready_bytes
        self._used_before = used
        self._taken = 0

    def _is_quiet(self) -> bool:
        """Whether no save is under way."""
        wait_s = QUIET_S if self._writers() else CLOSED_S
        return self._clock() - self._active_at >= min(
            QUIET_S_MAX, wait_s * 2.0 ** min(self._for_nothing, 30)
        )

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

    def _grow(self, target: int) -> float:
        """A step, or less where somebody is about to write."""
        began = self._clock()
        end = min(target, self.ready_bytes + STEP_BYTES)
        while self.ready_bytes < end:
            with self._pages:
                if self._asked or self._following or self._closed:
                    break
                if not self._grow_piece(min(PIECE_BYTES, end - self.ready_bytes)):
                    return LONG_REST_S
        return REST * (self._clock() - began)

    def _grow_piece(self, size: int) -> bool:
        if self._fd < 0 and not self._begin():
            return False
        try:
            written = os.pwritev(
                self._fd,
                [_ZEROS[: size - at] for at in range(0, size, len(_ZEROS))],
                self.ready_bytes,
            )
        except OSError:  # memory is shorter than it looked
            written = 0
        if written < size:
            self._shrink(self.ready_bytes)
            return False
        self.ready_bytes += size
        return True

    def _begin(self) -> bool:
        """A new file, as long as it may become: a tmpfs with huge=within_size gives huge pages only
        below the end of a file.
        """
        size = self._wanted()
        fd = self._make_file(size)
        if fd is None:
            return False
        os.ftruncate(fd, size)
        self._fd = fd
        self._file_bytes = size
        return True
