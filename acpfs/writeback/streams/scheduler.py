"""Who writes the next piece of a large file to the backing directory, and when.

Durable order is a queue: a file is persisted when all that was closed before it is. Eight files
that share the storage alike make the first as late as the last. So the oldest file gets all that it
can use, and a younger one what the older ones leave. `next_piece` is the only brake between a piece
and the storage, and takes into account:

* the order: a writer waits while as many older ones write as are worth it (`width`);
* the storage's hangs: a writer that has been out for a second, and for twice as long as others are,
  is passed over, for it may be out for ever, and others may lie on servers that answer;
* applications, which go first (`give_way`);
* the limit of bytes per second (`bandwidth`), which is the oldest one's first, large or small.

A writer is here from the begin of its stream to its last piece: its fsync uses none of the
bandwidth that pieces want, or is nearly over when it begins. Small files have no turns, for many of
them wait for the storage at the same time; where there is a limit, they are here while they lack
bytes of it. Thread-safe; the lock is a leaf, and held over nothing that reads a file.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from acpfs.runtime.given import Runtime
from acpfs.runtime.threads import Event
from acpfs.types import Seq
from acpfs.writeback.streams.bandwidth import TokenBucket
from acpfs.writeback.streams.give_way import LOOK_AGAIN_S, GiveWay
from acpfs.writeback.streams.width import Width

SILENT_S = 1.0
"""One that takes so long, and more than twice as long as the last piece took, hangs, or as good
as.
"""
UNDER_WAY_BYTES = 64 << 20
"""What all pieces together have at most, and to begin with. A storage that others write to has a
queue, and who has one byte in it for three of theirs gets a quarter of what it does: a `cp` has
48 MiB there and more, all that its page cache may keep back.
"""
LATE_S = 2.0
"""Where pieces take so long, the next ones have so many bytes as take this long. It needs two that
began one after the other: the first may have hung …
"""
SOON_S = 0.5
"""… and where one takes no longer than this, the next has twice as many."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Write now."""

    bytes_max: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again."""

    seconds: float
    """After so long; earlier where the bell rings."""
    is_short: bool = False
    """The limit of bytes per second is all that it waits for."""


class WatchedStream(Protocol):
    """What a stream tells those who watch it."""

    abandoned: bool

    def pause(self) -> None:
        """What takes time now is not the backing directory."""

    def progress(self) -> None:
        """That is over."""


class PieceWriter:
    """One version that is being written: a large one, or a small one that lacks bytes of the
    limit.
    """

    def __init__(self, seq: Seq, logged_at: float, copy: WatchedStream, bell: Event) -> None:
        self.seq = seq
        self.logged_at = logged_at
        self.copy = copy
        self.bell = bell
        self.has_turn = False
        """For a piece that it has not asked for yet."""
        self.since: float | None = None
        """When it was last seen here, if it is out with a piece; None: it waits for its turn."""
        self.is_short = False
        """It waits for bytes of the limit, and for nothing else: nobody younger has any."""
        self.granted_bytes = 0
        """For its piece; all of them are taken from the limit already."""

    def is_heard(self, heard_since: float) -> bool:
        """Whether it is not out for so long that nobody knows when it will be back."""
        return self.since is None or self.since >= heard_since


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
        self._writers: dict[WatchedStream, PieceWriter] = {}
        self._small: dict[WatchedStream, PieceWriter] = {}
        self._under_way_bytes = UNDER_WAY_BYTES
        self._piece_s = 0.0
        """What the last piece took."""
        self._answered_at = -math.inf
        """When the last piece came back."""
        self._late_at = math.inf
        """The same, where it was late."""

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
    def writing(self, seq: Seq, logged_at: float, copy: WatchedStream) -> Iterator[PieceWriter]:
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

    def _add(self, seq: Seq, logged_at: float, copy: WatchedStream) -> PieceWriter:
        if not self._writers:
            self._width.begin()
        return self._writers.setdefault(copy, PieceWriter(seq, logged_at, copy, self._event()))

    def next_piece(self, writer: PieceWriter, now: float, *, gives_way: bool) -> Piece | Wait:
        """What the writer of a large file may do now; changes nothing.

        `gives_way`: applications go first (`GiveWay.should`, which is asked without the lock).
        """
        heard_since = self._heard_since(now)
        older = [
            one
            for one in self._writers.values()
            if one.seq < writer.seq and one.is_heard(heard_since)
        ]
        if len(older) >= self._width.now:
            # Nobody rings for one that falls silent.
            silent_at = min((one.since for one in older if one.since is not None), default=now)
            return Wait(silent_at - heard_since + LOOK_AGAIN_S)
        if gives_way:
            return Wait(LOOK_AGAIN_S)
        return self._lack(writer) or Piece(self._piece_bytes(now))

    def _heard_since(self, now: float) -> float:
        """Who is out since before has fallen silent."""
        return now - max(SILENT_S, 2 * min(self._piece_s, LATE_S))

    def _lack(self, writer: PieceWriter) -> Wait | None:
        """Whether there are bytes of the limit for it: the oldest of those that are short of them
        has the next ones.
        """
        if not self._bucket.bytes_per_s:
            return None
        if any(one.seq < writer.seq for one in self._short()):
            return Wait(SILENT_S, is_short=True)  # it rings when it has its own
        debt_s = self._bucket.debt_s()
        return Wait(debt_s, is_short=True) if debt_s else None

    def _short(self) -> Iterator[PieceWriter]:
        return (
            one
            for one in itertools.chain(self._writers.values(), self._small.values())
            if one.is_short
        )

    def _piece_bytes(self, now: float) -> int:
        least = self._bucket.slice_bytes()
        if self._bucket.bytes_per_s or self._stands_still(now):
            return least
        return max(least, self._under_way_bytes // self._width.now)

    def _stands_still(self, now: float) -> bool:
        """Whether nothing has come back since somebody fell silent: perhaps the whole storage hangs
        and not a server of many. What is sent to it then will be in front of the oldest file.
        """
        heard_since = self._heard_since(now)
        return any(
            one.since is not None and self._answered_at <= one.since < heard_since
            for one in self._writers.values()
        )

    def await_turn(self, writer: PieceWriter) -> int:
        """Return how many bytes the writer may write, when it may; at once if it was given up."""
        if not writer.has_turn:
            self._await(writer, self._look)
        writer.has_turn = False
        return writer.granted_bytes or self._bucket.slice_bytes()

    def _await(self, writer: PieceWriter, look: Callable[[PieceWriter], Wait | None]) -> None:
        """Until there is nothing to wait for."""
        turn = look(writer)
        if turn is not None:
            writer.copy.pause()
            while turn is not None:
                writer.bell.wait(turn.seconds)
                turn = look(writer)
            writer.copy.progress()

    def _look(self, writer: PieceWriter) -> Wait | None:
        """None: go on."""
        gives_way = self._give_way.should(writer.logged_at)
        with self._lock:
            now = self._now()
            turn = self.next_piece(writer, now, gives_way=gives_way)
            if isinstance(turn, Wait) and not writer.copy.abandoned:
                writer.since = None
                self._waits(writer, turn)
                return turn
            writer.since = now
            if isinstance(turn, Piece):
                writer.granted_bytes = turn.bytes_max
                self._bucket.take_nowait(turn.bytes_max)
            self._waits(writer, None)
            return None

    def _waits(self, writer: PieceWriter, turn: Wait | None) -> None:
        """Who is short of bytes no longer tells the next one."""
        was_short = writer.is_short
        writer.is_short = turn is not None and turn.is_short
        if turn is not None:
            writer.bell.clear()
        if was_short and not writer.is_short:
            following = min(self._short(), key=lambda one: one.seq, default=None)
            if following is not None:
                following.bell.set()

    def wrote(self, writer: PieceWriter, count: int) -> None:
        """The writer's piece is there; so many bytes of it went to the storage (0: a hole)."""
        with self._lock:
            now = self._now()
            self._bucket.give_back(max(0, writer.granted_bytes - count))
            is_whole = 2 * count >= writer.granted_bytes
            writer.granted_bytes = 0
            if not writer.is_heard(self._heard_since(now)):
                self._width.begin()  # the storage stood still
            began = now if writer.since is None else writer.since
            if count:
                self._took(began, now, is_whole=is_whole)
            writer.since = now
            heard_since = self._heard_since(now)
            heard = sum(one.is_heard(heard_since) for one in self._writers.values())
            if count and self._width.wrote(count, heard, began, now):
                self._ring()

    def _took(self, began: float, now: float, *, is_whole: bool) -> None:
        """A piece was out from then till now; `is_whole`: it had about as many bytes as it
        might.
        """
        seconds = now - began
        least = self._bucket.slice_bytes()
        self._answered_at = now
        self._piece_s = seconds
        if seconds > LATE_S:
            if began >= self._late_at:
                self._under_way_bytes = max(
                    least, int(self._under_way_bytes * LATE_S / seconds) // least * least
                )
            self._late_at = now
            return
        self._late_at = math.inf
        if seconds < SOON_S and is_whole:
            self._under_way_bytes = min(self._under_way_bytes * 2, UNDER_WAY_BYTES)

    def pay_small(self, seq: Seq, copy: WatchedStream, count: int) -> None:
        """Before so many bytes of a small file are written, which has no turns: wait for bytes of
        the limit, and until as many have come: no time is too short for the limit to hold.
        """
        if not self._bucket.bytes_per_s:
            return
        writer = PieceWriter(seq, 0.0, copy, self._event())
        with self._lock:
            self._small[copy] = writer
        try:
            self._await(writer, partial(self._look_small, count))
            self._await(writer, self._look_paid)
            if copy.abandoned:
                self._bucket.give_back(count)
        finally:
            with self._lock:
                del self._small[copy]
                self._waits(writer, None)

    def _look_small(self, count: int, writer: PieceWriter) -> Wait | None:
        """None: go on; they are paid for."""
        with self._lock:
            turn = None if writer.copy.abandoned else self._lack(writer)
            if turn is None:
                self._bucket.take_nowait(count)
            self._waits(writer, turn)
            return turn

    def _look_paid(self, writer: PieceWriter) -> Wait | None:
        """None: what it took has come. Until then nobody else takes anything."""
        with self._lock:
            debt_s = 0.0 if writer.copy.abandoned else self._bucket.debt_s()
            writer.bell.clear()
            return Wait(debt_s) if debt_s else None

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
        for writer in itertools.chain(self._writers.values(), self._small.values()):
            if writer.since is None:
                writer.bell.set()
