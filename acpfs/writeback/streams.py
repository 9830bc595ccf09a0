"""Streams: one version's bytes from the RAM tier into a staging file, hashed on the way.

A copy runs in one thread of its own from begin to end and takes the file system's lock only for moments. The version's bytes
may be copied to another tier file meanwhile (`Version.tier_id` changes first, the bytes after it): what was read is trusted only
when the number is still the same after the read. After any error the staging file is given up, and the next attempt starts with
a new one: after a failed fsync nobody knows which pages the old one lacks.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import RLock

import xxhash

from acpfs.backing.attributes import DIGEST_XATTR
from acpfs.backing.health import CallInFlight, current_call
from acpfs.backing.lower import Lower
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import BLOCK_BYTES, Tier
from acpfs.writeback.bandwidth import SLICE_MAX_BYTES, TokenBucket
from acpfs.writeback.give_way import GiveWay
from acpfs.writeback.log import OperationLog
from acpfs.writeback.ops import Metadata, Op, Version, VersionState
from acpfs.writeback.verify import MisreadError, digest_of

SMALL_BYTES_MAX = 1 << 20
"""Up to here a file costs more for its create and fsync than for its bytes, and many are copied at a time."""
_ZEROS = memoryview(bytes(1 << 20))


class AbandonedError(Exception):
    """Nobody needs the version any more."""


@dataclass(slots=True)
class StreamCounters:
    """Added to under the lock."""

    streamed_bytes: int = 0
    reread_chunks: int = 0
    verified_files: int = 0
    verify_failures: int = 0


class Stream:
    """One attempt to stage one version."""

    def __init__(self, op: Op, version: Version) -> None:
        self.op, self.version = op, version
        self.abandoned = False
        """Set by the engine, under the lock."""
        self.call: CallInFlight | None = None
        """How the call looks to the health check: told of progress, for it lasts as long as the file is large."""

    def progress(self) -> None:
        """The backing directory answered."""
        if self.call is not None:
            self.call.progress()

    def pause(self) -> None:
        """What takes time now is not the backing directory."""
        if self.call is not None:
            self.call.pause()


class Streamer:
    """Carries out streams; `run` is called in stream threads."""

    def __init__(
        self,
        lower: Lower,
        tier: Tier,
        log: OperationLog,
        state: StateDatabase,
        lock: RLock,
        bucket: TokenBucket,
        discard: Callable[[str], None],
        *,
        still_frozen: Callable[[Version], bool],
        give_way: GiveWay,
        verify_after_write: bool,
    ) -> None:
        """`bucket`: shared by all streams; `discard`: removes a staging file, now or later; `still_frozen`: see `Listener`."""
        self._give_way = give_way
        self._still_frozen = still_frozen
        self._lower, self._tier, self._log, self._state, self._lock = lower, tier, log, state, lock
        self._bucket, self._discard = bucket, discard
        self._verify_after_write = verify_after_write
        self._buffers: list[memoryview] = []
        self.counters = StreamCounters()
        self.applied: dict[int, str] = {}
        """Attributes that a staged version's file was given, by version; what was folded in later, the commit adds."""

    def run(self, stream: Stream) -> None:
        """Stage the version.

        Raises:
            AbandonedError: nobody needs it any more.
            OSError: the backing directory's, or EIO when the bytes are not what they should be.
        """
        stream.call = current_call()
        if not stream.version.tier_id:
            self._seal(stream)
            return
        name = f"{stream.version.vid}-{secrets.token_hex(6)}"
        try:
            fd = self._lower.create_staging(name)
            try:
                digest = self._copy(stream, fd)
                staging_ino, applied = self._finish(stream, fd, digest)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._lower.close(fd)
                raise
            self._lower.close(fd)
            if self._verify_after_write:
                self._verify(stream, name, digest)
            self._staged(stream, name, staging_ino, digest, applied)
        except BaseException:
            self._discard(name)
            raise

    def _seal(self, stream: Stream) -> None:
        """Finish a staging file that an application wrote itself, because RAM had no room: its checksum is of what it reads back."""
        name = stream.version.staging_name
        try:
            fd = self._lower.open_staging(name)
            try:
                self._lower.sync(fd)
                digest = self._hash(stream, fd)
                staging_ino, applied = self._finish(stream, fd, digest)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._lower.close(fd)
                raise
            self._lower.close(fd)
            self._staged(stream, name, staging_ino, digest, applied)
        except AbandonedError:
            self._discard(name)
            raise

    def _hash(self, stream: Stream, fd: int) -> str:
        hasher, position = xxhash.xxh3_128(), 0
        with self._buffer(max(1, stream.version.size)) as buffer:
            while count := self._lower.read(fd, buffer, position):
                hasher.update(buffer[:count])
                position += count
                stream.progress()
        return hasher.hexdigest()

    # -- bytes

    @contextlib.contextmanager
    def _buffer(self, size: int) -> Iterator[memoryview]:
        """A small one is made on the spot; large ones are kept, as many as there were streams at a time."""
        if size <= SMALL_BYTES_MAX:
            yield memoryview(bytearray(size))
            return
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, SLICE_MAX_BYTES))
        try:
            yield buffer
        finally:
            self._buffers.append(buffer)

    def _copy(self, stream: Stream, fd: int) -> str:
        """Copy until the bytes that were copied are the version's; returns their checksum."""
        while True:
            with self._lock:
                renewals = stream.version.renewals
            digest = self._copy_once(stream, fd)
            with self._lock:
                if self._still_frozen(stream.version) and stream.version.renewals == renewals:
                    return digest
                self.counters.reread_chunks += 1
            self._lower.truncate(fd, 0)

    def _copy_once(self, stream: Stream, fd: int) -> str:
        hasher, size, position, end = xxhash.xxh3_128(), stream.version.size, 0, 0
        if size:
            with self._buffer(size) as buffer, contextlib.closing(_Source(stream, self._tier, self._lock, buffer)) as source:
                if size > SMALL_BYTES_MAX:
                    self._lower.expect_bulk(fd)
                while position < size:
                    if size > SMALL_BYTES_MAX:
                        self._stand_back(stream)
                    count, is_hole = source.read(position, min(self._bucket.slice_bytes(), size - position, len(buffer)))
                    if is_hole:
                        _hash_zeros(hasher, count)
                    else:
                        hasher.update(buffer[:count])
                        self._write(stream, fd, buffer[:count], position)
                        end = position + count
                    position += count
                    stream.version.streamed_bytes = position
                with self._lock:
                    self.counters.reread_chunks += source.reread_chunks
        if end < size:
            self._lower.truncate(fd, size)
        return hasher.hexdigest()

    def _stand_back(self, stream: Stream) -> None:
        if self._give_way.should(stream.op.logged_at):
            stream.pause()
            self._give_way.wait(stream.op.logged_at, lambda: stream.abandoned)
            stream.progress()

    def _write(self, stream: Stream, fd: int, data: memoryview, position: int) -> None:
        if self._bucket.bytes_per_s:
            stream.pause()
            self._bucket.take(len(data))
            stream.progress()
        done = 0
        while done < len(data):
            count = self._lower.write(fd, data[done:], position + done)
            if count <= 0:
                raise OSError(errno.EIO, "the backing directory took no bytes")
            done += count
        if stream.version.size > SMALL_BYTES_MAX:
            self._lower.begin_write_out(fd, position, done)
        stream.progress()
        with self._lock:
            self.counters.streamed_bytes += done

    # -- attributes and the end

    def _finish(self, stream: Stream, fd: int, digest: str) -> tuple[int, str]:
        """Attributes, fsync, size; attributes that change meanwhile are given again. Returns inode number and the attributes given."""
        while True:
            with self._lock:
                applied = stream.op.meta.to_json()
            self._lower.apply_fd(fd, self._attributes(applied, digest))
            self._lower.sync(fd)
            stream.progress()
            with self._lock:
                if applied == stream.op.meta.to_json():
                    break
        st = self._lower.stat_fd(fd)
        if st.size != stream.version.size:
            raise OSError(errno.EIO, f"staging file has {st.size} bytes, not {stream.version.size}")
        if st.size > SMALL_BYTES_MAX:
            self._lower.forget_pages(fd)  # the content is in RAM once already
        return st.ino, applied

    def _attributes(self, applied: str, digest: str) -> Metadata:
        meta = Metadata.from_json(applied)
        if self._lower.features.xattrs:
            meta.xattrs[DIGEST_XATTR] = digest.encode()
        return meta

    def _verify(self, stream: Stream, name: str, digest: str) -> None:
        found, _size = digest_of(self._lower, self._lower.staging_path(name), stream.progress)
        equal = found == digest
        with self._lock:
            self.counters.verified_files += equal
            self.counters.verify_failures += not equal
        if not equal:
            raise MisreadError(errno.EIO, "what was written reads back differently")

    def _staged(self, stream: Stream, name: str, staging_ino: int, digest: str, applied: str) -> None:
        with self._lock:
            if stream.abandoned:
                raise AbandonedError
            version = stream.version
            version.staging_name, version.staging_ino, version.digest = name, staging_ino, digest
            version.state = VersionState.STAGED
            self.applied[version.vid] = applied
            self._log.save_version(version)
            self._state.commit()


