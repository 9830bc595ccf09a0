"""What this node knows of the others, and whether a pointer has to wait for one of them.

Another node lives as long as its record changes, by this node's own monotonic clock; nobody's wall
clock says who is dead. Silence is what was looked at and found unchanged: with many nodes, or slow
storage, a record is read seldom, and that says nothing. Clocks of two nodes are compared through
their records: what one wrote, the other read later, so the writer's clock was at least so much
ahead; and what the other says it has found of ours bounds it from the other side. Where clocks are
far apart, a node also passes by the sequence of its records alone (`Peer.closed_before`). Pure.
Used under the file system's lock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from acpfs.backing.member_records import ANYTHING, NodeRecord, NodeState
from acpfs.writeback.members.pace import BETWEEN_WRITES
from acpfs.writeback.members.scopes import EVERYBODYS

SAMPLES_MAX = 64
"""Readings of a clock that are remembered: the best of a minute or two.

Clocks drift by less than a millisecond in that time.
"""
SILENT_HEARTBEATS_MIN = 3.0
"""A node that beats slower than others is not missing before it has left out so many."""
ABSENT_MIN = 2
PAST_CACHES_S = 60.0
"""A record that is read now was there so long ago or later: clients of network file systems
remember no longer what a file was.
"""
RECORDS_AFTER = 4
"""So many records, each newer than the last, seen after that: the last was begun when the one
before it was there, and not earlier.
"""


class Verdict(Enum):
    """About one node and one pointer."""

    PASSES = "passes"
    WAITS = "waits"
    MISSING = "missing"
    """It was not heard for too long, or is away, and may have had something that is not
    persisted.
    """
    UNKNOWN = "unknown"
    """The pointer's writer named it, and there is no record of it."""
    LOST = "lost"
    """What it had closed before the pointer may be lost."""
    WITHHELD = "withheld"
    """It withholds a pointer that was closed before, and that this one has to do with."""
    NAMED = "named"
    """It withholds the change of a pointer that names what this takes the name of."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a judgement is made by."""

    node: str
    """Who judges."""
    clock_bound_s: float
    drift_s: float
    node_timeout_s: float
    forget_after_s: float
    """0: never."""
    moved_s: float = 0.0
    """By how much its clock was moved since the first of what is to come was closed."""


def longest_cached_s(terms: Terms) -> float:
    """How old a record can be when it is read.

    A node whose records are read later than its time-out counts as missing anyway.
    """
    return max(PAST_CACHES_S, terms.node_timeout_s)


def may_be_of_loss(lost: tuple[float, float] | None, since: float, bound_s: float) -> bool:
    """Whether a loss holds back what was closed at `since` by any third member's clock: both clocks
    may be off by the bound.
    """
    return lost is not None and lost[0] <= since + 2 * bound_s and since - 2 * bound_s < lost[1]


