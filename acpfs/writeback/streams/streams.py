"""Streams: one version's bytes from RAM (or from where they left RAM for) into a staging file,
hashed on the way.

A copy runs in one thread of its own from begin to end and takes the file system's lock only for
moments. Where the bytes are, and whether they were moved meanwhile, is `source`'s business. After
any error the staging file is given up, and the next attempt starts with a new one: after a failed
fsync nobody knows which pages the old one lacks.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from acpfs.backing.attributes import DIGEST_XATTR
from acpfs.backing.health import CallInFlight, current_call
from acpfs.backing.lower import OVERFLOW_PREFIX, LowerPath, LowerStat, Note
from acpfs.checksum import Checksum, hash_zeros, of_reads
from acpfs.errors import FULL_ERRNOS
from acpfs.types import VersionId
from acpfs.writeback.evidence.verify import MisreadError, OnlyCopyError, digest_of
from acpfs.writeback.log.ops import Metadata, Op, OpKind, Version, VersionState
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.sources.source import AbandonedError, Source
from acpfs.writeback.sources.spill import Spill
from acpfs.writeback.streams.bandwidth import SLICE_MAX_BYTES
from acpfs.writeback.streams.equal import EqualFiles, linked_name
from acpfs.writeback.streams.room_there import RoomThere
from acpfs.writeback.streams.scheduler import UNDER_WAY_BYTES, PieceWriter, Scheduler
from acpfs.writeback.streams.spares import Growth, NotGrownError, Spare, Spares

SMALL_BYTES_MAX = 1 << 20
"""Up to here a file costs more for its create and fsync than for its bytes, and many are copied at
a time.
"""


CHANGING_LOOK_S = 0.02
"""So often it is looked whether a write is over behind which a file is marked."""
CHANGING_LOOKS_MAX = 5
"""Then an application holds it up, and the stream gives its place to others."""


class HeldUpError(AbandonedError):
    """An application holds up a write to the version's file: nothing that is copied now would be
    the version.
    """


class Stream:
    """One attempt to stage one version."""

    def __init__(self, op: Op, version: Version) -> None:
        self.op = op
        self.version = version
        self.copied_renewals = version.renewals
        """`renewals` of the version when its bytes were copied: more since say that the file in RAM
        has others.
        """
        self.abandoned = False
        """Set by the engine, under the lock."""
        self.call: CallInFlight | None = None
        """How the call looks to the health check: told of progress, for it lasts as long as the
        file is large.
        """
        self.written_bytes = 0
        """Of a small file, to be counted when the lock is had anyway."""
        self.following: Stream | None = None
        """What its thread goes on with when it is staged."""
        self.made_s: float | None = None
        """How long the backing directory took to make its staging file; None: it has none of its
        own.
        """
        self.backing_s: float | None = None
        """The same, with the flush; None: not flushed yet."""

    def progress(self) -> None:
        """The backing directory answered."""
        if self.call is not None:
            self.call.progress()

    def pause(self) -> None:
        """What takes time now is not the backing directory."""
        if self.call is not None:
            self.call.pause()


class Pieces:
    """A version's bytes, piece by piece, hashed on the way."""

    def __init__(
        self, source: Source, buffer: memoryview, growth: Growth, size: int, hasher: Checksum
    ) -> None:
        """`size`: bytes in all; `buffer`: where the source reads to."""
        self._source = source
        self._buffer = buffer
        self._growth = growth
        self._size = size
        self._hasher = hasher
        self.position = 0
        """Of what comes next."""

    def take(self, bytes_max: int) -> tuple[memoryview, int]:
        """Read so much, or less; returns what of it the staging file lacks, and where that belongs.

        Nothing is returned of a hole, and of what the staging file was made with.
        """
        stop = min(self._size, self.position + bytes_max, self.position + len(self._buffer))
        start = self.position
        filled = 0
        is_hole = False
        while self.position < stop and not (is_hole and filled):
            until = min(stop, self._growth.until(self.position, self._size))
            # In slices, which the hash finds in the processor's cache.
            wanted = min(until - self.position, SLICE_MAX_BYTES)
            count, is_hole = self._source.read(self.position, wanted, filled)
            if not is_hole:
                self._hasher.update(self._buffer[filled : filled + count])
            elif self._source.hashes_holes:
                hash_zeros(self._hasher, count)
            if not is_hole and self.position >= self._growth.kept_bytes:
                start = start if filled else self.position
                filled += count
            self.position += count
            if self.position == self._growth.until(self.position - count, self._size):
                self._growth.passed(self.position, self._hasher)
        return self._buffer[:filled], start


