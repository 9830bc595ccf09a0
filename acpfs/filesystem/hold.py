"""Writers that the daemon does not see, while RAM is short: watched, held back, and let go on when
there is room.

Looks at the tier files of all writers in the passthrough lane, the more often the less room is
left. One that wrote more than it was promised, when there is no more, is held: somebody (`Holder`)
takes the file's inode lock in the kernel by a call that is not answered before there is room. Held
writers stand in the same queue for room as those in the daemon's lane. Where nothing can make room
any more, the held file itself has to give way (`relieve`). Knows nodes, room and time; not how an
inode lock is taken. Under the file system's lock.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Protocol

from acpfs.config import WhenFull
from acpfs.filesystem.admission import Admission, Net
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.room import Room
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import WaitingWriter
from acpfs.ram.tier import BLOCK_BYTES, Tier
from acpfs.ram.waiting import Applicant, Purpose
from acpfs.runtime.given import Runtime
from acpfs.runtime.threads import Event
from acpfs.types import Ino

FILL_BYTES_PER_S = 40e9
"""Faster than any machine's writers together: RAM is looked at again before so much could have been
written.
"""
INTERVAL_MIN_S = 0.002
INTERVAL_MAX_S = 0.5
HELD_INTERVAL_S = 0.02
SLICE_S = 0.25
"""So long at a time is an inode lock held: who wants to rename, unlink or close the file gets in
between.
"""
ASK_AGAIN_S = 5.0
"""A lock that was not had for so long is asked for again: whoever was to take it may have died.

