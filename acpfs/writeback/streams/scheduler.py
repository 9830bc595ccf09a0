"""Who writes the next piece of a large file to the backing directory, and when.

Durable order is a queue: a file is persisted when all that was closed before it is. Eight files
that share the storage alike make the first as late as the last. So the oldest file gets all that it
can use, and a younger one what the older ones leave. `next_piece` is the only brake between a piece
and the storage, and takes into account:

* the order: a writer waits while as many older ones write as are worth it (`width`);
* the storage's hangs: a writer that has been out for a second is passed over, for it may be out for
  ever, and others may lie on servers that answer;
* applications, which go first (`give_way`);
* the limit of bytes per second (`bandwidth`), which is the oldest one's first.

A writer is here from the begin of its stream to its last piece: its fsync uses none of the
bandwidth that pieces want, or is nearly over when it begins. Small files are never asked: many of
them wait for the storage at the same time. Thread-safe; the lock is a leaf.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from acpfs.runtime.given import Runtime
from acpfs.runtime.threads import Event
from acpfs.types import Seq
from acpfs.writeback.streams.bandwidth import SLICE_S, TokenBucket
from acpfs.writeback.streams.give_way import LOOK_AGAIN_S, GiveWay
from acpfs.writeback.streams.width import Width

SILENT_S = 1.0
"""Pieces are as large as what takes less; one that takes so long hangs, or as good as."""
UNDER_WAY_BYTES = 16 << 20
"""What all pieces together have at most. Beside others who write, the storage has a queue: who has
one piece of 2 MiB in it while they have 50 gets as little of what it does.
"""
LATE_S = 0.7 * SILENT_S
"""Where a piece takes so long, the next ones are half as large …"""
SOON_S = 0.2 * SILENT_S
"""… and where it takes no longer than this, twice as large."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Write now."""

    bytes_max: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again."""

    seconds: float
    """After so long; earlier where the bell rings."""


class WatchedStream(Protocol):
    """What a stream tells those who watch it."""

    abandoned: bool

    def pause(self) -> None:
        """What takes time now is not the backing directory."""

    def progress(self) -> None:
        """That is over."""


class LargeFile:
    """One large version that is being written."""

    def __init__(self, seq: Seq, logged_at: float, copy: WatchedStream, bell: Event) -> None:
        self.seq = seq
        self.logged_at = logged_at
        self.copy = copy
        self.bell = bell
        self.has_turn = False
        """For a piece that it has not asked for yet."""
        self.since: float | None = None
        """When it was last seen here, if it is out with a piece; None: it waits for its turn."""

    def is_heard(self, now: float) -> bool:
        """Whether it is not out for so long that nobody knows when it will be back."""
        return self.since is None or now - self.since <= SILENT_S


class Scheduler:
    """See above."""

    def __init__(
        self, give_way: GiveWay, bytes_per_s: int, streams_max: int, runtime: Runtime
    ) -> None:
        """`bytes_per_s` 0: no limit."""
        self._bucket = TokenBucket(bytes_per_s, runtime)
        self._give_way = give_way
        self._width = Width(streams_max)
        self._now = runtime.clock.now
        self._event = runtime.threads.event
        self._lock = threading.Lock()
        self._writers: dict[WatchedStream, LargeFile] = {}
        self._under_way_bytes = UNDER_WAY_BYTES

    @property
    def width(self) -> int:
        """How many write at a time now."""
        return self._width.now

    def set_streams(self, count: int) -> None:
        """No more than these write at a time from now on."""
        with self._lock:
            self._width.set_most(count)
            self._ring()

    def set_bandwidth(self, bytes_per_s: int) -> None:
        """Whoever waits feels it at once."""
        self._bucket.set_rate(bytes_per_s)
        self.wake()

    def open(self) -> None:
        """The limit of bandwidth is in force again."""
        self._bucket.open()

    def close(self) -> None:
        """There is no limit until `open`, and all streams have been given up."""
        self._bucket.close()
        self.wake()

    def wake(self) -> None:
        """A stream has been given up."""
        with self._lock:
            self._ring()

    def comes(self, seq: Seq, logged_at: float, copy: WatchedStream) -> None:
        """A large version is about to be written: younger ones wait for it from now on."""
        with self._lock:
            self._add(seq, logged_at, copy).since = self._now()

    def gone(self, copy: WatchedStream) -> None:
        """It needs no turn any more, if it did."""
        with self._lock:
            if self._writers.pop(copy, None) is not None:
                self._ring()  # the next one's turn has come

    @contextlib.contextmanager
    def writing(self, seq: Seq, logged_at: float, copy: WatchedStream) -> Iterator[LargeFile]:
        """From the first piece of a version to its last; begins when the first one's turn has
        come.
        """
        with self._lock:
            writer = self._add(seq, logged_at, copy)
        try:
            self.await_turn(writer)
            writer.has_turn = True
            yield writer
        finally:
            self.gone(copy)

    def _add(self, seq: Seq, logged_at: float, copy: WatchedStream) -> LargeFile:
        if not self._writers:
            self._width.begin()
        return self._writers.setdefault(copy, LargeFile(seq, logged_at, copy, self._event()))

    def next_piece(self, writer: LargeFile, now: float) -> Piece | Wait:
        """What the writer may do now; changes nothing."""
        older = [
            one for one in self._writers.values() if one.seq < writer.seq and one.is_heard(now)
        ]
        if len(older) >= self._width.now:
            # Nobody rings for one that falls silent.
            silent_at = min((one.since for one in older if one.since is not None), default=now)
            return Wait(silent_at + SILENT_S - now + LOOK_AGAIN_S)
        if self._give_way.should(writer.logged_at):
            return Wait(LOOK_AGAIN_S)
        debt_s = self._bucket.debt_s()
        if debt_s:
            return Wait(debt_s)
        if self._bucket.bytes_per_s and any(one.since is None for one in older):
            return Wait(SLICE_S)  # what may be written is for those that have waited for longer
        return Piece(self._piece_bytes())

    def _piece_bytes(self) -> int:
        least = self._bucket.slice_bytes()
        if self._bucket.bytes_per_s:
            return least
        return max(least, self._under_way_bytes // self._width.now)

    def await_turn(self, writer: LargeFile) -> int:
        """Return how many bytes the writer may write, when it may; at once if it was given up."""
        if not writer.has_turn:
            turn = self._look(writer)
            if turn is not None:
                writer.copy.pause()
                while turn is not None:
                    writer.bell.wait(turn.seconds)
                    turn = self._look(writer)
                writer.copy.progress()
        writer.has_turn = False
        return self._piece_bytes()

    def _look(self, writer: LargeFile) -> Wait | None:
        """None: go on."""
        with self._lock:
            now = self._now()
            turn = self.next_piece(writer, now)
            if isinstance(turn, Piece) or writer.copy.abandoned:
                writer.since = now
                return None
            writer.since = None
            writer.bell.clear()
            return turn

    def wrote(self, writer: LargeFile, count: int) -> None:
        """The writer's piece is there; so many bytes of it went to the storage (0: a hole)."""
        with self._lock:
            now = self._now()
            if not writer.is_heard(now):
                self._width.begin()  # the storage stood still
            if writer.since is not None and count:
                self._took(now - writer.since)
            writer.since = now
            heard = sum(one.is_heard(now) for one in self._writers.values())
            if count and self._width.wrote(count, heard, now):
                self._ring()

    def _took(self, seconds: float) -> None:
        """A piece did."""
        if seconds > LATE_S:
            self._under_way_bytes = max(self._under_way_bytes // 2, self._bucket.slice_bytes())
        elif seconds < SOON_S:
            self._under_way_bytes = min(self._under_way_bytes * 2, UNDER_WAY_BYTES)

    def pay(self, count: int) -> None:
        """Before so many bytes of a large file are written: its next piece waits for that."""
        self._bucket.take_nowait(count)

    def pay_small(self, copy: WatchedStream, count: int) -> None:
        """The same for a small file, which has no turns: wait here."""
        if self._bucket.bytes_per_s:
            copy.pause()
            self._bucket.take(count)
            copy.progress()

    def stand_back(self, copy: WatchedStream, logged_at: float) -> None:
        """For who reads a large file, and writes nothing: applications go first."""
        if self._give_way.should(logged_at):
            copy.pause()
            self._give_way.wait(logged_at, lambda: copy.abandoned)
            copy.progress()

    def slice_bytes(self) -> int:
        """What is read at a time."""
        return self._bucket.slice_bytes()

    def _ring(self) -> None:
        """Each looks for itself whether it is its turn: there are few."""
        for writer in self._writers.values():
            if writer.since is None:
                writer.bell.set()