class _Source:
    """The version's bytes in the RAM tier, wherever they are moved meanwhile."""

    def __init__(self, stream: Stream, tier: Tier, lock: RLock, buffer: memoryview) -> None:
        self._stream, self._tier, self._lock, self._buffer = stream, tier, lock, buffer
        self.reread_chunks = 0
        self._fd = -1
        self._open()

    def _open(self) -> None:
        """Under the lock: a tier file may go as soon as the version has left it."""
        with self._lock:
            if self._stream.abandoned:
                raise AbandonedError
            self._tier_id = self._stream.version.tier_id
            self._fd = self._tier.open(self._tier_id)
        st = os.fstat(self._fd)
        if st.st_size < self._stream.version.size:
            self.close()
            raise OSError(errno.EIO, "the RAM tier holds fewer bytes than the version has")  # never a hole for acknowledged data
        self._sparse = st.st_blocks * BLOCK_BYTES < self._stream.version.size

    def close(self) -> None:
        os.close(self._fd)

    def read(self, position: int, count: int) -> tuple[int, bool]:
        """(bytes, is a hole); data lies in the buffer. The number is compared without the lock: it changes before the first byte does."""
        while True:
            found, is_hole = self._piece(position, count)
            if self._stream.abandoned:
                raise AbandonedError
            if self._stream.version.tier_id == self._tier_id:
                break
            self.close()
            self.reread_chunks += 1
            self._open()
        if found == 0:
            raise OSError(errno.EIO, "the RAM tier holds fewer bytes than the version has")
        return found, is_hole

    def _piece(self, position: int, count: int) -> tuple[int, bool]:
        if self._sparse:
            data = self._seek(position, os.SEEK_DATA, position + count)
            if data > position:
                return min(count, data - position), True
            count = min(count, self._seek(position, os.SEEK_HOLE, position + count) - position)
        return os.preadv(self._fd, [self._buffer[:count]], position), False

    def _seek(self, position: int, whence: int, otherwise: int) -> int:
        try:
            return os.lseek(self._fd, position, whence)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return otherwise  # no data until the end of the file


def _hash_zeros(hasher: xxhash.xxh3_128, count: int) -> None:
    while count:
        step = min(count, len(_ZEROS))
        hasher.update(_ZEROS[:step])
        count -= step
