"""Reading a file of the backing directory from its first byte to its last, and holding it against what was stored.

Owns the comparison with the checksum that acpfs noted at the file, and counts and tells what is damaged. Blocks on the backing directory:
run it on a thread of a pool. Thread-safe; takes no lock of the file system.
"""

from __future__ import annotations

import errno
import os
import time

from acpfs.backing.lower import Lower, LowerPath, LowerStat, Note
from acpfs.backing.progress import Progress
from acpfs.backing.read_rate import ReadRate
from acpfs.checksum import Checksum
from acpfs.logger import get_logger
from acpfs.ram.tier import Tier
from acpfs.types import TierId
from acpfs.writeback.evidence.whereabouts import Whereabouts

CHUNK_BYTES = 8 << 20
DAMAGED = "a file on the backing directory is not what was stored there: it is not served"

log = get_logger(__name__)


class DamagedFileError(OSError):
    """EIO: the bytes are not those that were stored, by their checksum."""


class WholeReads:
    """See above."""

    def __init__(self, lower: Lower, there: Whereabouts, tier: Tier, read_rate: ReadRate) -> None:
        self._lower, self._there, self._tier, self._read_rate = lower, there, tier, read_rate
        self.mismatches = 0
        """Files that were found damaged."""

    def bring(self, path: LowerPath, tier_id: TierId, size: int, progress: Progress) -> LowerStat:
        """`copy` to a tier file, which gets the times too."""
        target_fd, began = self._tier.open(tier_id), time.perf_counter()
        try:
            st = self.copy(path, target_fd, size, progress)
            os.utime(target_fd, ns=(st.atime_ns, st.mtime_ns))
            self._read_rate.note(size, time.perf_counter() - began)
            return st
        finally:
            os.close(target_fd)

    def copy(self, path: LowerPath, target_fd: int, size: int, progress: Progress) -> LowerStat:
        """Copy the first `size` bytes to an open file; returns the entry as it was meanwhile.

        Raises:
            DamagedError: all of it was read, and it is not what was stored.
            OSError: EIO, it changed. ECANCELED, nobody wants it any more.
        """
        progress.begin()
        before = self._there.lstat(path)
        source = self._there.open_read(path)
        hasher, done = Checksum(), 0
        try:
            while done < size and (data := os.pread(source, min(CHUNK_BYTES, size - done), done)):
                progress.moved(len(data))
                hasher.update(data)
                done += os.pwrite(target_fd, data, done)
            note = self._lower.noted(source) if done == before.size else None
        finally:
            os.close(source)
        if done < size or self._there.lstat(path).identity() != before.identity():
            raise OSError(errno.EIO, "the file changed on the backing directory while it was read")
        self.compare(b"/".join(path), before, note, hasher.hexdigest())
        return before

    def verify(self, path: LowerPath, progress: Progress) -> LowerStat:
        """Read it for its checksum only; returns it as it was before.

        Raises:
            DamagedError: it is not what was stored.
        """
        progress.begin()
        source = self._there.open_read(path)
        hasher, position = Checksum(), 0
        try:
            before = self._lower.stat_fd(source)
            while data := os.pread(source, CHUNK_BYTES, position):
                progress.moved(len(data))
                hasher.update(data)
                position += len(data)
            note = self._lower.noted(source)
        finally:
            os.close(source)
        self.compare(b"/".join(path), before, note, hasher.hexdigest())
        return before

    def compare(self, path: bytes, st: LowerStat, note: Note | None, found: str) -> bool:
        """Hold a checksum against what was noted; False: nothing was, or the file was changed since.

        Raises:
            DamagedError: it is not what was stored.
        """
        if note is None or not note.is_about(st, self._lower.features.time_granularity_ns):
            return False
        if found != note.digest:
            self.mismatches += 1
            log.error(DAMAGED, path=os.fsdecode(path), expected=note.digest, found=found)
            raise DamagedFileError(errno.EIO, DAMAGED)
        return True