class Streamer:
    """Carries out streams; `run` is called in stream threads."""

    def __init__(
        self,
        parts: DrainParts,
        scheduler: Scheduler,
        discard: Callable[[str], None],
        spares: Spares,
        spill: Spill | None,
        equal: EqualFiles,
        on_staged: Callable[[Stream], None],
    ) -> None:
        """`scheduler`: of all streams; `discard`: removes a staging file, now or later.

        `spares`: what a version may be appended to. `spill`: where versions are that have left RAM.
        `equal`: finds what need not be streamed. `on_staged`: told under the lock, in the
        transaction that says that a version is staged.
        """
        self._parts = parts
        self.counters = parts.counters
        self._listener = parts.listener
        self._lower = parts.lower
        self._tree = parts.tree
        self._tier = parts.tier
        self._log = parts.log
        self._state = parts.state
        self._lock = parts.lock
        self._now = parts.runtime.clock.now
        self._pause = parts.runtime.threads.event()
        self._chance = parts.runtime.chance
        self._scheduler = scheduler
        self._discard = discard
        self._spares = spares
        self._spill = spill
        self._equal = equal
        self._on_staged = on_staged
        self._room = RoomThere(parts.lower, parts.tier)
        self._buffers: list[memoryview] = []
        self._wide: list[mmap.mmap] = []
        self._told_short: set[VersionId] = set()
        """Versions that were parked because their staging file is too short."""
        self.applied: dict[int, str] = {}
        """Attributes that a staged version's file was given, by version; what was folded in later,
        the commit adds.
        """

    def run(self, stream: Stream) -> None:
        """Stage the version.

        Raises:
            AbandonedError: nobody needs it any more, or (`HeldUpError`) it cannot be had now.
            OSError: the backing directory's, or EIO when the bytes are not what they should be.
        """
        stream.call = current_call()
        if not stream.version.is_local:
            self._seal(stream)
            return
        name = self._lower.stage_near(
            f"{stream.version.vid}-{self._chance.token(6)}", self._directory(stream.op)
        )
        if self._take_equal(stream, linked_name(name)):
            return
        self._recall(stream)
        growth = self._spares.take(stream.version)
        if growth.spare is not None:
            if self._append(stream, growth, growth.spare):
                return
            growth = self._spares.take(stream.version)
        try:
            begun = self._now()
            fd = self._lower.create_staging(name)
            stream.made_s = self._now() - begun
            self._fill(stream, name, fd, growth)
        except BaseException:
            self._discard(name)
            raise

    def _recall(self, stream: Stream) -> None:
        if path := self._parts.path(stream.op.ino):
            self._spares.recall(stream.version, path)

    def _directory(self, op: Op) -> LowerPath:
        """Where the file is to lie, or the nearest directory above that is there already."""
        with self._lock:
            place = self._tree.place(op.ino)
            directory = op.parent if place is None else place[0]
            while (path := self._tree.path(directory)) is None:
                made = next(
                    (
                        pending
                        for pending in self._log.pending_of(directory)
                        if pending.kind is OpKind.MKDIR
                    ),
                    None,
                )
                if made is None:
                    return ()
                directory = made.parent
            return path

    def _append(self, stream: Stream, growth: Growth, spare: Spare) -> bool:
        """Make the version of an earlier one's file, if it is that and more; returns whether it
        did.
        """
        try:
            foreign = self._lower.xattrs(self._lower.staging_path(spare.name)).keys()
            fd = self._spares.open(spare)
        except OSError:  # nothing is lost but time
            self._discard(spare.name)
            return False
        try:
            self._fill(stream, spare.name, fd, growth, foreign)
        except NotGrownError:
            self._discard(spare.name)
            return False
        except AbandonedError:
            self._give_back(stream, spare)
            raise
        except BaseException:
            self._discard(spare.name)
            raise
        return True

    def _give_back(self, stream: Stream, spare: Spare) -> None:
        try:
            self._spares.give_back(stream.version.ino, spare)
        except OSError:
            self._discard(spare.name)

    def _fill(
        self,
        stream: Stream,
        name: str,
        fd: int,
        growth: Growth,
        former: Iterable[bytes] | None = None,
    ) -> None:
        """All that a staging file needs; closes the descriptor.

        `former`: an older version's xattrs, where it is made of one.
        """
        try:
            self._room.ask(stream.op, stream.version, fd)
            digest = self._copy(stream, fd, growth)
            st, applied = self._finish(stream, fd, digest, former)
        except BaseException as error:
            self._room.ended(stream.version, error)
            if former is None and isinstance(error, OSError) and error.errno in FULL_ERRNOS:
                with contextlib.suppress(OSError):
                    # a client of MooseFS keeps the bytes of a file that it removed for eleven
                    # minutes
                    self._lower.truncate(fd, 0)
            with contextlib.suppress(OSError):
                self._lower.close(fd)
            raise
        self._room.ended(stream.version, None)
        self._lower.close(fd)
        if self._parts.settings.verify_after_write and digest:
            self._verify(stream, name, digest)
        self._staged(stream, name, st.ino, digest, applied, (growth, st))

    def _take_equal(self, stream: Stream, name: str) -> bool:
        """Have a file that is there already as the staging file, if it has the very bytes.

        Its attributes wait for the commit.
        """
        candidate = self._equal.candidate(stream.op, stream.version)
        if candidate is None:
            return False
        stream.pause()
        digest = self._copy(stream, None, Growth())
        stream.progress()
        if digest != candidate.digest:
            return False
        try:
            ino = self._equal.link(candidate, name)
            if ino and self._parts.settings.verify_after_write:
                self._verify(stream, name, digest)
            if ino:
                self._staged(stream, name, ino, digest, None)
        except BaseException:
            self._discard(name)
            raise
        if not ino:
            self._discard(name)
            return False
        with self._lock:
            self.counters.equal_files += 1
            self.counters.equal_bytes += stream.version.size
        return True

    def _seal(self, stream: Stream) -> None:
        """Finish a staging file that an application wrote itself, because RAM had no room: its
        checksum is of what it reads back.
        """
        name = stream.version.staging_name
        with self._lock:
            if not self._listener.still_frozen(stream.version):
                raise OSError(errno.EAGAIN, "another descriptor's write to it is under way")
        try:
            fd = self._lower.open_staging(name)
            try:
                self._fit(stream, fd)
                self._sync_only_copy(fd)
                digest = self._hash(stream, fd)
                st, applied = self._finish(stream, fd, digest)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._lower.close(fd)
                raise
            self._lower.close(fd)
            self._staged(stream, name, st.ino, digest, applied)
        except AbandonedError:
            with self._lock:
                # Or the worker ends: then it is all that the next one has of the file.
                is_given_up = self._log.get(stream.op.seq) is not stream.op
                keeps = not is_given_up or self._listener.keeps_staging(stream.version)
            if not keeps:
                self._discard(name)
            raise

    def _fit(self, stream: Stream, fd: int) -> None:
        """Give the staging file the length that was logged: the log is what the application was
        told, and no later try would mend it.

        Longer: a write whose caller got no answer (killed with its worker) or an error. Nobody
        writes now: the engine began after the calls of killed workers were over, and a sealed file
        is changed only after it is persisted. Shorter: bytes are gone that are nowhere else. That
        is told once; who then asks for another try gets zeros in their place.
        """
        with self._lock:
            if stream.abandoned:
                raise AbandonedError
            version = stream.version
        found = self._lower.stat_fd(fd).size
        if found > version.size and not version.staging_name.startswith(OVERFLOW_PREFIX):
            with self._lock, self._state.step():
                version.size = found
                self._log.save_version(version)
        if found < version.size and version.vid not in self._told_short:
            self._told_short.add(version.vid)
            raise OnlyCopyError(
                errno.EIO, f"the staging file has only {found} of {version.size} bytes"
            )
        if found != version.size:
            self._lower.truncate(fd, version.size)
        self._told_short.discard(version.vid)

    def _sync_only_copy(self, fd: int) -> None:
        try:
            self._lower.sync(fd)
        except OSError as error:
            raise OnlyCopyError(error.errno, error.strerror) from error

    def _hash(self, stream: Stream, fd: int) -> str:
        with self._buffer(max(1, stream.version.size)) as buffer:
            return of_reads(
                partial(self._lower.read, fd), buffer, passed=lambda _count: stream.progress()
            )[0]

    # -- bytes

    @contextlib.contextmanager
    def _buffer(self, size: int, *, whole_turns: bool = False) -> Iterator[memoryview]:
        """A small one is made on the spot; large ones are kept, as many as there were streams at a
        time.

        `whole_turns`: it takes all that may be under way, and only the oldest files come to use as
        much. One of those is kept, and the kernel may have its memory back.
        """
        if size <= SMALL_BYTES_MAX:
            yield memoryview(bytearray(size))
            return
        if whole_turns and size > SLICE_MAX_BYTES:
            with self._wide_buffer() as wide:
                yield wide
            return
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, SLICE_MAX_BYTES))
        try:
            yield buffer
        finally:
            self._buffers.append(buffer)

    @contextlib.contextmanager
    def _wide_buffer(self) -> Iterator[memoryview]:
        """Its pages are there already, as a rule: to have them made anew for each file costs a
        tenth of what its copy does.
        """
        try:
            memory = self._wide.pop()
        except IndexError:
            memory = mmap.mmap(-1, UNDER_WAY_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            yield memoryview(memory)
        finally:
            if not self._wide:
                memory.madvise(mmap.MADV_FREE)
                self._wide.append(memory)

    def _copy(self, stream: Stream, fd: int | None, growth: Growth) -> str:
        """Copy until the bytes that were copied are the version's; returns their checksum, "" where
        none is taken of such holes.

        `fd` None: nowhere, for the checksum only.

        Raises:
            NotGrownError: it is not what the file has, and more.
            OnlyCopyError: twice they were not those of its checksum. Told once: who asks for
                another try gets what is there.
            HeldUpError: an application holds up a write to its file.
        """
        differed = False
        while True:
            with self._lock:  # once, for small files stand in line here
                if self._listener.may_have_changed(stream.version):
                    stream.version.digest = ""
                renewals = stream.version.renewals
                size = stream.version.size
                is_changing = self._listener.is_changing(stream.version)
            if is_changing:
                self._await_writes(stream)
                continue
            digest = self._copy_once(stream, fd, growth)
            with self._lock:
                still = (
                    self._listener.still_frozen(stream.version)
                    and stream.version.renewals == renewals
                )
                if still and (not digest or stream.version.digest in ("", digest)):
                    stream.copied_renewals = renewals
                    return digest  # nearly always: no further turn at the lock for that
            still = still or self._has_only_grown(stream, size, digest)
            with self._lock, self._state.step():
                if still:
                    if not digest or stream.version.digest in ("", digest):
                        stream.copied_renewals = stream.version.renewals
                        return digest
                    if differed:
                        stream.version.digest = ""
                        self._log.save_version(stream.version)
                        raise OnlyCopyError(
                            errno.EIO, "its bytes in RAM are not those that were closed"
                        )
                    differed = True
                self.counters.restarted_streams += 1
            if fd is not None:
                self._lower.truncate(fd, growth.kept_bytes)

    def _await_writes(self, stream: Stream) -> None:
        """Copy nothing while a write to the file is under way: it would be copied again and again.

        Raises:
            HeldUpError: that takes long.
        """
        stream.pause()
        for _ in range(CHANGING_LOOKS_MAX):
            if not self._is_changing(stream):
                stream.progress()
                return
            self._pause.wait(CHANGING_LOOK_S)
        raise HeldUpError

    def _is_changing(self, stream: Stream) -> bool:
        with self._lock:
            if stream.abandoned:
                raise AbandonedError  # before the step: what ends one is an answer, or a bug
            with self._state.step():
                if self._listener.is_changing(stream.version):
                    return True
                # what is copied from here on is of after the mark
                self._listener.still_frozen(stream.version)
                return False

    def _has_only_grown(self, stream: Stream, size: int, digest: str) -> bool:
        """Whether those who write to the file unseen have left alone what was copied of it; then
        that is the version.

        A log would else be copied for as long as somebody has something to say. That its
        descriptors append is no proof: their flags can be changed. But bytes that are still the
        same after all of them were read have been there at one moment.
        """
        with self._lock:
            if (
                not digest
                or not self._listener.only_appended(stream.version)
                or stream.version.size < size
            ):
                return False
        if self._copy_once(stream, None, Growth(), size) != digest:
            return False
        with self._lock:
            stream.version.size = size
        return True

    def _copy_once(
        self, stream: Stream, fd: int | None, growth: Growth, first_bytes: int | None = None
    ) -> str:
        """`first_bytes`: no more than these."""
        hasher = Checksum()
        end = growth.kept_bytes
        hashed = True
        size = stream.version.size if first_bytes is None else first_bytes
        if size < end:
            raise NotGrownError
        if size:
            with (
                # The turn comes first: a file in RAM that is open keeps its room, also where the
                # version moves to the spill directory meanwhile.
                self._turns(stream, size, fd) as writer,
                self._buffer(size, whole_turns=writer is not None) as buffer,
                contextlib.closing(self._source(stream, buffer)) as source,
            ):
                hashed = source.hashes_holes
                if size - end > SMALL_BYTES_MAX and fd is not None:
                    self._lower.expect_bulk(fd)
                pieces = Pieces(source, buffer, growth, size, hasher)
                while pieces.position < size:
                    data, position = pieces.take(self._turn(stream, size, writer))
                    if data and fd is not None:
                        self._write(stream, fd, data, position, writer)
                        end = position + len(data)
                    if writer is not None:
                        self._scheduler.wrote(writer, len(data))
                    stream.version.streamed_bytes = pieces.position if fd is not None else 0
                self._count_reread(source.reread_chunks)
                if source.spilled and self._spill is not None:
                    self._spill.check(stream.version, hasher.hexdigest())
        if end < size and fd is not None:
            self._lower.truncate(fd, size)
        return hasher.hexdigest() if hashed else ""

    def _count_reread(self, chunks: int) -> None:
        if chunks:
            with self._lock:
                self.counters.restarted_streams += chunks

    def _source(self, stream: Stream, buffer: memoryview) -> Source:
        return Source(stream, self._tier, self._lock, buffer, self._spill)

    def _turns(
        self, stream: Stream, size: int, fd: int | None
    ) -> contextlib.AbstractContextManager[PieceWriter | None]:
        """A large file is written when its turn comes."""
        if size <= SMALL_BYTES_MAX or fd is None:
            return contextlib.nullcontext()
        return self._scheduler.writing(stream.op.seq, stream.op.logged_at, stream)

    def _turn(self, stream: Stream, size: int, writer: PieceWriter | None) -> int:
        """Wait until the next piece may be read, and written; how many bytes it may have."""
        if writer is not None:
            return self._scheduler.await_turn(writer)
        if size > SMALL_BYTES_MAX:
            self._scheduler.stand_back(stream, stream.op.logged_at)
        return self._scheduler.slice_bytes()

    def _write(
        self, stream: Stream, fd: int, data: memoryview, position: int, writer: PieceWriter | None
    ) -> None:
        if writer is None:
            self._scheduler.pay_small(stream.op.seq, stream, len(data))
        done = 0
        while done < len(data):
            count = self._lower.write(fd, data[done:], position + done)
            if count <= 0:
                raise OSError(errno.EIO, "the backing directory took no bytes")
            done += count
        stream.progress()
        if stream.version.size <= SMALL_BYTES_MAX:
            stream.written_bytes += done
            return
        self._lower.begin_write_out(fd, position, done)
        with self._lock:
            self.counters.streamed_bytes += done

    # -- attributes and the end

    def _finish(
        self, stream: Stream, fd: int, digest: str, former: Iterable[bytes] | None = None
    ) -> tuple[LowerStat, str]:
        """Attributes, fsync, size; attributes that change meanwhile are given again.

        Returns what it is now, and the attributes given.
        """
        while True:
            with self._lock:
                applied = stream.op.meta.to_json()
                self.counters.streamed_bytes += stream.written_bytes
                stream.written_bytes = 0
            self._lower.apply_fd(fd, self._attributes(applied, digest, former))
            begun = self._now()
            self._lower.sync(fd)
            if stream.made_s is not None:
                stream.backing_s = stream.made_s + self._now() - begun
            stream.progress()
            with self._lock:
                if applied == stream.op.meta.to_json():
                    break
        st = self._lower.stat_fd(fd)
        if st.size != stream.version.size:
            raise OSError(errno.EIO, f"staging file has {st.size} bytes, not {stream.version.size}")
        if st.size > SMALL_BYTES_MAX:
            self._lower.forget_pages(fd)  # the content is in RAM once already
        return st, applied

    def _attributes(self, applied: str, digest: str, former: Iterable[bytes] | None) -> Metadata:
        meta = Metadata.from_json(applied)
        for name in former or ():
            meta.xattrs.setdefault(name, None)
        if self._lower.features.xattrs and digest:
            meta.xattrs[DIGEST_XATTR] = Note(
                digest, -1 if meta.mtime_ns is None else meta.mtime_ns
            ).encode()
        elif self._lower.features.xattrs and former is not None:
            meta.xattrs[DIGEST_XATTR] = None
        return meta

    def _verify(self, stream: Stream, name: str, digest: str) -> None:
        found, _size = digest_of(self._lower, self._lower.staging_path(name), stream.progress)
        equal = found == digest
        with self._lock:
            self.counters.verified_files += equal
            self.counters.verify_failures += not equal
        if not equal:
            raise MisreadError(errno.EIO, "what was written reads back differently")

    def _staged(
        self,
        stream: Stream,
        name: str,
        staging_ino: int,
        digest: str,
        applied: str | None,
        grown: tuple[Growth, LowerStat] | None = None,
    ) -> None:
        with self._lock:
            if stream.abandoned:
                raise AbandonedError
            # The engine commits when it hears of this; with many small files of many streams at
            # once. Killed before, this stream is made again, as if it had not come so far.
            with self._state.joining_step():
                version = stream.version
                version.staging_name = name
                version.staging_ino = staging_ino
                # A version that was written to since it was copied has none, as it would have if
                # that had come a moment later: should the staging file be lost, what RAM has is
                # right, though it is something else.
                is_as_copied = version.renewals == stream.copied_renewals
                version.digest = digest if is_as_copied else ""
                version.state = VersionState.STAGED
                if grown is not None:
                    self._spares.staged(version, grown[0], grown[1])
                if applied is not None:
                    self.applied[version.vid] = applied
                self._log.save_version(version)
                self._on_staged(stream)
