"""Checksums of versions that wait for the drain: what RAM is to have when their turn comes, also
after a remount.

A stream takes its checksum of the bytes as it reads them. What changed in RAM before that would be
stored as verified. So a version that has waited for a second is read once by one slow thread, and
its checksum is a part of its row; where applications want the processors for their writing, or a
stream is at it, after five. At the close itself it would cost every save a tenth of a second per
gigabyte, and be taken twice of what is streamed at once. A file that somebody has open is left out,
for its bytes may still become others. Nothing here can fail an operation: the stream compares
(`Streamer`).
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from threading import RLock

import trio

from acpfs.backing.health import current_call
from acpfs.checksum import Checksum, hash_zeros
from acpfs.ram.tier import Tier
from acpfs.writeback.arrival import Bell, outcome
from acpfs.writeback.log.ops import Op, Version, VersionState
from acpfs.writeback.log.stages import Stage
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.sources.source import AbandonedError, Source
from acpfs.writeback.streams.bandwidth import SLICE_MAX_BYTES
from acpfs.writeback.streams.give_way import GiveWay

BATCH_OPS = 64
SOON_S = 1.0
WAIT_S = 5.0
"""After so long, and at the latest (if it is not open). What is streamed before costs nothing
here.
"""
LOOK_AGAIN_S = 1.0


class _Reading:
    """See `Source`: nobody judges how long this takes."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.abandoned = False

    def pause(self) -> None:
        """Nothing."""

    def progress(self) -> None:
        """Nothing."""


class WaitingChecksums:
    """One task, one thread at a time."""

    def __init__(self, parts: DrainParts, give_way: GiveWay) -> None:
        self._log = parts.log
        self._tier = parts.tier
        self._lock = parts.lock
        self._listener = parts.listener
        self._pool = parts.calls.streams
        self._section = parts.section
        self._give_way = give_way
        self._bell = Bell()
        self._noted = 0
        self._waiting: deque[tuple[float, Op]] = deque()

    def appended(self, op: Op) -> None:
        """It was logged. What has no bytes wakes nobody: a removal would pay 0.1 ms for it."""
        if _has_bytes(op):
            self._bell.ring()

    async def run(self) -> None:
        """Until cancelled."""
        self._noted = 0
        self._waiting.clear()  # times of an earlier run mean nothing on this run's clock
        while True:
            now = trio.current_time()
            with self._section():
                self._note(now)
                batch = self._due(now)
            if batch:
                await outcome(self._pool.submit("checksum", self._read, batch))
            elif self._waiting:
                await trio.sleep(max(self._waiting[0][0] + SOON_S - now, LOOK_AGAIN_S))
            else:
                await self._bell.heard()

    def _note(self, now: float) -> None:
        new = self._log.since(self._noted)
        self._noted = self._log.last_seq
        self._waiting.extend((now, op) for op in new if _has_bytes(op))

    def _due(self, now: float) -> list[Op]:
        """Some of those that have waited for long enough, but what is streamed or changed now."""
        late = now - WAIT_S
        due = late if self._give_way.is_busy() else now - SOON_S
        found = list[Op]()
        left = list[tuple[float, Op]]()
        while self._waiting and self._waiting[0][0] <= due and len(found) < BATCH_OPS:
            since, op = self._waiting.popleft()
            if self._is_wanted(op):
                if self._may_change(op) or (since > late and _is_streamed(op)):
                    left.append((since, op))
                else:
                    found.append(op)
        self._waiting.extendleft(reversed(left))
        return found

    def _is_wanted(self, op: Op) -> bool:
        version = op.version
        if version is None or self._log.get(op.seq) is not op or version.is_staged:
            return False
        return not (version.digest or version.spilled or self._tier.is_lost(version.tier_id))

    def _may_change(self, op: Op) -> bool:
        return op.stage < Stage.LOGGED or (
            op.version is not None and self._listener.version_of_open_file(op.version)
        )

    def _read(self, batch: list[Op]) -> None:
        """On a thread. Many small ones are one transaction."""
        call = current_call()
        if call is not None:
            call.pause()  # it is not the backing directory that takes time
        found: list[tuple[Op, Version, tuple[int, int], str]] = []
        with mmap.mmap(-1, SLICE_MAX_BYTES) as memory, memoryview(memory) as buffer:
            for op in batch:
                if (version := op.version) is None:
                    continue
                with self._lock:
                    before = version.renewals, version.size
                with suppress(
                    OSError, AbandonedError
                ):  # given up, or moved to the spill directory meanwhile
                    found.append(
                        (op, version, before, self._digest(op, version, before[1], buffer))
                    )
        with self._section():
            for op, version, before, digest in found:
                if (
                    self._is_wanted(op)
                    and not self._may_change(op)
                    and before == (version.renewals, version.size)
                ):
                    version.digest = digest
                    self._log.save_version(version)

    def _digest(self, op: Op, version: Version, size: int, buffer: memoryview) -> str:
        def stand_back() -> None:
            self._give_way.wait(self._log.clock.now(), lambda: self._log.get(op.seq) is not op)

        return digest_in_ram(
            version, size, self._tier, self._lock, buffer, lambda _count: stand_back()
        )


def digest_in_ram(
    version: Version,
    size: int,
    tier: Tier,
    lock: RLock,
    buffer: memoryview,
    before_piece: Callable[[int], None] = lambda _count: None,
) -> str:
    """xxh3-128 of the first bytes of a version, in pieces as large as the buffer; `before_piece`
    gets the size of each.

    "" where none is taken of such holes.

    Raises:
        OSError, AbandonedError: it was given up, or moved to the spill directory meanwhile.
    """
    hasher = Checksum()
    position = 0
    with closing(Source(_Reading(version), tier, lock, buffer, None)) as source:
        while position < size and source.hashes_holes:
            wanted = min(size - position, len(buffer))
            before_piece(wanted)
            count, is_hole = source.read(position, wanted)
            if is_hole:
                hash_zeros(hasher, count)
            else:
                hasher.update(buffer[:count])
            position += count
        return hasher.hexdigest() if source.hashes_holes else ""


def _is_streamed(op: Op) -> bool:
    return op.version is not None and op.version.state is VersionState.STREAMING


def _has_bytes(op: Op) -> bool:
    return op.version is not None and op.version.size > 0 and op.version.is_local
