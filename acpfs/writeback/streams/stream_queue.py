"""Which version is streamed next: oldest first, closed files before open ones, large ones only on
their share of the threads.

Used under the file system's lock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from acpfs.runtime.clock import Clock
from acpfs.types import Seq
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, Version, VersionState
from acpfs.writeback.log.stages import Stage
from acpfs.writeback.streams.streams import SMALL_BYTES_MAX, Stream

SMALL_PER_STREAM = 4
"""Small files wait for the backing directory's fsync, not for its bandwidth: so many more of them
at a time …
"""
SMALL_STREAMS_MAX = 64
"""… but no more than this, unless there are more streams than this."""
QUICK_S = 0.0003
"""A backing directory that makes and flushes a small file in this time is not waited for: the
interpreter is, and …
"""
QUICK_STREAMS = 4
"""… more threads than this only take it from each other (16 KiB to a tmpfs: 250 us of processor
time a file with 4, 290 to 340 with 32).
"""
QUICK_FOR_S = 0.25
"""After the last file that was quick: then those under way wait for something after all, and others
may have more luck.
"""
FORGET_SHARE = 1.5
"""By which the least time grows with each file: a few slow ones in a row outweigh a quick one,
where only some files are quick.
"""
LOOK_AHEAD = 64
"""How many older versions are passed over for one that is closed and fits."""


class StreamQueue:
    """Versions that wait to be streamed, and those that are."""

    def __init__(
        self,
        log: OperationLog,
        due: dict[Seq, float],
        is_open: Callable[[Version], bool],
        streams_max: int,
        clock: Clock,
    ) -> None:
        """`due`: when operations that failed are to be tried again.

        `is_open`: whether the version's file is still being written.
        """
        self._log = log
        self._due = due
        self._is_open = is_open
        self._now = clock.now
        self.set_streams(streams_max)
        self.active: dict[Seq, Stream] = {}
        self._large: set[Stream] = set()
        self._heap: list[Seq] = []
        self._sleeping: list[tuple[float, Seq]] = []
        self._least_s = math.inf
        """What the backing directory needs for a small file: of those lately, the least, for there
        the interpreter did not hold it up.
        """
        self._quick_until = 0.0
        """Monotonic time, seconds."""

    def set_streams(self, streams_max: int) -> None:
        """Large files at a time from now on."""
        self.streams_max = streams_max
        self.threads_max = max(streams_max, min(SMALL_STREAMS_MAX, streams_max * SMALL_PER_STREAM))

    def add(self, op: Op) -> None:
        """The operation's version is to be streamed, when it is due."""
        due = self._due.get(op.seq)
        if due is None:
            heapq.heappush(self._heap, op.seq)
        else:
            heapq.heappush(self._sleeping, (due, op.seq))

    def wake_all(self) -> None:
        """Nothing is to wait for its time any longer."""
        for _due, seq in self._sleeping:
            heapq.heappush(self._heap, seq)
        self._sleeping.clear()

    def next_due(self, now: float) -> float:
        """When to look again, on trio's clock, as is `now`."""
        due = self._sleeping[0][0] if self._sleeping else math.inf
        return (
            min(due, now + QUICK_FOR_S)
            if self._heap and self._small_max() < self.threads_max
            else due
        )

    def next(self, now: float, *, small: bool = True, large: bool = True) -> Op | None:
        """Take the next one that may start; of small ones and large ones, only those that are
        wanted.
        """
        while self._sleeping and self._sleeping[0][0] <= now:
            heapq.heappush(self._heap, heapq.heappop(self._sleeping)[1])
        passed: list[Op] = []
        put_back: list[Op] = []
        chosen: Op | None = None
        while (
            self._heap
            and chosen is None
            and len(passed) + len(put_back) < LOOK_AHEAD
            and self._has_room(0)
        ):
            op = self._log.get(heapq.heappop(self._heap))
            if op is None or not self._is_waiting(op):
                continue
            assert op.version is not None
            if op.stage < Stage.LOGGED or not (
                large if op.version.size > SMALL_BYTES_MAX else small
            ):
                put_back.append(op)
            elif self._has_room(op.version.size) and not self._is_open(op.version):
                chosen = op
            else:
                passed.append(op)
        if chosen is None:
            chosen = next(
                (op for op in passed if op.version is not None and self._has_room(op.version.size)),
                None,
            )
        for op in passed + put_back:
            if op is not chosen:
                heapq.heappush(self._heap, op.seq)
        return chosen

    def _is_waiting(self, op: Op) -> bool:
        version = op.version
        return (
            version is not None
            and version.state is VersionState.COMPLETE
            and not op.parked
            and op.seq not in self.active
        )

    def _has_room(self, size: int) -> bool:
        if size > SMALL_BYTES_MAX and len(self._large) >= self.streams_max:
            return False
        if len(self.active) >= self.threads_max:
            return False
        return size > SMALL_BYTES_MAX or len(self.active) - len(self._large) < self._small_max()

    def _small_max(self) -> int:
        """Small files at a time."""
        return (
            min(self.threads_max, QUICK_STREAMS)
            if self._now() < self._quick_until
            else self.threads_max
        )

    def start(self, op: Op) -> Stream:
        """The operation's version is being streamed from now on."""
        assert op.version is not None
        stream = Stream(op, op.version)
        op.version.state = VersionState.STREAMING
        op.version.streamed_bytes = 0
        self.active[op.seq] = stream
        if op.version.size > SMALL_BYTES_MAX:
            self._large.add(stream)
        return stream

    def end(self, stream: Stream) -> None:
        """The stream's thread is free again."""
        if stream.backing_s is not None and stream.version.size <= SMALL_BYTES_MAX:
            self._took(stream.backing_s)
        if self.active.get(stream.op.seq) is stream:
            del self.active[stream.op.seq]
        self._large.discard(stream)  # its size may be another by now

    def _took(self, seconds: float) -> None:
        self._least_s = min(seconds, self._least_s * FORGET_SHARE)
        self._quick_until = self._now() + QUICK_FOR_S if self._least_s < QUICK_S else 0.0
