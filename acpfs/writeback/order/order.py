"""Which operations may be committed next, and together.

Normally: the longest run of ready operations at the front of the log. A pointer file begins a new
group, so that everything before it is flushed first, and so does a removal after something that may
replace what it removes. While operations are parked, those that have nothing to do with them go on;
what touches the same node or name or lies above or below, deletions of what may be the last good
state, and replacements and pointer files below the same directory at the top wait (`HELD`): an old
consistent checkpoint beats a new broken one. A removal or a change of attributes that is parked
breaks none, and holds up only what touches it. A pointer also waits for other members (`Gate`), and
so does a removal, which is put off meanwhile: all but what needs it gone passes it. A pointer that
is withheld because of a missing node holds up what has to do with it, later pointers that may name
it, deletions until a later pointer of the same run is persisted, and whatever would take the name
of what the pointer that is there still names; a later pointer has its own gate. Where there is no
room for what is next, removals pass it, a few at a time. What the guard holds back is not in the
order at all until it comes back. Used under the file system's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from acpfs.types import Seq
from acpfs.writeback.guard.guard import Guard
from acpfs.writeback.log.log import REMOVING
from acpfs.writeback.log.ops import Op, OpKind, VersionState
from acpfs.writeback.log.pairs import Pairs
from acpfs.writeback.log.stages import Aside, Stage
from acpfs.writeback.log.verdicts import OF_ASIDE, Why
from acpfs.writeback.members.gate import Gate
from acpfs.writeback.members.pointers import Pointers
from acpfs.writeback.members.scopes import Scope
from acpfs.writeback.order.parked import Parked, Told, Touched
from acpfs.writeback.order.standing_pointers import Awaited, StandingPointers
from acpfs.writeback.order.want_of_room import WantOfRoom
from acpfs.writeback.parts import DrainParts

GROUP_OPS_MAX = 256
"""Operations per commit group: with 0.1-1 ms each, and a flush of some milliseconds at the end,
larger groups gain nothing.
"""
SCAN_OPS_MAX = 1024
"""How far behind parked operations others are looked for; bounds the time under the lock to a few
milliseconds.
"""
SET_ASIDE_OPS_MAX = 15 * SCAN_OPS_MAX
"""So many that are held behind parked ones do not count in that, and parked ones never do."""
PASSING_OPS_MAX = 16
"""Removals that pass at a time what there is no room for: that is tried again before the next ones
do.
"""

_DELETING = frozenset({OpKind.UNLINK, OpKind.RMDIR, OpKind.EXCHANGE})
_TAKING_NAMES = frozenset({*_DELETING, OpKind.RENAME})
_WITHOUT_BYTES = frozenset(
    {OpKind.UNLINK, OpKind.RMDIR, OpKind.MKDIR, OpKind.SETATTR, OpKind.SETXATTR}
)
"""What may be lost, in a group with the removal of something else, without any content being
lost.
"""
_ADDING_NOTHING = frozenset({OpKind.UNLINK, OpKind.RMDIR, OpKind.SETATTR, OpKind.SETXATTR})


class Order:
    """Forms commit groups."""

    def __init__(
        self,
        parts: DrainParts,
        pointers: Pointers,
        gate: Gate,
        due: dict[Seq, float],
        elide: Callable[[Op], bool],
        guard: Guard,
    ) -> None:
        """`due`: when operations that failed are to be tried again, on trio's clock.

        `elide`: leaves out what need not be done.
        """
        self._pointers = pointers
        self.gate = gate
        self._guard = guard
        self._log = parts.log
        self._tree = parts.tree
        self._pairs = Pairs(parts.log, parts.tree)
        self._due = due
        self._elide = elide
        self.room = WantOfRoom(parts.log)
        self.standing = StandingPointers(parts)
        self._is_directory = parts.listener.is_directory
        awaited = partial(Awaited, self.standing, pointers)
        asked = (self._is_missed, gate.scope_of, gate.is_withheld_for_others, awaited)
        self._parked = Parked(parts, elide, parts.log.parked_after, *asked)
        self._put_off = Parked(parts, elide, gate.put_off_after, *asked)
        self._plain: set[Seq] = set()
        """Deletions that are known to be of no checkpoint, as long as no path changes: each costs
        10 us to see.
        """
        self._plain_at = parts.tree.epoch

    def group(self, now: float) -> tuple[list[Op], float]:
        """The next group, and, if it is empty, when to look again (infinity: when something
        happens).
        """
        self.standing.renew(now, self.gate.pointers_persisted)
        group, again = self._in_turn(now)
        return group or self._making_room(now), min(again, self.room.due(now))

    def _in_turn(self, now: float) -> tuple[list[Op], float]:
        group: list[Op] = []
        again = math.inf
        put_off = False
        later: list[Op] = []
        for op in self._candidates():
            if self._log.get(op.seq) is not op:
                continue
            if self._elide(op):
                again = now  # a look ends after so many, and nobody rings for what is behind these
                continue
            if self.gate.is_to_wait(op) and not (
                self._guard.concerns(op) or self._guard.is_too_early(op)
            ):
                self.gate.put_off(op)
                put_off = True
                again = now  # as above
                continue
            if put_off:
                return group, now  # whether it may pass them is looked at anew
            unit = self._unit(op)
            if not unit:
                later.append(op)
                continue
            late = next((one for one in unit if self._verdict(one, now) is not Why.READY), None)
            if late is not None or (group and self._begins(op, group)):
                return group, self._due.get((late or op).seq, math.inf)
            if group and (self._guard.is_too_early(op) or self._guard.concerns(op)):
                return group, now  # what precedes it is flushed before anything of it may go
            if self._guard.concerns(op):
                self._guard.hold(op)
                again = now
                continue
            if not all(self._guard.make_way(one) for one in unit):
                return group, now
            group += unit
            if len(group) >= GROUP_OPS_MAX:
                break
        return group or self._without_its_move(later, now), again

    def _without_its_move(self, later: list[Op], now: float) -> list[Op]:
        """So many contents come first that none of their renames was looked at: one goes alone."""
        if len(later) < GROUP_OPS_MAX:
            return []
        return [op for op in later if self._verdict(op, now) is Why.READY][:1]

    def _unit(self, op: Op) -> list[Op]:
        """What comes in its turn; nothing for a content that comes with the rename behind it
        (`Pairs`): members share its temporary name, or both were begun together.

        Any other is carried out with its rename where that is next in the group (`Committer`).
        """
        move = self._pairs.move_of(op)
        if move is not None and (op.begun or self.gate.has_content(move)):
            return []
        content = self._pairs.content_of(op)
        if content is not None and (content.begun or self.gate.has_content(op)):
            return [content, op]
        return [op]

    def _begins(self, op: Op, group: list[Op]) -> bool:
        """Whether what precedes it must be flushed first: a loss of power may keep any part of a
        group.

        So nobody finds a pointer without what it names, or an old checkpoint removed and the new
        one not there.
        """
        if self._pointers.makes(op) or self._pointers.takes(op):
            return True
        return op.kind in REMOVING and any(
            before.kind not in _WITHOUT_BYTES or self._pointers.takes(before) for before in group
        )

    def _making_room(self, now: float) -> list[Op]:
        """Removals that pass an operation which all others wait for, and which the backing
        directory has no room for.

        Else a full backing directory would stay full: what makes room waits behind what wants it.
        """
        line = self._log.line(SCAN_OPS_MAX)
        if not line or not self.room.is_wanted_by(line[0], now) or self._deletions_wait():
            return []
        group: list[Op] = []
        held = Touched(self._tree)
        changes = list[Op]()
        for op in line:
            if self._pointers.makes(op) or self._pointers.takes(op):
                changes.append(op)
            passes = self._may_pass(op, now) and not self._waits_for_refused(op)
            passes = passes and not self._waits_for_its_run(op)
            passes = passes and not self.standing.name(changes, op)
            if not passes or held.meets(op) or self._parked.meets(op) or self._put_off.meets(op):
                held.add(op)
            elif self._guard.concerns(op):
                self._guard.hold(op)  # which lets one checkpoint go after the other
            else:
                group.append(op)
                if len(group) >= PASSING_OPS_MAX:
                    break
        return group

    def _may_pass(self, op: Op, now: float) -> bool:
        """Whether it removes what lies there now and nobody else needs: no pointer, and no other
        member's pointer is still to come.
        """
        if (
            op.kind not in REMOVING
            or op.parent < 0
            or self._pointers.takes(op)
            or not self._tree.has_what_it_removes(op)
        ):
            return False
        return self.gate.is_open(op) and self._due.get(op.seq, 0.0) <= now

    def is_ready(self, op: Op, now: float) -> bool:
        """Whether it could be committed, were it its turn."""
        return self._verdict(op, now) is Why.READY

    def _verdict(self, op: Op, now: float) -> Why:
        if op.stage < Stage.LOGGED:
            return Why.TENTATIVE if op.tentative else Why.UNSEALED
        if self._due.get(op.seq, 0.0) > now:
            return Why.AGAIN
        if self._is_shut(op):
            return Why.OTHERS
        return (
            Why.READY
            if op.version is None or op.committed or op.version.state is VersionState.STAGED
            else Why.BYTES
        )

    def why(self, op: Op) -> Why:
        """What people are told: the verdict by which it was passed over, or would be."""
        if op.aside is Aside.NONE:
            return Why.UNDER_WAY if op.started else self._verdict(op, 0.0)
        return op.held_for if op.aside is Aside.HELD else OF_ASIDE[op.aside]

    def has_work(self) -> bool:
        """Whether the oldest operation only waits for its turn.

        Where some are set apart nobody can tell at a glance: then it has none.
        """
        first = self._log.first()
        return (
            first is not None and not (self._parked or self._put_off) and self.is_ready(first, 0.0)
        )

    def _is_shut(self, op: Op) -> bool:
        """Whether it waits for other members. What the guard will set aside does so there."""
        return not (self.gate.is_open(op) or self._guard.concerns(op))

    def _candidates(self) -> Iterator[Op]:
        self._parked.renew()
        self._put_off.renew()
        if not (self._parked or self._put_off):
            for op in self._log.front(GROUP_OPS_MAX):
                if op.aside is Aside.HELD:
                    self._hold(op, Why.READY)
                yield op
            return
        deletions_wait = self._deletions_wait()
        held = Touched(self._tree)
        told = Told(self._scope_held)
        changes = Awaited(self.standing, self._pointers)
        looked_at = 0
        for op in self._log.line(SCAN_OPS_MAX + SET_ASIDE_OPS_MAX):
            why = self._held_for(op, held, told, deletions_wait)
            if why is Why.READY and self._is_named(op, changes):
                why = Why.NAMED
            self._hold(op, why)
            if why is not Why.READY:
                held.add(op)
                changes.add(op)
                if self._is_missed(op):
                    told.add(op)
            elif looked_at < SCAN_OPS_MAX:
                looked_at += 1
                yield op
            else:
                return

    def _scope_held(self, op: Op) -> Scope:
        """Of one that is held, or a pointer: what is made that is no pointer file, one beside it
        may name.
        """
        scope = self.gate.scope_of(op)
        is_file = self._is_published(op) or self._pointers.takes(op)
        return scope if is_file else replace(scope, is_directory=True)

    def _held_for(self, op: Op, held: Touched, told: Told, deletions_wait: bool) -> Why:
        """What of those that are aside it has to wait for; `READY`: nothing."""
        if self._destroys(op):
            if deletions_wait or self._waits_for_its_run(op):
                return Why.DELETES_BEFORE_POINTER
            if self._waits_for_refused(op):
                return Why.DELETES_BEFORE_REFUSED
        if self._is_published(op) and self._parked.is_near(op):
            return Why.NAMES_REFUSED
        if self._parked.meets(op):
            return Why.TOUCHES_REFUSED
        if held.meets(op):
            return Why.TOUCHES_HELD
        if self._meets_put_off(op):
            return Why.TOUCHES_PUT_OFF
        names = self._pointers.makes(op) and (self._parked.may_be_named_by(op) or told.concerns(op))
        return Why.NAMES_WITHHELD if names else Why.READY

    def _is_named(self, op: Op, held: Awaited) -> bool:
        """Whether it takes the name of what a pointer on the backing directory still names.

        The change of that pointer is withheld, or held behind something that is.
        """
        if op.kind not in _TAKING_NAMES or op.parent < 0 or not (self._parked.changes or held):
            return False
        if self.gate.is_to_wait(op):
            return False
        names = op.touches() if op.kind is OpKind.EXCHANGE else op.touches()[:1]
        paths = [path for place in names if (path := self._tree.path_at(*place)) is not None]
        moved = (op.ino, op.victim) if op.kind is OpKind.EXCHANGE else (op.ino,)
        is_directory = any(map(self._is_directory, moved))
        return any(
            changes.name(op, path, is_directory=is_directory)
            for path in paths
            for changes in (self._parked.changes, held)
        )

    @staticmethod
    def _hold(op: Op, why: Why) -> None:
        op.held_for = why
        if (why is Why.READY) is (op.aside is Aside.HELD):
            op.put(Aside.NONE if why is Why.READY else Aside.HELD)

    def _waits_for_refused(self, op: Op) -> bool:
        """Whether what was refused may be what replaces that which the operation deletes.

        Not where a newer checkpoint of its run has replaced it already: none of that is in the log,
        so nothing of it was refused. What is refused nearby may still name it. And what the guard
        sets aside deletes nothing.
        """
        if not self._parked.refused:
            return False
        if self._guard.is_superseded(op):
            return self._parked.is_near(op)
        if self._plain_at != self._tree.epoch:
            self._plain_at = self._tree.epoch
            self._plain.clear()
        if op.seq in self._plain:
            return True
        if self._guard.concerns(op):
            return False
        if op.kind is OpKind.UNLINK and not self._guard.is_too_early(op):
            self._plain.add(op.seq)
        return True

    def _deletions_wait(self) -> bool:
        """Whether a pointer is withheld, and none at all has been persisted since: then all of them
        do.
        """
        return self._parked.newest_withheld > self.gate.pointer_seq

    def _waits_for_its_run(self, op: Op) -> bool:
        """Whether a pointer of the run is withheld that what it deletes belongs to, and none of
        that run has been persisted since.

        Another run's says nothing of this one. Where the guard has found a newer checkpoint whole
        there is nothing to wait for, and what it is still to judge is set aside meanwhile, which
        deletes nothing.
        """
        if not self._parked.is_last_of_its_run(op, self.gate.newest_in):
            return False
        return not (self._guard.is_superseded(op) or self._guard.concerns(op))

    def _meets_put_off(self, op: Op) -> bool:
        """Whether it has to wait for a removal that is put off.

        That one is not put off any longer then, unless by another that yields.
        """
        if self.gate.is_to_wait(op) or not self._put_off.meets(op):
            return False
        if not self.gate.yields(op):
            self.gate.need(self._put_off.met_by(op))
        return True

    def _is_missed(self, op: Op) -> bool:
        """Whether others rely on the operation.

        Without a removal there is more than need be; but what a pointer names may go next.
        """
        return op.kind not in _ADDING_NOTHING or self._pointers.takes(op)

    def _is_published(self, op: Op) -> bool:
        """Whether the operation may point at what is not there, or put it in place of what is."""
        return bool(op.victim) or self._pointers.makes(op)

    @staticmethod
    def _destroys(op: Op) -> bool:
        return op.kind in _DELETING
