"""The gate: which pointer files wait for other members.

One more condition of readiness for the order of commits. An operation that makes a pointer visible
is *gated* from the moment that it is logged until `acpfs.writeback.members.cluster` has found that
every other member has persisted what it had closed before. So is a removal, since another member's
pointer may still name what it removes. The removal of a pointer keeps its place in the order; any
other one *yields*: it waits for all pointers that others closed or removed before, is put off
meanwhile, so that nobody waits for it, and takes its turn like a pointer only where something here
needs it gone. One for which a node is missing is *withheld*: set aside like a parked operation,
with an errno of its own, until that node is back, forgotten, or the pointer is superseded. What is
stored under a temporary name and renamed to a pointer's is gated with that: members share the
temporary name, too. Knows neither nodes nor records. Used under the file system's lock.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from acpfs.backing.lower import LowerPath
from acpfs.backing.member_records import ANYTHING
from acpfs.config import ClusterOrder
from acpfs.errors import FULL_ERRNOS
from acpfs.types import NO_INO, Ino, Seq
from acpfs.writeback.arrival import Bell
from acpfs.writeback.log.log import CONTENTS, REMOVING, OperationLog
from acpfs.writeback.log.ops import WITHHELD, Op, OpKind
from acpfs.writeback.log.stages import Aside
from acpfs.writeback.members import scopes
from acpfs.writeback.members.placed import Placed
from acpfs.writeback.members.scopes import EVERYBODYS, Scope, Scopes

_SUPERSEDED = frozenset({OpKind.STORE, OpKind.SYMLINK, OpKind.RENAME})
"""What makes a pointer file, and may be left out where another member has made a later one."""
_MOVING_IN = frozenset({OpKind.RENAME, OpKind.EXCHANGE, OpKind.LINK})
LOOKED_AT_OPS_MAX = 256
"""With `all`, every operation is gated: the oldest ones are asked for, the others follow."""
TIDY_OPS_MIN = 4096
STANDING_MAX = 32
"""Pointer files in a record that are to be changed; with more nobody knows which."""
STANDING_CHARACTERS_MAX = 512
"""Of a path among them; up to six bytes each in a record."""
RUNS_MAX = 4096
"""So many are remembered in which a pointer was persisted; forgetting one has removals wait for
longer.
"""


class KnowsPointers(Protocol):
    """See `Pointers`."""

    def makes(self, op: Op, /) -> bool:
        """Whether the operation makes one visible."""

    def takes(self, op: Op, /) -> bool:
        """Whether it removes or replaces one."""


@dataclass(slots=True)
class Gated:
    """One operation that waits."""

    op: Op
    required: dict[str, None] | None = None
    """Nodes that have to be asked (still); None: it is not known yet which nodes there are."""
    unknown: set[str] = field(default_factory=set)
    """Of these, nodes that the pointer's writer named, and that no record is known of."""
    named: frozenset[str] | None = None
    """Nodes that the pointer's writer named; None: all.

    Others are asked for what they withhold under its name alone.
    """
    writes_before: int | None = None
    """Records of this node that were begun when it was first looked at."""
    listed_at: float = 0.0
    """Monotonic, seconds: when that became known."""
    marks: dict[str, float] = field(default_factory=dict)
    """Node → a time by its clock that is later than all it had closed before `listed_at`, where
    that is known without comparing clocks.
    """
    missing: dict[str, str] = field(default_factory=dict)
    """Node → why it does not pass, as last looked at."""
    needed: bool = False
    """A removal that yields, and that something here waits for: it takes its turn like a
    pointer.
    """
    makes: Op | None = None
    """The operation that makes a pointer of what this one stores; None: it is one itself, or a
    removal.
    """
    for_all: bool = True
    """Whether a member is missing for which everybody waits, as last looked at."""
    of_what_is_lost: bool = False
    """Whether it is withheld for nothing but what other members have lost."""
    keys: frozenset[str] | None = None
    """Of what it waits for while that is withheld (`scopes`); None: not asked yet."""
    names_made: frozenset[str] | None = None
    """Keys of the names under which it makes a pointer file; None: not asked yet."""
    makes_room: bool = False
    """It is `needed` for want of room alone."""
    taken: frozenset[bytes] | None = None
    """Paths that nothing has any more by it (`Scope.taken`); None: not asked yet."""

    @property
    def pointer(self) -> Op:
        """What becomes visible as a pointer."""
        return self.makes or self.op


