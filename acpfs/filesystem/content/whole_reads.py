"""Reading a file of the backing directory from its first byte to its last, and holding it against
what was stored.

Owns the comparison with the checksum that acpfs noted at the file, and counts and tells what is
damaged: what came wrong twice. Blocks on the backing directory: run it on a thread of a pool.
Thread-safe; takes no lock of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import NamedTuple

from acpfs.backing.lower import Lower, LowerPath, LowerStat, Note
from acpfs.backing.progress import Progress
from acpfs.backing.read_rate import ReadRate
from acpfs.checksum import Checksum
from acpfs.logger import get_logger
from acpfs.ram.tier import Tier
from acpfs.runtime.clock import Clock
from acpfs.types import TierId
from acpfs.writeback.evidence.whereabouts import Whereabouts

There = LowerPath | int
"""A file on the backing directory: its path, or, of one that is deleted there, a descriptor."""
CHUNK_BYTES = 8 << 20
READS_MAX = 3
"""Of a file that is another one after each: its mode may be changed, or a name be added, by what
this mount has logged of it itself.
"""
DAMAGED = "a file on the backing directory is not what was stored there: it is not served"

MISREAD = "a file came otherwise than it was stored: it is read once more"

log = get_logger(__name__)


class DamagedFileError(OSError):
    """EIO: the bytes are not those that were stored, by their checksum."""


class _ChangedError(OSError):
    """EIO: the entry is not what it was before it was read."""


class Differs(NamedTuple):
    """Two checksums of one file."""

    expected: str
    found: str


class WholeReads:
    """See above."""

    def __init__(
        self, lower: Lower, there: Whereabouts, tier: Tier, read_rate: ReadRate, clock: Clock
    ) -> None:
        self._now = clock.now
        self._lower = lower
        self._there = there
        self._tier = tier
        self._read_rate = read_rate
        self.mismatches = 0
        """Files that were found damaged."""

    def bring(self, path: There, tier_id: TierId, size: int, progress: Progress) -> LowerStat:
        """`copy` to a tier file, which gets the times too."""
        target_fd = self._tier.open(tier_id)
        began = self._now()
        try:
            st = self.copy(path, target_fd, size, progress)
            os.utime(target_fd, ns=(st.atime_ns, st.mtime_ns))
            self._read_rate.note(size, self._now() - began)
            return st
        finally:
            os.close(target_fd)

    def copy(self, path: There, target_fd: int, size: int, progress: Progress) -> LowerStat:
        """Copy the first `size` bytes to an open file; returns the entry as it was meanwhile.

        Raises:
            DamagedFileError: all of it was read twice, and it is not what was stored.
            OSError: EIO, it changed, and went on to. ECANCELED, nobody wants it any more.
        """
        for _read in range(READS_MAX - 1):
            with contextlib.suppress(_ChangedError):
                return self._copy(path, target_fd, size, progress)
        return self._copy(path, target_fd, size, progress)

    def _copy(self, path: There, target_fd: int, size: int, progress: Progress) -> LowerStat:
        progress.begin()
        before, differs = self._copy_once(path, target_fd, size, progress)
        if differs is not None:
            self._tell_misread(path, differs)
            before, differs = self._copy_once(path, target_fd, size, progress, past_cache=True)
        if differs is not None:
            raise self._condemned(path, differs)
        return before

    def _copy_once(
        self,
        path: There,
        target_fd: int,
        size: int,
        progress: Progress,
        *,
        past_cache: bool = False,
    ) -> tuple[LowerStat, Differs | None]:
        source = self._opened(path, past_cache=past_cache)
        hasher = Checksum()
        done = 0
        try:
            before = self._lower.stat_fd(source)
            while done < size and (data := os.pread(source, min(CHUNK_BYTES, size - done), done)):
                progress.moved(len(data))
                hasher.update(data)
                done += os.pwrite(target_fd, data, done)
            note = self._lower.noted(source) if done == before.size else None
        finally:
            self._lower.close(source)
        if done < size or self._look(path).identity() != before.identity():
            raise _ChangedError(
                errno.EIO, "the file changed on the backing directory while it was read"
            )
        return before, self.compared(before, note, hasher.hexdigest())[1]

    def verify(self, path: LowerPath, progress: Progress) -> LowerStat:
        """Read it for its checksum only; returns it as it was before.

        Raises:
            DamagedFileError: it is not what was stored, twice.
        """
        progress.begin()
        before, differs = self._read_once(path, progress)
        if differs is not None:
            self._tell_misread(path, differs)
            return self.confirm(path, progress)
        return before

    def confirm(self, path: LowerPath, progress: Progress) -> LowerStat:
        """Read what came wrong once more, from the storage and not from what this machine has kept
        of it.

        A path to the storage can give wrong bytes once: that is no reason to refuse a good file
        from then on.

        Raises:
            DamagedFileError: it is not what was stored.
        """
        before, differs = self._read_once(path, progress, past_cache=True)
        if differs is not None:
            raise self._condemned(path, differs)
        return before

    def _read_once(
        self, path: LowerPath, progress: Progress, *, past_cache: bool = False
    ) -> tuple[LowerStat, Differs | None]:
        source = self._opened(path, past_cache=past_cache)
        hasher = Checksum()
        position = 0
        try:
            before = self._lower.stat_fd(source)
            while data := os.pread(source, CHUNK_BYTES, position):
                progress.moved(len(data))
                hasher.update(data)
                position += len(data)
            note = self._lower.noted(source)
        finally:
            self._lower.close(source)
        return before, self.compared(before, note, hasher.hexdigest())[1]

    def _look(self, path: There) -> LowerStat:
        return self._lower.stat_fd(path) if isinstance(path, int) else self._there.lstat(path)

    def _opened(self, path: There, *, past_cache: bool) -> int:
        source = os.dup(path) if isinstance(path, int) else self._there.open_read(path)
        if past_cache:
            with contextlib.suppress(OSError):  # a file system that keeps pages all the same
                os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        return source

    def compared(self, st: LowerStat, note: Note | None, found: str) -> tuple[bool, Differs | None]:
        """Hold a checksum against what was noted: whether anything was that still counts, and by
        what it differs from that.
        """
        if note is None or not note.is_about(st, self._lower.features.time_granularity_ns):
            return False, None
        return True, None if found == note.digest else Differs(note.digest, found)

    def _tell_misread(self, path: There, differs: Differs) -> None:
        log.warning(MISREAD, path=_shown(path), expected=differs.expected, found=differs.found)

    def _condemned(self, path: There, differs: Differs) -> DamagedFileError:
        self.mismatches += 1
        log.error(DAMAGED, path=_shown(path), expected=differs.expected, found=differs.found)
        return DamagedFileError(errno.EIO, DAMAGED)


def _shown(path: There) -> str:
    return "?" if isinstance(path, int) else os.fsdecode(b"/".join(path))
