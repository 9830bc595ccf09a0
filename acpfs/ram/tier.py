"""RAM tier: numbered files on a tmpfs, and how many bytes of the budget they take.

Owns the tier files and the accounting, and does not know what the bytes mean or who may leave: the file system decides
that (`filesystem.retention`). Thread-safe where stated; the accounting is used under the file system's lock.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from acpfs.types import TierId

COPY_CHUNK_BYTES = 64 << 20
BLOCK_BYTES = 512
PAGE_BYTES = 4096
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Bytes of the RAM tier; used = sum over all tier files of their allocated pages."""

    budget_bytes: int
    used_bytes: int
    reserved_bytes: int
    files: int


class Tier:
    """Files `data/<number>` below a directory that only acpfs can enter."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        """Take over what lies there. `budget_bytes`: most bytes that tier files may take together."""
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.withheld_bytes = 0
        """Part of the budget that must not be used now, because the machine has not got it."""
        self._data = directory / "data"
        self._data.mkdir(mode=0o700, exist_ok=True)
        self._dir_fd = os.open(self._data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._allocated: dict[TierId, int] = {}
        self._waiting: list[tuple[int, Future[None]]] = []
        self._last_id = 0
        self.make_room: Callable[[int], None] = lambda _bytes: None
        """Called with the number of bytes wanted when the budget does not hold them; frees what may leave."""
        self.when_safe: Callable[[Callable[[], None]], None] = lambda unlink: unlink()
        """Puts the end of a tier file off until no state that a next worker could find names it: `StateDatabase.after_commit`."""
        for name in os.listdir(self._dir_fd):
            self.settle(TierId(int(name)))
            self._last_id = max(self._last_id, int(name))

    # -- files

    def create(self) -> TierId:
        """A new, empty tier file."""
        tier_id, fd = self.create_open()
        os.close(fd)
        return tier_id

    def create_open(self) -> tuple[TierId, int]:
        """A new, empty tier file and a read-write descriptor, which the caller closes."""
        self._last_id += 1
        tier_id = TierId(self._last_id)
        fd = os.open(str(tier_id), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._dir_fd)
        self._allocated[tier_id] = 0
        return tier_id, fd

    def open(self, tier_id: TierId) -> int:
        """A read-write descriptor; the caller closes it. Thread-safe."""
        return os.open(str(tier_id), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._dir_fd)

    def stat(self, tier_id: TierId) -> os.stat_result:
        """Size, blocks and times of a tier file. Thread-safe."""
        return os.stat(str(tier_id), dir_fd=self._dir_fd, follow_symlinks=False)

    def ids(self) -> list[TierId]:
        """All tier files."""
        return list(self._allocated)

    def remove(self, tier_id: TierId) -> None:
        """Delete a tier file, as soon as `when_safe` lets it, and give its bytes back to the budget."""
        self.used_bytes -= self._allocated.pop(tier_id)
        self.when_safe(partial(self._unlink, tier_id))
        self._wake()

    def _unlink(self, tier_id: TierId) -> None:
        with suppress(FileNotFoundError):
            os.unlink(str(tier_id), dir_fd=self._dir_fd)

    def copy(self, source: TierId, target: TierId, size: int) -> None:
        """Copy the first `size` bytes; slow, thread-safe; the caller has reserved the bytes and settles afterwards."""
        read_fd, write_fd = self.open(source), self.open(target)
        try:
            done = 0
            while done < size:
                count = os.copy_file_range(read_fd, write_fd, min(COPY_CHUNK_BYTES, size - done), done, done)
                if count == 0:
                    break
                done += count
            os.ftruncate(write_fd, size)
        finally:
            os.close(read_fd)
            os.close(write_fd)

    # -- budget

    def allocated_bytes(self, tier_id: TierId) -> int:
        """Bytes of RAM that a tier file takes, as last settled."""
        return self._allocated.get(tier_id, 0)

    def free_bytes(self) -> int:
        """What the budget still holds."""
        return self.budget_bytes - self.used_bytes - self.reserved_bytes - self.withheld_bytes

    def space_left_bytes(self) -> int:
        """What the tmpfs itself still takes: budget and slack, or less where others use it too."""
        info = os.fstatvfs(self._dir_fd)
        return info.f_bavail * info.f_frsize

    def reserve_nowait(self, size: int) -> bool:
        """Take `size` bytes of the budget before they are written; False when they are not there."""
        if self.free_bytes() < size:
            self.make_room(size - self.free_bytes())
        if self.free_bytes() < size or self._waiting:
            return False
        self.reserved_bytes += size
        return True

    def reserve(self, size: int) -> Future[None]:
        """Like `reserve_nowait`, but the answer comes when the bytes are there; first come, first served."""
        future: Future[None] = Future()
        if self.reserve_nowait(size):
            future.set_result(None)
        else:
            self._waiting.append((size, future))
        return future

    def release(self, size: int) -> None:
        """Give a reservation back, after the bytes were written and settled (or were not written)."""
        self.reserved_bytes -= size
        self._wake()

    def settle(self, tier_id: TierId) -> None:
        """Account for what a tier file takes now."""
        taken = self.stat(tier_id).st_blocks * BLOCK_BYTES
        self.used_bytes += taken - self._allocated.get(tier_id, 0)
        self._allocated[tier_id] = taken

    def settle_fd(self, tier_id: TierId, fd: int) -> os.stat_result:
        """`settle` through an open descriptor; returns its stat."""
        st = os.fstat(fd)
        taken = st.st_blocks * BLOCK_BYTES
        self.used_bytes += taken - self._allocated.get(tier_id, 0)
        self._allocated[tier_id] = taken
        return st

    def room_changed(self) -> None:
        """Something may have become evictable, or the budget grew: look again whether waiting writers fit."""
        self._wake()

    def fail_waiting(self, number: int) -> None:
        """No room will ever come: answer all who wait with that errno."""
        waiting, self._waiting = self._waiting, []
        for _size, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(OSError(number, os.strerror(number)))

    def waiting(self) -> int:
        """How many writers wait for room."""
        return len(self._waiting)

    def _wake(self) -> None:
        self._waiting = [(size, future) for size, future in self._waiting if not future.cancelled()]
        while self._waiting:
            size, future = self._waiting[0]
            if self.free_bytes() < size:
                self.make_room(size - self.free_bytes())
            if not self._waiting or self._waiting[0][1] is not future:
                continue  # what left made room, and was woken for, on the way
            if self.free_bytes() < size:
                return
            self._waiting.pop(0)
            self.reserved_bytes += size
            if not future.set_running_or_notify_cancel():
                self.reserved_bytes -= size
                continue
            future.set_result(None)

    def statistics(self) -> TierStatistics:
        """What `status`, the metrics and the tests see."""
        return TierStatistics(self.budget_bytes, self.used_bytes, self.reserved_bytes, len(self._allocated))

    def close(self) -> None:
        """Let go of the directory; the files stay."""
        os.close(self._dir_fd)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """The system call of that name; Python has only posix_fallocate."""
    if _libc.fallocate(fd, ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