class ToCome:
    """Operations in the order of the log, without those that are done.

    What it costs to look at the oldest does not grow with their number.

    Those that are done are forgotten when they are met, and when half of all may be: others go on
    for days behind one that cannot be done.
    """

    def __init__(self, is_to_come: Callable[[Op], bool]) -> None:
        """`is_to_come`: whether an operation is not done."""
        self._is_to_come = is_to_come
        self._ops: OrderedDict[Seq, Op] = OrderedDict()
        self._last_seq = 0
        self._unsorted = False
        self._tidy_at = TIDY_OPS_MIN

    def add(self, op: Op) -> None:
        """Also one that is older than the last."""
        self._unsorted |= op.seq < self._last_seq
        self._last_seq = max(self._last_seq, op.seq)
        self._ops[op.seq] = op
        if len(self._ops) >= self._tidy_at:
            self._tidy_at = TIDY_OPS_MIN + 2 * sum(1 for _ in self)

    def __len__(self) -> int:
        """How many are remembered, also of those that are done."""
        return len(self._ops)

    def discard(self, op: Op) -> None:
        """It does not belong here any more."""
        self._ops.pop(op.seq, None)

    def __iter__(self) -> Iterator[Op]:
        """Oldest first; they may not change meanwhile."""
        if self._unsorted:
            self._ops = OrderedDict(sorted(self._ops.items()))
            self._unsorted = False
        done: list[Op] = []
        try:
            for op in self._ops.values():
                if self._is_to_come(op):
                    yield op
                else:
                    done.append(op)
        finally:
            for op in done:
                del self._ops[op.seq]