@dataclass(slots=True)
class Peer:
    """One other member."""

    node: str
    heard_at: float
    """Monotonic, seconds: when its record was last another one than before; at first, when it was
    first looked for.
    """
    record: NodeRecord | None = None
    read_at: float = -math.inf
    """Monotonic, seconds: when its record was last looked for, and was there; `error`: but could
    not be read.
    """
    asked_at: float = -math.inf
    """Monotonic, seconds: when the last look for its record began, whatever came of it."""
    listed: bool = True
    """Whether it was in the last listing."""
    absent: int = 0
    """How often in a row its record was not there."""
    error: str = ""
    """Why its record could not be read; "" when it could."""
    came_at: float = math.inf
    """By our clock: when it was first known that it is here with the RAM tier that it has."""
    _ahead: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    _newer: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    """Records, each newer than all before: monotonic seconds when its reading began, and what it
    says of its node's clock.
    """

    def saw(
        self, record: NodeRecord, clock: float, monotonic: float, began: float = math.inf
    ) -> None:
        """Its record was read; `clock`: this node's, afterwards.

        `began`: monotonic, when the reading did, if that is known.
        """
        self.error = ""
        self.absent = 0
        if self.record is not None and (self.record.incarnation, self.record.beat) == (
            record.incarnation,
            record.beat,
        ):
            return
        if self.record is None or self.record.incarnation != record.incarnation:
            self._ahead.clear()
            self._newer.clear()
            self.came_at = clock
        self.record = record
        self.heard_at = monotonic
        if (
            not self._newer or record.clock > self._newer[-1][1]
        ):  # one of two readings at a time may bring an older one
            self._newer.append((min(began, monotonic), record.clock))
        self._ahead.append(record.clock - clock)

    def may_act(self) -> bool:
        """Whether it may be mounted: nothing says that it has ended."""
        return self.record is None or self.record.state is NodeState.LIVE

    def is_alone(self, clock: float, terms: Terms) -> bool:
        """Whether it lives, and has heard of no other member yet; `clock`: ours, now.

        One that is silent has ended, or cannot write: it is not asked.
        """
        record = self.record
        if record is None or record.state is not NodeState.LIVE or record.heard:
            return False
        silent_s = clock - record.clock - self.bound_s(terms)
        return silent_s <= SILENT_HEARTBEATS_MIN * record.heartbeat_s

    def is_removed(self) -> bool:
        """Its record was not there; whether that is so for good.

        Some file systems have moments without it during a rename.
        """
        self.absent += 1
        return self.absent >= ABSENT_MIN and not self.listed

    @property
    def ahead_s_min(self) -> float:
        """How much its clock is at least ahead of ours; negative: it is at most so much behind."""
        return max(self._ahead, default=-math.inf)

    def ahead_s_max(self, us: str) -> float:
        """How much its clock is at most ahead of ours: by what it has found of ours."""
        found = self.record.heard.get(us) if self.record is not None else None
        return math.inf if found is None else -found

    def bound_s(self, terms: Terms) -> float:
        """How much its clock may be ahead of ours.

        What the operator says holds until it is measured to be wrong, or nearly.
        """
        bound_s = (
            terms.clock_bound_s
            + abs(terms.drift_s)
            + (abs(self.record.drift_s) if self.record is not None else 0.0)
        )
        if self.ahead_s_min > terms.clock_bound_s / 2:
            most = self.ahead_s_max(terms.node)
            beat_s = self.record.heartbeat_s if self.record is not None else 0.0
            if not self.ahead_s_min <= most < math.inf:
                # It has not read ours yet, or since one of the two clocks was set: then it still
                # goes by records from before.
                most = self.ahead_s_min + beat_s + terms.clock_bound_s
            bound_s = max(bound_s, most)
        return bound_s

    def closed_before(self, since: float, terms: Terms) -> float:
        """By its own clock: all that it had closed before our `since` (monotonic) was closed
        earlier than this. No clock is compared.

        Its records are begun one after the other, so one that came well after `since` was begun
        after it. Infinity: none has come yet.
        """
        fresh = since + longest_cached_s(terms)
        clocks = [clock for began, clock in self._newer if began >= fresh]
        return (
            clocks[RECORDS_AFTER - 1]
            if math.isfinite(fresh) and len(clocks) >= RECORDS_AFTER
            else math.inf
        )

    def records_since(self, since: float) -> int:
        """How many records, each newer than the last, were looked for and found since then
        (monotonic).
        """
        return sum(began >= since for began, _clock in self._newer)

    def mark(self, marks: dict[str, float], since: float, terms: Terms) -> float:
        """`closed_before`, found once and kept in `marks` by node: the earlier it is, the sooner it
        is passed.
        """
        if self.node not in marks:
            mark = self.closed_before(since, terms)
            if mark == math.inf:
                return mark
            marks[self.node] = mark
        return marks[self.node]

    def clock_wait_s(self, terms: Terms) -> float:
        """How much longer our pointers wait for it than they would if clocks were equal; about, and
        at most.
        """
        beat_s = self.record.heartbeat_s if self.record is not None else 0.0
        ahead_s = self.ahead_s_min if math.isfinite(self.ahead_s_min) else 0.0
        return min(
            self.bound_s(terms) - min(0.0, ahead_s),
            longest_cached_s(terms) + RECORDS_AFTER * beat_s,
        )

    @property
    def silent_s(self) -> float:
        """For how long nothing new was heard, as far as was looked."""
        return max(0.0, self.asked_at - self.heard_at)

    def is_missing(self, terms: Terms) -> bool:
        """Whether it counts as dead."""
        record = self.record
        if record is not None and record.state is not NodeState.LIVE:
            return record.state is NodeState.AWAY
        beat_s = record.heartbeat_s if record is not None else 0.0
        return self.silent_s > max(terms.node_timeout_s, SILENT_HEARTBEATS_MIN * beat_s)

    def is_dispensable(self, terms: Terms) -> bool:
        """Whether an operator may decide to go on without it: it is missing, or has left and holds
        removals of pointers back.
        """
        return self.is_missing(terms) or (
            self.record is not None and self.record.state is NodeState.LEFT
        )

    def is_forgotten(self, terms: Terms) -> bool:
        """Whether that is so for so long that the operator's standing decision holds."""
        return 0 < terms.forget_after_s < self.silent_s and self.is_dispensable(terms)

    def may_have_written(self, clock: float, terms: Terms) -> bool:
        """Whether there can be a newer record than the one that is known: a node that lives leaves
        half a heartbeat between two.

        A new worker does not, and is found by as much later.
        """
        record = self.record
        if record is None or self.error or record.state is not NodeState.LIVE:
            return True
        ahead_s = min(self.ahead_s_max(terms.node), self.bound_s(terms))
        return clock + ahead_s >= record.clock + BETWEEN_WRITES * record.heartbeat_s

    def _has_ended(self, record: NodeRecord) -> bool:
        return record.state in (NodeState.LEFT, NodeState.GONE) and not self.error

    def may_have(
        self, closed_at: float, terms: Terms, since: float, mark: float = math.inf
    ) -> bool:
        """Whether it lives, and may not have persisted all that it had closed before `closed_at` by
        our clock.

        `since`, `mark`: as for `judge`.

        For a reader, who waits for nobody's gate: a gated pointer of that time may be the very
        file.
        """
        record = self.record
        if self.is_missing(terms) or record is None:
            return not self.is_missing(terms)
        if self.read_at >= since and self._has_ended(record):
            return False
        return record.watermark <= min(mark, closed_at + self.bound_s(terms))

    def _may_have_lost(self, lost: tuple[float, float], closed_at: float, terms: Terms) -> bool:
        """Whether the pointer was closed while what it names may have been in the RAM tier that is
        lost.
        """
        bound_s = self.bound_s(terms)
        return (
            closed_at <= self.came_at
            and closed_at + bound_s >= lost[0]
            and closed_at - bound_s < lost[1]
        )

    def _is_surely_before(self, stamp: float, closed_at: float, terms: Terms) -> bool:
        """Whether what it stamped so was closed before `closed_at` by our clock, however much its
        clock is ahead of ours.

        That is at least what was measured; and no less than the bound allows, unless that is
        measured to be wrong. So of two members that judge each other's pointers, not both find that
        the other's was first.

        A wall clock that was set says nothing of that: both stamps, and what was measured, are of
        the members' own clocks. What counts is by how much those were moved.
        """
        bound_s = self.bound_s(terms)
        ahead_s = self.ahead_s_min
        if self.ahead_s_max(terms.node) >= -bound_s:
            ahead_s = max(ahead_s, -bound_s)
        return stamp - ahead_s + terms.moved_s + self._moved_s() < closed_at

    def _moved_s(self) -> float:
        """By how much its clock was moved, at most, since it gave stamps that still count."""
        if self.record is None:
            return 0.0
        moved_s = self.record.moved_s
        return abs(self.record.drift_s) if moved_s is None else moved_s

    def has_replaced(self, names: Iterable[str], closed_at: float, terms: Terms) -> bool:
        """Whether it has made a pointer of one of these names that was closed after `closed_at` by
        our clock, whatever the clocks.

        What it says of that stays true, whatever has become of the member.
        """
        placed = self.record.placed if self.record is not None else {}
        stamp = max((placed[key] for key in names if key in placed), default=-math.inf)
        return stamp - self.bound_s(terms) > closed_at

    def placed_by_our_clock(self, terms: Terms) -> dict[str, float]:
        """Pointers that it has made (`NodeRecord.placed`), each with the earliest time at which it
        can have been closed.
        """
        placed = self.record.placed if self.record is not None else {}
        bound_s = self.bound_s(terms)
        return {key: closed_at - bound_s for key, closed_at in placed.items()}

    def to_change(self, closed_at: float, terms: Terms, *, makes_room: bool) -> Iterator[str]:
        """Pointers on the backing directory (`NodeRecord.standing`) whose change from before
        `closed_at` it withholds.

        What waits for a loss may never come, and holds up nobody (S164) but who removes something
        for want of room (`makes_room`).
        """
        record = self.record
        if record is None or record.state is NodeState.GONE:
            return
        for told in (record.standing, record.standing_of_lost if makes_room else {}):
            for path, since in told.items():
                if self._is_surely_before(since, closed_at, terms):
                    yield path

    @property
    def tells_of_loss(self) -> bool:
        """Whether it withholds a change of a pointer for what is lost."""
        return self.record is not None and bool(self.record.standing_of_lost)

    def older_of_loss(
        self, changes: Collection[str], closed_at: float, terms: Terms
    ) -> float | None:
        """When the oldest change was closed, by its clock, that it withholds for a loss, and that
        is older than one of the same pointers here, closed at `closed_at`; None: there is none.
        """
        record = self.record
        if record is None or record.state is NodeState.GONE or not changes:
            return None
        told = [record.standing_of_lost.get(path, math.inf) for path in (*changes, ANYTHING)]
        since = min(told)
        return since if self._is_surely_before(since, closed_at, terms) else None

    def lost(self, terms: Terms) -> tuple[float, float] | None:
        """Between which times by its clock it closed what may be lost; None: nothing is, or all
        that is forgotten.
        """
        if self.record is None or self.is_forgotten(terms):
            return None
        return self.record.lost

    def judge_freed(self, terms: Terms, since: float) -> Verdict:
        """For what has an older change to come there (`older_of_loss`), while no loss is known here
        that holds it back: the member tells of it until it has heard that the loss is forgotten,
        and then of its change as of any other. `since`: as for `judge`.
        """
        record = self.record
        is_fresh = self.read_at >= since
        if record is None or (is_fresh and self.is_forgotten(terms)):
            return Verdict.PASSES
        return self._of_withheld(record, terms, is_fresh=is_fresh)

    def judge_named(self, terms: Terms, since: float) -> Verdict:
        """For what takes the name of something that such a pointer names. `since`: as for
        `judge`.
        """
        is_fresh = self.read_at >= since
        if self.record is None or (is_fresh and self.is_forgotten(terms)):
            return Verdict.PASSES
        is_away = self.is_missing(terms) or (is_fresh and self._has_ended(self.record))
        return Verdict.MISSING if is_away else Verdict.NAMED

    @property
    def waits_for_all(self) -> bool:
        """Whether it withholds something for a member that everybody waits for."""
        return self.record is not None and EVERYBODYS in self.record.held

    def _withholds(self, asks: Iterable[str], closed_at: float, terms: Terms) -> bool:
        """Whether it holds back what the pointer has to do with, from before."""
        record = self.record
        if record is None or not record.held or record.state is NodeState.GONE:
            return False
        since = min((record.held[key] for key in asks if key in record.held), default=math.inf)
        return self._is_surely_before(since, closed_at, terms)

    def _of_withheld(self, record: NodeRecord, terms: Terms, *, is_fresh: bool) -> Verdict:
        is_away = self.is_missing(terms) or (is_fresh and self._has_ended(record))
        return Verdict.MISSING if is_away else Verdict.WITHHELD

    def judge_name(
        self, closed_at: float, terms: Terms, *, asks: Iterable[str], since: float
    ) -> Verdict:
        """For a pointer whose writer named others, and not this one: whether it withholds an older
        one of the same name.

        `asks`, `since`: as for `judge`.
        """
        is_fresh = self.read_at >= since
        if self.record is None or (is_fresh and self.is_forgotten(terms)):
            return Verdict.PASSES
        if not self._withholds(asks, closed_at, terms):
            return Verdict.PASSES
        return self._of_withheld(self.record, terms, is_fresh=is_fresh)

    def judge(
        self,
        closed_at: float,
        terms: Terms,
        *,
        removes: bool = False,
        yields: bool = False,
        asks: Iterable[str] = (),
        since: float = -math.inf,
        mark: float = math.inf,
    ) -> Verdict:
        """Whether it has persisted what it had closed before a pointer was closed here, at
        `closed_at` by our clock.

        `removes`: not a pointer, but a removal: for that it does not matter what was lost.
        `yields`: nobody waits for that removal; then what counts are the node's pointers, and all
        that may have been before. `asks`: keys of what it has to do with, if that is withheld there
        (`scopes`). `since`: monotonic; that a node has left, or is silent, counts only if it was
        read since then, for it may have come back: only what is persisted is so for ever. `mark`:
        by its clock; what it had closed before is earlier than that, whatever the clocks
        (`closed_before`).
        """
        record = self.record
        is_fresh = self.read_at >= since
        if is_fresh and self.is_forgotten(terms):
            return Verdict.PASSES
        if record is not None:
            until = closed_at + self.bound_s(terms)
            if (
                not removes
                and record.lost is not None
                and self._may_have_lost(record.lost, closed_at, terms)
            ):
                return Verdict.LOST
            if not yields and self._withholds(asks, closed_at, terms):
                return self._of_withheld(record, terms, is_fresh=is_fresh)
            told = record.pointers if yields and record.pointers is not None else record.watermark
            if told > min(until, mark):
                return Verdict.PASSES
            if is_fresh and self._has_ended(record):
                return (
                    Verdict.MISSING
                    if yields and record.pointers is not None and told < record.clock
                    else Verdict.PASSES
                )
            if (
                not yields
                and record.gated is not None
                and (record.gated, record.node) > (closed_at, terms.node)
            ):
                return Verdict.PASSES  # else both would wait for each other
        return Verdict.MISSING if self.is_missing(terms) else Verdict.WAITS