One write(2) takes a second at most.
"""
GAP_ROOM_BYTES = 64 << 20
"""No gap between slices when the tmpfs has less than this: one write slips through in it, and must
not find it full.
"""
MARGIN_BYTES_MAX = 64 << 20
GRANT_BYTES_MAX = 256 << 20
GRANT_BYTES_MIN = 2 << 20


BEYOND_BYTES = 16 << 20
"""Of the slack so much at a time is given to a held writer that nothing helps: what moves of a
file, once it is that much longer, is more than half of it (`outgrown.KEEP_PIECES`).
"""
BEYOND_LEFT_BYTES = 64 << 20
"""So much of the slack is left then, for gaps and for those who are not held yet; twice as much by
one of whose file nothing will move.
"""
PATIENCE_S = 5.0
"""Others may free by themselves what a held writer waits for: their versions are persisted, what
they were promised is written.
"""

RELIEVING = (
    "nothing else can make room: what it has written so far is moved to the backing directory"
)
READ = (
    "RAM is full, and nothing of it can leave: somebody who opened it before reads it in "
    "passthrough"
)


class Relief(enum.Enum):
    """What a held writer waits for."""

    MOVES = "moves"
    """Its own bytes, which are on their way out."""
    COMES = "comes"
    """The storage, or something that ends by itself."""
    LATE = "late"
    """Something that others are likely to end soon, and need not."""
    NONE = "none"
    """Only that others close or write their files."""


class Holder(Protocol):
    """Takes inode locks."""

    def take(self, ino: Ino) -> None:
        """Begin to take a file's inode lock; `Hold.taken` is called when it is had.

        Returns at once.

        Where that has begun already, somebody else waits for the lock, too (`hold_process` says
        what for).
        """

    def look_soon(self) -> None:
        """Something happened: call `Hold.tick` now. Returns at once."""


@dataclass(slots=True, eq=False)
class Held:
    """A file whose writers are held, or about to be."""

    node: Node
    reason: str
    since: float
    """Monotonic time, seconds; so are the others."""
    asked_at: float
    steady: Event
    """Whether the inode lock is had, or never will be again: for threads that wait for that."""
    taken_at: float = 0.0
    until: Future[bool] | None = None
    """Set while the inode lock is had; its result ends that: True to take it again at once, False
    for good.
    """
    room: Future[None] | None = None
    """Its place in the queue for room."""
    asked_bytes: int = 0
    """What it asked for there: by the time it comes, another budget may grant more or less."""
    relieving: bool = False
    """Nothing else can make room: its own bytes are on their way out."""
    not_before: float = 0.0
    """When moving may be tried again."""
    ended: bool = False
    gaps: int = 0
    """How often others got in between: the file may have changed."""
    gap_blocks: int | None = None
    """What the file took when the last gap began; None: there is none, or it was asked for once
    more in it.
    """


@dataclass(slots=True, eq=False)
class Watched:
    """A file with writers in the passthrough lane."""

    node: Node
    counted_bytes: int
    """What the file took at the last look."""
    has_grown: bool = False
    """Since it was given something of the slack, or opened: somebody does write.

    One whose writers are held grows in gaps.
    """


@dataclass(frozen=True, slots=True)
class HeldReport:
    """A held file as `status` shows it."""

    ino: Ino
    path: bytes
    reason: str
    since_s: float
    """How long it has been held."""
    resident_bytes: int


class Hold:
    """Watches writers, holds them, and lets them go on."""

    def __init__(
        self,
        contents: Contents,
        admission: Admission,
        tier: Tier,
        room: Room,
        path: Callable[[Ino], bytes],
        relieve: Callable[[Held, Callable[[], None]], Relief],
        runtime: Runtime,
    ) -> None:
        """`path`: of a node, for reports.

        `relieve`: as `OutgrownFiles.relieve`; called when nothing else can make room.
        """
        self._now = runtime.clock.now
        self._wall = runtime.clock.wall
        self._event = runtime.threads.event
        self._path = path
        self._contents = contents
        self._admission = admission
        self._tier = tier
        self._room = room
        self._unseen = room.unseen
        self._holder: Holder | None = None
        self._writers: dict[Ino, Watched] = {}
        self._held: dict[Ino, Held] = {}
        self._gap: Ino | None = None
        self._has_lost_holder = False
        """Whether somebody who took locks has ended, and files that he had, or was to have, may be
        had by nobody.
        """
        self._relieve = relieve
        self.holds = 0
        """How many times a file was held so far."""

    def offer(self, holder: Holder | None, net: Net = Net.NONE) -> None:
        """Who takes inode locks; None: nobody can. `net`: whether all who trust to be held may."""
        self._holder = holder
        self._admission.net = net

    def add(self, node: Node) -> None:
        """The node has a writer in the passthrough lane."""
        self._writers.setdefault(node.ino, Watched(node, node.blocks * BLOCK_BYTES))
        if self._holder is not None:
            self._holder.look_soon()

    def look_soon(self) -> None:
        """Something happened that held writers waited for."""
        if self._holder is not None:
            self._holder.look_soon()

    def watched(self) -> list[Ino]:
        """Files with writers that the daemon does not see."""
        return list(self._writers)

    def held(self) -> list[Ino]:
        """Files that are held, or are to be."""
        return list(self._held)

    # -- looking

    def tick(self) -> float:
        """Look, and do what is due; returns after how many seconds to look again, infinity when
        there is nothing to watch.
        """
        self._forget_closed()
        if not self._writers or self._holder is None:
            return math.inf
        reserved = self._tier.reserved_bytes
        for writer in self._writers.values():
            self._look(writer)
        if self._tier.reserved_bytes < reserved:
            # Where it was written to pages that had been taken ahead, there is more room now.
            self._tier.room_changed()
        self._admission.watch_memory()
        self._admission.provide()
        ahead = self._ahead()
        unpromised = self._admission.unpromised()
        if unpromised < ahead:
            self._tier.ladder.make_room(2 * ahead - unpromised)
        for writer in self._writers.values():
            if (
                writer.node.ino not in self._held
                and not self._unseen.is_provided(writer.node)
                and self._is_short_for(writer.node)
            ):
                self._begin(writer.node)
        in_turn = sorted(self._held.values(), key=self._turn)
        for held in in_turn:
            self._tend(held)
        # who has had most gives way first, and what that frees goes to who has had least
        reliefs = [self._wait_or_give_way(held) for held in reversed(in_turn)]
        if not {Relief.MOVES, Relief.COMES} & set(reliefs):
            for held, relief in zip(reversed(in_turn), reliefs, strict=True):
                self._go_beyond(held, relief)
        self._lend_to_loose()
        return self._interval()

    def _forget_closed(self) -> None:
        for ino in [ino for ino, writer in self._writers.items() if not writer.node.kernel_writers]:
            del self._writers[ino]
            if ino in self._held:
                self._end(self._held[ino])

    def _look(self, writer: Watched) -> None:
        """What the kernel has written counts for the writer's turns, and as taken from what was
        reserved for it (`UnseenRoom.count`).
        """
        self._contents.kernel.look(writer.node)
        taken = writer.node.blocks * BLOCK_BYTES
        writer.has_grown |= taken > writer.counted_bytes
        writer.counted_bytes = taken

    def _margin(self) -> int:
        """Room at which writers are held: what they write until they are comes out of the slack."""
        return min(MARGIN_BYTES_MAX, self._limit() // 16)

    def _limit(self) -> int:
        """The budget, or the share that each owner has of it."""
        return min(filter(None, (self._tier.budget_bytes, self._tier.shares.limit_bytes)))

    def _applicant(self, node: Node) -> Applicant:
        return self._room.applicant(node, Purpose.RELEASE)

    def _turn(self, held: Held) -> tuple[bool, float]:
        applicant = self._applicant(held.node)
        return not applicant.urgent, self._tier.turn(applicant)

    def _ahead(self) -> int:
        """The same, beside what is promised.

        A reach counts as promised already: then it is what is written between two looks.
        """
        return self._admission.look_bytes() or self._margin()

    def _grant(self, node: Node) -> int:
        """Room that a held writer is given before it goes on; more than the margin, so that it is
        not held at once again.

        A writer of an urgent file gets the last of the reserve, too, though that is less.
        """
        most = min(GRANT_BYTES_MAX, self._limit() // 8)
        free = self._tier.free_bytes(urgent=True)
        return free if GRANT_BYTES_MIN <= free < most and self._room.is_urgent(node) else most

    def _is_short_for(self, node: Node) -> bool:
        urgent = self._room.is_urgent(node)
        promised = self._admission.outstanding_of(node)
        if self._is_share_short_for(node, promised):
            return True
        if promised:
            return self._tier.free_bytes(urgent=urgent) < self._margin()
        return (
            self._admission.unpromised(urgent=urgent) < self._ahead()
            or self._tier.waiting(urgent=urgent) > 0
        )

    def _is_share_short_for(self, node: Node, promised: int) -> bool:
        shares = self._tier.shares
        if not shares.limit_bytes:
            return False
        if promised:
            return shares.left_bytes(node.uid) < self._margin()
        return self._admission.unpromised_of(node.uid) < self._ahead()

    def _interval(self) -> float:
        distance = self._admission.unpromised()
        if self._tier.shares.limit_bytes:
            uids = {writer.node.uid for writer in self._writers.values()}
            distance = min(distance, *(self._admission.unpromised_of(uid) for uid in uids))
        distance -= self._ahead()
        interval = min(max(distance / FILL_BYTES_PER_S, INTERVAL_MIN_S), INTERVAL_MAX_S)
        return min(interval, HELD_INTERVAL_S) if self._held else interval

    # -- holding

    def _helps_to_wait(self, node: Node) -> bool:
        return self._room.waiting_helps(self._grant(node), self._applicant(node))

    def _begin(self, node: Node) -> None:
        assert self._holder is not None
        if self._room.when_full is WhenFull.ERROR and not self._helps_to_wait(node):
            self._refuse(node)
            return
        if node.body.failed and node.kernel_mappers:
            return  # nothing that is waited for helps it (`_go_beyond`)
        now = self._now()
        self._held[node.ino] = Held(node, self._reason(node), now, now, self._event())
        self.holds += 1
        self._holder.take(node.ino)

    def _reason(self, node: Node) -> str:
        """Why its writers are held."""
        short = self._tier.shares.short_by(self._grant(node), self._applicant(node))
        return self._room.reason(short, node.uid)

    def _refuse(self, node: Node) -> None:
        """There is no room for what was written: told by close, since write itself was not
        asked.

        Not of what nobody was seen to write to since: its close may have been answered, and it only
        counts as changed as it is mapped, or was. Who goes on is looked at again.
        """
        if node.body.modified and not node.body.failed and self._contents.kernel.has_written(node):
            self._contents.fail(node, errno.ENOSPC, node.size)

    def taken(self, ino: Ino) -> Future[bool] | None:
        """The inode lock of a file is had: keep it until the future is done.

        None: it is not needed any more.
        """
        held = self._held.get(ino)
        if held is None or self._holder is None:
            return None
        held.until = Future()
        held.taken_at = self._now()
        held.gap_blocks = None
        held.steady.set()
        self._admission.stop(held.node, stopped=True)
        if self._gap == ino:
            self._gap = None
        self._holder.look_soon()
        return held.until

    def lost(self, ino: Ino, until: Future[bool]) -> None:
        """Whoever held the lock is dying.

        The kernel keeps it for him until this is answered: so room is lent before writers go on.
        """
        self._has_lost_holder = True
        held = self._held.get(ino)
        if (
            held is not None and held.until is until
        ):  # else it was taken again meanwhile, by another process
            held.until = None
            # ask at once: its writers go on until somebody has the lock
            held.asked_at = 0.0
            held.steady.clear()
            self._admission.stop(held.node, stopped=False)
            held.gaps += 1
        self._lend_to_loose()

    def holder_lost(self) -> None:
        """Who takes locks has ended, or cannot be started, or nobody looks: until another one has
        them, writers go on that nobody stops.
        """
        self._has_lost_holder = True
        if self._writers:
            self._tier.lend_slack()

    def _lend_to_loose(self) -> None:
        """What writers write until somebody holds them again is no reason to refuse it: they have
        done nothing wrong.

        Only then: a write(2) that is larger than RAM and slack ends at the tmpfs's limit, and its
        rest waits.
        """
        if not self._has_lost_holder:
            return
        if any(held.until is None for held in self._held.values()):
            self._tier.lend_slack()
        elif self._held:
            self._has_lost_holder = False

    def _tend(self, held: Held) -> None:
        assert self._holder is not None
        if self._room.when_full is WhenFull.ERROR and not self._helps_to_wait(
            held.node
        ):  # since it was changed
            self._refuse(held.node)
            self._end(held)
            return
        granted = self._granted(held)
        if granted:
            self._unseen.add(held.node, granted)
            self._end(held)
            return
        now = self._now()
        if held.until is None and (now - held.asked_at > ASK_AGAIN_S or _is_written_in_gap(held)):
            held.asked_at = now
            held.gap_blocks = None
            self._holder.take(held.node.ino)
        elif held.until is not None and now - held.taken_at > SLICE_S and self._may_open(held):
            self._gap = held.node.ino
            held.gaps = held.gaps + 1
            held.asked_at = now
            held.gap_blocks = held.node.blocks
            _settle(held, again=True)

    def _granted(self, held: Held) -> int:
        """How much room the held writer has got: it is reserved."""
        if held.room is not None:
            # it asks for more than it may have by now (another budget): out of the queue, unless
            # the room came in this very moment
            if not held.room.done() and (
                self._grant(held.node) >= held.asked_bytes or not held.room.cancel()
            ):
                return 0
            room = held.room
            held.room = None
            if not room.cancelled() and room.exception() is None:
                return held.asked_bytes
        grant = self._grant(held.node)
        may = not (held.relieving or self._is_promised_to_others(held.node))
        return grant if may and self._tier.reserve_nowait(grant, self._applicant(held.node)) else 0

    def _is_promised_to_others(self, node: Node) -> bool:
        """What others were promised they have to write outside of the reserve, unless they are
        urgent, too: those share it.
        """
        return (
            not self._room.is_urgent(node)
            and self._admission.unpromised() < self._grant(node) <= self._tier.free_bytes()
        )

    def _wait_or_give_way(self, held: Held) -> Relief:
        """What may be done for a held writer that has got no room is begun here."""
        if held.ended or held.relieving or held.room is not None:
            return Relief.MOVES if held.relieving else Relief.COMES
        waiting_helps = self._helps_to_wait(held.node)
        is_promised = self._is_promised_to_others(held.node)
        is_late = self._now() - held.since > PATIENCE_S
        relief = Relief.LATE
        if (
            held.node.body.is_outgrown or not waiting_helps or (is_promised and is_late)
        ) and held.until is not None:
            relief = self._relieve(held, self.look_soon)
            if relief is Relief.MOVES:
                return relief
        if waiting_helps and not is_promised:
            held.asked_bytes = self._grant(held.node)
            held.room = self._tier.reserve(held.asked_bytes, self._applicant(held.node))
            held.room.add_done_callback(lambda _room: self.look_soon())
            return Relief.COMES
        return relief

    def _go_beyond(self, held: Held, relief: Relief) -> None:
        """Nothing that ends by itself makes room for any held writer: one that only others could
        help goes on into the slack.

        That is enough for all whose own bytes move then, and an end for one whose bytes never can.
        """
        writer = self._writers.get(held.node.ino)
        if held.until is None or writer is None or not writer.has_grown:
            return
        if relief is Relief.LATE and self._now() - held.since <= PATIENCE_S:
            return
        node = held.node
        is_read = node.kernel_handles > node.kernel_writers or node.daemon_mappers > 0
        stays = is_read or node.kernel_mappers > 0
        left = BEYOND_LEFT_BYTES * (2 if stays else 1)
        if self._tier.reserve_slack(BEYOND_BYTES, self._applicant(held.node), left):
            self._unseen.add(node, BEYOND_BYTES)
            writer.has_grown = False
            self._end(held)
        elif is_read:
            held.reason = READ
        elif stays:
            # Only its writer's own close would help, who waits here: he meets the end of the tmpfs.
            self._refuse(node)
            self._admission.never(self._path(node.ino))
            self._end(held)

    def _may_open(self, held: Held) -> bool:
        """Whether others may get in between: one file at a time, and not into a tmpfs that is
        full.
        """
        other = self._held.get(self._gap) if self._gap is not None else None
        if other is not None and other is not held and other.until is None:
            return False
        return self._tier.space_left_bytes() >= GAP_ROOM_BYTES

    def _end(self, held: Held) -> None:
        del self._held[held.node.ino]
        held.ended = True
        self._admission.stop(held.node, stopped=False)
        if held.room is not None and not held.room.cancel() and held.room.exception() is None:
            self._tier.release(held.asked_bytes, held.node.ino)
        self._tier.room_changed()
        _settle(held, again=False)

    def statistics(self) -> tuple[HeldReport, ...]:
        """Who is held now."""
        now = self._now()
        return tuple(
            HeldReport(
                h.node.ino,
                self._path(h.node.ino),
                h.reason,
                now - h.since,
                h.node.blocks * BLOCK_BYTES,
            )
            for h in self._held.values()
        )

    def not_queued(self) -> tuple[WaitingWriter, ...]:
        """Of these, who waits for something else than a turn in the queue for room."""
        now = self._now()
        wall = self._wall()
        return tuple(
            WaitingWriter(
                h.node.ino,
                self._path(h.node.ino),
                h.node.writer_pid,
                Purpose.RELEASE.value,
                self._grant(h.node),
                wall - (now - h.since),
                RELIEVING if h.relieving else self._reason(h.node),
            )
            for h in self._held.values()
            if h.room is None
        )


def _is_written_in_gap(held: Held) -> bool:
    """Whether a writer has the lock now, or had it: only who asks from now on is sure to come next
    (`hold_process.Locks.take`).
    """
    return held.gap_blocks is not None and held.node.blocks > held.gap_blocks


def _settle(held: Held, *, again: bool) -> None:
    until = held.until
    held.until = None
    if again:
        held.steady.clear()
    else:
        held.steady.set()
    if until is not None:
        with contextlib.suppress(InvalidStateError):  # its caller died meanwhile
            until.set_result(again)