class Gate:
    """Knows what is gated; open for everything until `begin`."""

    def __init__(
        self,
        log: OperationLog,
        pointers: KnowsPointers,
        order: ClusterOrder,
        freed: Callable[[Op], None] = lambda _op: None,
        directory_of: Callable[[Ino], Ino] = lambda _ino: NO_INO,
        by_path: Scopes | None = None,
        placed: Placed | None = None,
        gives_up: Callable[[Op], list[Op]] = lambda _op: [],
    ) -> None:
        """`freed`: a removal that the guard holds has nothing more to wait for here.

        `directory_of`: in which directory a node lies. `by_path`: what operations have to do with;
        by default that is known by names alone. `placed`: remembers which pointers were made here.
        `gives_up`: leaves a pointer out that another member has replaced, and says what left the
        log with it; nothing where it cannot be left out.
        """
        self._placed = placed
        self._gives_up = gives_up
        self._freed = freed
        self._directory_of = directory_of
        self.scope_of = self._by_name if by_path is None else by_path.of
        self._by_path = by_path
        self._log = log
        self._is_pointer = pointers.makes
        self._takes_pointer = pointers.takes
        self._order = order
        self._begun = False
        self._newest_seq = log.last_seq
        self._gated: dict[Seq, Gated] = {}
        self._yielding = ToCome(self._is_waiting)
        self._others = ToCome(self._is_waiting)
        """What is gated: removals that yield, which may be very many, and all else."""
        self._counting: ToCome | None = None
        """All but removals that yield, gated or not; None: nobody has asked yet."""
        self._put_off: dict[Seq, Op] = {}
        self._pointers: dict[Seq, Op] | None = None
        """All that makes or takes pointers and was to be done when last looked; None: nobody has
        asked yet.
        """
        self.bell = Bell()
        """Rung when something has to be looked at."""
        self.has_peers: bool | None = None
        """Whether there are other members, whose pointers may still name what is removed here;
        None: this worker has not looked yet.
        """
        self.heard_until = math.inf
        """By our clock: until then whoever begins a mount waits until this node has heard of it
        (S163). Later it has other members for all it knows.
        """
        self.pointer_seq = 0
        """Of the newest pointer that is persisted."""
        self._newest_in: dict[bytes, Seq] = {}
        """Of the pointers persisted while something was withheld: the newest of each run
        (`Scope.runs`).
        """
        self.pointers_persisted = 0
        """How many pointers were made or taken on the backing directory: what one says there is
        known no longer than that stays.
        """

    def begin(self) -> None:
        """From now on somebody looks after what is gated.

        What an earlier worker logged may have waited already.
        """
        self._begun = self._order is not ClusterOrder.OFF
        for op in self._log:
            self.note(op)

    def note(self, op: Op) -> None:
        """It was logged. One that was handed to the backing directory already has passed."""
        if (
            op.seq > self._newest_seq
        ):  # not one that is noted again: what was said since is for the next
            self._newest_seq = op.seq
            if self._log.needs and self._is_pointer(op):
                self._log.needs.take(op, self._directory_of)
        if self._pointers is not None and self._is_of_pointers(op):
            self._pointers[op.seq] = op
        if self._counting is not None and not self.yields(op):
            self._counting.add(op)
        if self._begun and self._removes_others(op):
            op.delayed = True
        if self._begun and self._concerns(op):
            self._add(op)
        if self._begun and self._order is ClusterOrder.POINTERS and self._is_pointer(op):
            self._add_content(op)

    def _add(self, op: Op, makes: Op | None = None) -> None:
        if not op.begun and op.seq not in self._gated:
            self._gated[op.seq] = Gated(op, makes=makes)
            (self._yielding if self.yields(op) else self._others).add(op)
            self.bell.ring()

    def _add_content(self, op: Op) -> None:
        """What was stored under another name, and becomes a pointer by this, is part of it.

        Members write a pointer under one temporary name before they rename it. If that were there
        while the rename waits, another member's file would take its place, and be renamed in its
        stead.
        """
        if op.kind not in _MOVING_IN:
            return
        for ino in {op.ino, op.victim} - {NO_INO}:
            for store in self._log.pending_of(ino):
                if store.kind in CONTENTS and store.seq < op.seq and not store.started:
                    self._add(store, makes=op)

    def has_content(self, op: Op) -> bool:
        """Whether it makes a pointer, so that what is stored for it comes with it: under the
        temporary name other members may have theirs.
        """
        is_shared = self._begun and self._order is ClusterOrder.POINTERS and self._may_have_peers()
        return is_shared and self._is_pointer(op)

    def _concerns(self, op: Op) -> bool:
        if self._order is ClusterOrder.ALL or self._is_pointer(op):
            return True
        return self._removes_others(op)

    def _removes_others(self, op: Op) -> bool:
        """Whether the operation removes what other members may name, or write again."""
        return _is_removal(op) and self._may_have_peers()

    def _may_have_peers(self) -> bool:
        return self.has_peers is not False or self._log.clock.now() > self.heard_until

    def _is_of_pointers(self, op: Op) -> bool:
        return self._is_pointer(op) or self._takes_pointer(op)

    def is_open(self, op: Op) -> bool:
        """Whether nothing is known that it waits for."""
        return op.seq not in self._gated

    # -- removals that yield

    def yields(self, op: Op) -> bool:
        """Whether it is a removal that nobody waits for, and that waits for all pointers which
        others may have closed or removed before.
        """
        if (
            self._order is not ClusterOrder.POINTERS
            or op.kind not in REMOVING
            or op.parent < 0
            or self._takes_pointer(op)
        ):
            return False
        gated = self._gated.get(op.seq)
        return gated is None or not gated.needed

    def is_to_wait(self, op: Op) -> bool:
        """Whether it yields, and others' pointers are still to come."""
        return not self.is_open(op) and self.yields(op)

    def put_off(self, op: Op) -> None:
        """All else goes on, until others' pointers are there."""
        self._put_off[op.seq] = op
        self._log.put_off(op, True)

    def put_off_after(self, count: int) -> list[Op]:
        """Those that were put off after the first `count`, in the order in which they were; a count
        is good as long as none has left.
        """
        if not count:
            self._put_off = {
                seq: op for seq, op in self._put_off.items() if self._log.get(seq) is op
            }
        return list(itertools.islice(self._put_off.values(), count, None))

    def need(self, ops: Iterable[Op], *, makes_room: bool = False) -> None:
        """Something here can neither pass these that are put off, nor do without it.

        `makes_room`: it is for want of room.
        """
        for op in ops:
            self._gated[op.seq].needed = True
            self._gated[op.seq].makes_room = makes_room
            self.yields_no_more(op)
            self._put_back(op)

    def yields_no_more(self, op: Op) -> None:
        """It takes its turn from now on."""
        if self._counting is not None:
            self._counting.add(op)
        if op.seq in self._gated:
            self._yielding.discard(op)
            self._others.add(op)

    def failed(self, number: int | None) -> None:
        """An operation failed. Where it is for want of room, what is put off may make it."""
        if number in FULL_ERRNOS:
            self.need(list(self._put_off.values()), makes_room=True)

    def _put_back(self, op: Op) -> None:
        if self._put_off.pop(op.seq, None) is not None:
            self._log.put_off(op, False)

    # -- what waits

    def gated(self) -> list[Gated]:
        """The oldest operations that wait, oldest first; so many that are withheld, or yield, hide
        none that nobody has looked at.
        """
        yielding = (self._gated[op.seq] for op in self._yielding if not op.withheld)
        others = (self._gated[op.seq] for op in self._others if not op.withheld)
        chosen = [
            one
            for ones in (self.withheld(), yielding, others)
            for one in itertools.islice(ones, LOOKED_AT_OPS_MAX)
        ]
        return sorted(chosen, key=lambda one: one.op.seq)

    def _is_waiting(self, op: Op) -> bool:
        """Whether it is to come; forgotten otherwise."""
        if self._is_to_come(op):
            return True
        self._gated.pop(op.seq, None)
        self._put_off.pop(op.seq, None)
        return False

    def asks(self, gated: Gated, nodes: dict[str, None], us: str) -> None:
        """It is known now which other members there are.

        Those that a pointer's writer named are asked whether they are there or not.
        """
        needs = self.needs(gated.pointer)
        if needs is None:
            gated.required = nodes
            return
        gated.named = frozenset(needs) - {us}
        gated.required = dict.fromkeys([*sorted(gated.named), *nodes])
        gated.unknown = set(gated.named - nodes.keys())

    def needs(self, op: Op) -> tuple[str, ...] | None:
        """Whom a pointer waits for, where its writer named them."""
        return self._log.needs.of(op)

    def forgets(self, node: str) -> bool:
        """Nothing waits for that node any more because its writer named it; whether anything
        did.
        """
        for gated in self._gated.values():
            gated.unknown.discard(node)
        return self._log.needs.forget(node)

    def unasked(self) -> list[Gated]:
        """Those of which it is not known yet which nodes there are."""
        return [one for one in self._gated.values() if one.required is None]

    def _is_to_come(self, op: Op) -> bool:
        return self._log.get(op.seq) is op or self._log.is_aside(op)

    def withheld(self) -> list[Gated]:
        """Those that wait for nodes that do not answer."""
        return [
            self._gated[op.seq]
            for op in self._log.parked()
            if op.withheld and op.seq in self._gated
        ]

    def passes(self, gated: Gated) -> None:
        """All other members have what it needs."""
        del self._gated[gated.op.seq]
        self._yielding.discard(gated.op)
        self._others.discard(gated.op)
        # also where they came, or were forgotten, while it waited
        gated.op.delayed |= _is_removal(gated.op)
        self._put_back(gated.op)
        self.frees(gated)
        if self._log.is_aside(gated.op):
            self._freed(gated.op)

    def withholds(self, gated: Gated) -> bool:
        """Set it aside until `frees`; False where its own content is not staged yet."""
        op = gated.op
        if op.parked or op.started or not is_staged(op) or self._log.is_aside(op):
            return False
        self._put_back(op)
        op.last_error = WITHHELD
        self._log.park(op)
        return True

    def frees(self, gated: Gated) -> None:
        """Into the order again, if it was set aside."""
        if gated.op.withheld:
            gated.op.last_error = None
            self._log.unpark(gated.op)

    def persisted(self, op: Op) -> None:
        """An operation is persisted."""
        self.pointers_persisted += self._is_of_pointers(op)
        if op.is_pointer:
            self.pointer_seq = max(self.pointer_seq, op.seq)
            if self._placed is not None and self._begun:  # also alone: who was forgotten comes back
                self._placed.note(self.scope_of(op).names_made(), op.logged_at)
            if self._log.parked_count:
                self._note_runs(op)

    def _note_runs(self, op: Op) -> None:
        if len(self._newest_in) >= RUNS_MAX:
            self._newest_in.clear()
        for run in self.scope_of(op).runs:
            self._newest_in[run] = max(op.seq, self._newest_in.get(run, op.seq))

    def newest_in(self, run: bytes) -> int:
        """Number of the newest pointer of a run that was persisted while something was withheld; 0:
        none, as far as is remembered.
        """
        return self._newest_in.get(run, 0)

    # -- what is withheld, and who waits for it

    def is_withheld_for_others(self, op: Op) -> bool:
        """Whether later pointers wait for it: not where what it waits for is lost, as it may never
        come (S164).
        """
        gated = self._gated.get(op.seq)
        return op.withheld and not (gated is not None and gated.of_what_is_lost)

    def keys(self, gated: Gated) -> frozenset[str]:
        """By which it has to do with what is withheld, here or elsewhere."""
        if gated.keys is None:
            waits_for_all = self.scope_of(gated.pointer).waits_for_all
            gated.keys = replace(self.scope_of(gated.op), waits_for_all=waits_for_all).asks()
        return gated.keys

    def keys_of_its_name(self, gated: Gated) -> frozenset[str]:
        """The same, of members that its writer has not named."""
        return self.scope_of(gated.op).asks_for_its_name()

    # -- what others' pointers name, and ours

    def taken(self, gated: Gated) -> frozenset[bytes]:
        """Whose names it takes away.

        None of a removal that yields: that waits for all pointers which are to come.
        """
        if self._order is not ClusterOrder.POINTERS or self.yields(gated.op):
            return frozenset()
        if gated.taken is None:
            gated.taken = self.scope_of(gated.op).taken
        return gated.taken

    def standing(self) -> tuple[dict[str, float], dict[str, float]]:
        """For the record: pointers on the backing directory that what is withheld, or held behind
        that, is to change.

        Those where it waits for what is lost are told apart, with pointers that are not there yet:
        who forgets the loss makes the oldest first. With too many or too long ones that are there
        nobody knows which.
        """
        told: tuple[dict[str, float], dict[str, float]] = ({}, {})
        to_come: dict[str, float] = {}
        waiting = [
            op for op in (self._pointers or {}).values() if op.withheld or op.aside is Aside.HELD
        ]
        if waiting:
            parked = self._log.parked()
            only_lost = bool(parked) and not any(
                not op.withheld or self.is_withheld_for_others(op) for op in parked
            )
            for op in waiting:
                of_lost = only_lost or (op.withheld and not self.is_withheld_for_others(op))
                for path in self._standing_of(op):
                    name = os.fsdecode(b"/".join(path))
                    of = told[of_lost]
                    of[name] = min(op.logged_at, of.get(name, op.logged_at))
                for name in self._to_be_made(op) if of_lost else ():
                    to_come[name] = min(op.logged_at, to_come.get(name, op.logged_at))
        _fill_up(told[True], to_come)
        return _shortened(told[False]), _shortened(told[True])

    # -- what other members have replaced

    def placed(self) -> dict[str, float]:
        """Key of a name → when the newest pointer file was closed that was made under it here."""
        return {} if self._placed is None else self._placed.told()

    def learn_placed(self, told: dict[str, float]) -> None:
        """See `Placed.learn`."""
        if self._placed is not None:
            self._placed.learn(told)

    def changes(self, gated: Gated) -> set[str]:
        """Pointers on the backing directory that it is to change, or to make, as a record has
        them.
        """
        there = {os.fsdecode(b"/".join(path)) for path in self._standing_of(gated.pointer)}
        return there | self._to_be_made(gated.pointer)

    def names_made(self, gated: Gated) -> frozenset[str]:
        """Keys of the names under which it makes a pointer file, and of nothing else."""
        if gated.names_made is None:
            op = gated.op
            is_one = op.kind in _SUPERSEDED and gated.makes is None and self._is_pointer(op)
            gated.names_made = self.scope_of(op).names_made() if is_one else frozenset()
        return gated.names_made

    def supersede(self, gated: Gated) -> bool:
        """Another member has made a later pointer of its name: it does not come any more.

        False: it cannot be left out.
        """
        given_up = self._gives_up(gated.op)
        for op in given_up:
            self._gated.pop(op.seq, None)
            self._put_off.pop(op.seq, None)
            self._yielding.discard(op)
            self._others.discard(op)
        return bool(given_up)

    def held(self) -> dict[str, float]:
        """Key → since when what tells it is withheld: pointers to come, of which the watermark says
        nothing.
        """
        return scopes.of_record(
            (self._tells(op), op.logged_at)
            for op in self._log.parked()
            if self.is_withheld_for_others(op) and not self.yields(op) and self._is_held(op)
        )

    def _is_held(self, op: Op) -> bool:
        """Whether it makes or takes a pointer; with `all`, everything counts as one."""
        gated = self._gated.get(op.seq)
        return (
            self._order is ClusterOrder.ALL
            or self._is_of_pointers(op)
            or (gated is not None and gated.makes is not None)
        )

    def _tells(self, op: Op) -> frozenset[str]:
        gated = self._gated.get(op.seq)
        keys = self.scope_of(op).tells()
        return keys | {EVERYBODYS} if gated is None or gated.for_all else keys

    # -- what other members are told

    def watermark(self, now: float) -> float:
        """All that was logged before is persisted, but for what is withheld or guarded, and
        removals that yield.
        """
        first = self._first()
        return min(now, *self._log.replaced_since(), now if first is None else first.logged_at)

    def pointers(self, now: float) -> float:
        """No pointer that was closed or removed here before is still to come; also what is withheld
        or guarded counts.
        """
        if self._order is ClusterOrder.ALL:
            return self.watermark(now)
        if self._pointers is None:
            self._pointers = {
                op.seq: op
                for op in (*self._log, *self._log.all_aside())
                if self._is_of_pointers(op)
            }
        self._pointers = {seq: op for seq, op in self._pointers.items() if self._is_to_come(op)}
        return min(
            now,
            *(
                self._log.stands_since(op)
                for op in self._pointers.values()
                if not self._is_superseded(op)
            ),
            now,
        )

    def _is_superseded(self, op: Op) -> bool:
        """A withheld pointer that may be so for ever, in whose run the newest ones are others by
        now.

        Not one that is to change what is there: that goes on naming what others may be about to
        remove.
        """
        if not op.withheld or op.kind in REMOVING or op.seq > self.pointer_seq:
            return False
        scope = self.scope_of(op)
        return not scope.replaces and all(self.newest_in(run) > op.seq for run in scope.runs)

    def head(self) -> float | None:
        """When the operation was logged that is next, and waits for the gate alone."""
        first = self._first()
        if (
            first is None
            or self.is_open(first)
            or first.is_stuck
            or first.tentative
            or not is_staged(first)
        ):
            return None
        return first.logged_at

    def _first(self) -> Op | None:
        if self._counting is None:
            self._counting = ToCome(self._is_to_come)
            for op in sorted((*self._log, *self._log.all_aside()), key=lambda op: op.seq):
                if not self.yields(op):
                    self._counting.add(op)
        return next(
            (op for op in self._counting if self._log.get(op.seq) is op and self._counts(op)), None
        )

    def _counts(self, op: Op) -> bool:
        """Whether other members' pointers wait for it: not for what is withheld or held back, and
        not for removals that yield.
        """
        if op.withheld or (op.new_parent < 0 and self.is_open(op)):
            return False
        move = self._log.move_of(op) if op.kind in CONTENTS else None
        if move is not None and self.has_content(move):
            # It comes with the pointer that it is the content of, and that waits for theirs: each
            # would wait for the other.
            return False
        return op.kind not in REMOVING or not (
            op.aside is Aside.HELD or op.parent < 0 or self.yields(op)
        )

    def _standing_of(self, op: Op) -> Iterable[LowerPath]:
        return () if self._by_path is None else self._by_path.standing(op)

    def _to_be_made(self, op: Op) -> set[str]:
        """Where it makes a pointer, whether one lies there or not."""
        if self._by_path is None or not self._is_pointer(op):
            return set()
        return {os.fsdecode(path) for path in self.scope_of(op).made}

    def _by_name(self, op: Op) -> Scope:
        names = frozenset(name for _directory, name in op.touches())
        made = frozenset({op.touches()[-1][1]})
        taken = frozenset({op.name}) if op.kind in REMOVING else frozenset()
        return Scope(names, waits_for_all=self.needs(op) is None, made=made, taken=taken)


def _fill_up(told: dict[str, float], to_come: dict[str, float]) -> None:
    """Add pointers to come as far as there is room: those beside checkpoints, which many name,
    before those within.
    """
    for name, since in to_come.items():
        if name in told:
            told[name] = min(since, told[name])
    more = [name for name in to_come.keys() - told.keys() if len(name) <= STANDING_CHARACTERS_MAX]
    more.sort(key=lambda name: (name.count("/"), to_come[name], name))
    for name in more[: max(0, STANDING_MAX - len(told))]:
        told[name] = to_come[name]


def _shortened(told: dict[str, float]) -> dict[str, float]:
    if len(told) <= STANDING_MAX and all(len(name) <= STANDING_CHARACTERS_MAX for name in told):
        return told
    return {ANYTHING: min(told.values())}


def _is_removal(op: Op) -> bool:
    return op.kind in REMOVING and op.parent > 0


def is_staged(op: Op) -> bool:
    """Whether the backing directory has its bytes."""
    return op.version is None or op.version.is_staged
