"""Reading a version's bytes, wherever they are moved meanwhile: in the RAM tier, or in the spill
directory.

The version's bytes may be copied to another tier file while they are read (`Version.tier_id`
changes first, the bytes after it): what was read is trusted only when the number is still the same
after the read. Used in stream and spill threads; takes the file system's lock only to open.
Patience with the spill directory ends: a local disk may hang, too, and must not keep a stream's
thread.
"""

from __future__ import annotations

import errno
import os
from threading import RLock
from typing import Protocol

from acpfs.ram.tier import BLOCK_BYTES, Tier
from acpfs.types import VersionId
from acpfs.writeback.evidence.verify import OnlyCopyError
from acpfs.writeback.log.ops import Version

HOLES_HASHED_BYTES_MAX = 64 << 30
"""Of one file; some ten seconds.

With more it has no checksum: a terabyte of zeros would hold up for minutes what comes after it.
"""


class AbandonedError(Exception):
    """Nobody needs the version any more."""


class Reading(Protocol):
    """Whoever reads a version."""

    version: Version
    abandoned: bool

    def pause(self) -> None:
        """What takes time now is not the backing directory."""

    def progress(self) -> None:
        """That is over."""


class SpilledFile(Protocol):
    """A version's bytes in the spill directory."""

    def read(self, buffer: memoryview, position: int) -> int: ...
    def close(self) -> None: ...


class Spilled(Protocol):
    """The spill tier, as far as reading goes."""

    def open(self, vid: VersionId) -> SpilledFile: ...


class Source:
    """A version's bytes, piece by piece."""

    def __init__(
        self, reading: Reading, tier: Tier, lock: RLock, buffer: memoryview, spilled: Spilled | None
    ) -> None:
        self._reading = reading
        self._tier = tier
        self._lock = lock
        self._buffer = buffer
        self._spilled = spilled
        self.reread_chunks = 0
        self.spilled = False
        """Whether some of the bytes came from the spill directory."""
        self._fd = -1
        self._file: SpilledFile | None = None
        self._sparse = False
        self.hashes_holes = True
        """Whether a checksum is to be taken of all the bytes, as the file was when it was
        opened.
        """
        self._open()

    def _open(self) -> None:
        """Number, file and size in one go under the lock: a tier file may go, or be cut, as soon as
        the version has left it.
        """
        with self._lock:
            if self._reading.abandoned:
                raise AbandonedError
            self._tier_id = self._reading.version.tier_id
            if self._tier.is_lost(self._tier_id):
                raise OnlyCopyError(errno.EIO, "its bytes are gone from the RAM tier")
            if not self._reading.version.spilled:
                self._open_file(self._reading.version.size)
                return
        self._open_spilled()

    def _open_file(self, size: int) -> None:
        if self._tier.is_kept_back(self._tier_id):
            raise OSError(
                errno.EBUSY,
                "processes of an earlier mount can still write to it, and there is no copy of it",
            )
        self._fd = self._tier.read_long(self._tier_id)
        st = os.fstat(self._fd)
        if st.st_size < size:
            self.close()
            raise OSError(
                errno.EIO, "the RAM tier holds fewer bytes than the version has"
            )  # never a hole for acknowledged data
        holes_bytes = size - st.st_blocks * BLOCK_BYTES
        self._sparse = holes_bytes > 0
        self.hashes_holes = holes_bytes <= HOLES_HASHED_BYTES_MAX

    def _open_spilled(self) -> None:
        if self._spilled is None:
            raise OSError(errno.EIO, "the version is in a spill directory, and there is none")
        self.spilled = True
        self._sparse = False
        self._reading.pause()
        self._file = self._spilled.open(self._reading.version.vid)
        self._reading.progress()

    def close(self) -> None:
        """Also when it is closed already: a version that was given up is noticed between two
        files.
        """
        file = self._file
        self._file = None
        if file is not None:
            file.close()
        self._let_go()

    def _let_go(self) -> None:
        """Of the tier file, which counts for as long as it is open here."""
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            with self._lock:
                self._tier.read_done(self._tier_id, fd)

    def read(self, position: int, count: int, at: int = 0) -> tuple[int, bool]:
        """(bytes, is a hole); data lies in the buffer, from `at` on.

        The number is compared without the lock: it changes before the first byte does.
        """
        while True:
            if self._fd < 0 and self._file is None:
                self._open()
            found, is_hole = self._piece(position, self._buffer[at : at + count])
            if self._reading.abandoned:
                raise AbandonedError
            if self._reading.version.tier_id == self._tier_id:
                break
            self.close()
            self.reread_chunks += 1
            self._open()
        if found == 0:
            raise OSError(errno.EIO, "the file holds fewer bytes than the version has")
        if self._spilled is not None:
            # What was read goes to the storage next, which may take for ever. The version may move
            # to the spill directory meanwhile, to make room: an open file would keep the room.
            self._let_go()
        return found, is_hole

    def _piece(self, position: int, buffer: memoryview) -> tuple[int, bool]:
        count = len(buffer)
        if self._file is not None:
            self._reading.pause()
            found = self._file.read(buffer, position)
            self._reading.progress()
            return found, False
        if self._sparse:
            data = self._seek(position, os.SEEK_DATA, position + count)
            if data > position:
                return min(count, data - position), True
            count = min(count, self._seek(position, os.SEEK_HOLE, position + count) - position)
        return os.preadv(self._fd, [buffer[:count]], position), False

    def _seek(self, position: int, whence: int, otherwise: int) -> int:
        """Of a file whose inode lock an application may keep, holes are read as the zeros they are.

        Under the lock, without which nobody opens the file to write to it in the kernel.
        """
        try:
            with self._lock:
                if self._tier.calls.is_handed_over(self._tier_id):
                    return position if whence == os.SEEK_DATA else otherwise
                return os.lseek(self._fd, position, whence)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return otherwise  # no data until the end of the file
