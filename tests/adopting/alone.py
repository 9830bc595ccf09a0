"""Every interleaving of an origin that may stand still anywhere, of holders that adopt its log by
themselves (S613), and of a storage that carries out late what is not fenced.

    python -m tests.adopting.alone [OPS [HOLDERS [DEATHS [MOVES [VARIANT]]]]]     OPS: as "0,3,2"

A is the origin, B and C hold copies. There is no clock: A may be called silent at any moment, as
each of its steps and calls may come at any later one; it may be gone at any moment, too. A call is
with the storage until it is carried out: where it goes through the staging directory, and that was
removed, it is refused. A journal is how much of the log it has, how much of it as begun, and as
done. Left out: tokens of journals, several areas, names of claims (`tests/backing/test_terms.py`),
flushes and power failures, more than one operation with the storage at once, and an adopter whose
own calls come late.

What members decide is `acpfs.writeback.adopting.states` where that has it; a wrong variant is a
word in `World.wrong`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from acpfs.writeback.adopting import states
from acpfs.writeback.adopting.states import HolderState
from acpfs.writeback.log.ops import OpKind
from acpfs.writeback.sources.mirror import HOLDER_PATIENCE

STORE, RENAME, UNLINK, POINTER = range(4)
"""STORE x, RENAME x → y, UNLINK g, STORE p: the last one names what comes before it."""
KINDS = (OpKind.STORE, OpKind.RENAME, OpKind.UNLINK, OpKind.STORE)
TOUCHES = ("x", "xy", "g", "p")
NEWER = 9
"""Content that another member puts at a name after the adoption. 0: nothing of the log; g has 1."""
NOBODY, B, C = range(3)
NAMES = ("", "b", "c")
NO_MARK = (NOBODY, False)
IDLE, CLOSED, READ, MOUNTING, CLAIMED, FENCED, DRAINING = range(7)


class Known(NamedTuple):
    """What a journal has: operations before these numbers are in the log, begun, done."""

    log: int = 0
    begun: int = 0
    done: int = 0


class Put(NamedTuple):
    """Bytes of A's journal on their way to a holder."""

    to: int
    step: int
    """0: not there; 1: there is room; 2: written."""
    known: Known


class Holder(NamedTuple):
    """B or C."""

    is_closed: bool = False
    journal: Known = Known()
    at: int = IDLE
    read: Known = Known()
    """What it has read of the journal, in the wrong variant that reads it but once."""
    mark: tuple[int, bool] = NO_MARK
    """As it was read when the session was closed."""
    by_person: bool = False
    next: int = -1
    """The operation that it drains; -1: it did not begin."""
    cut: int = 0


class State(NamedTuple):
    """Of everything."""

    x: int = 0
    y: int = 0
    g: int = 1
    p: int = 0
    done: int = 0
    """So many operations were carried out in truth."""
    mark: tuple[int, bool] = (B, False)
    """Whose copies count, and whether the journal is on the storage."""
    stored: Known = Known()
    claimed_by: int = NOBODY
    is_fenced: bool = False
    """The staging directory of A's own term is gone."""
    later: int = 0
    """1: others have put newer content where all is done; 2: everywhere, after the adoption."""
    left: bool = False
    is_read: bool = False
    """Somebody has read the journal that it drains."""
    deaths: int = 0
    # A
    alive: bool = True
    is_out: bool = False
    """It was told that its log is claimed."""
    closed: int = 0
    copied: int = 0
    begun: int = 0
    own: int = 0
    """So many it knows to be done."""
    at: tuple[int, bool] = (B, False)
    """Where its journal is, as the mark."""
    acked: Known = Known()
    put: Put | None = None
    call: int = -1
    """The operation that is with the storage; -1: none."""
    writing: tuple[tuple[int, bool] | None, Known] | None = None
    """What it writes there about itself: a mark, or (None) the journal; and what that has."""
    to: tuple[int, bool] | None = None
    """Where it moves its journal to."""
    is_failing: bool = False
    moves: int = 0
    b: Holder = Holder()
    c: Holder = Holder()


class WrongError(Exception):
    """What must never be."""


Step = tuple[str, State]


@dataclass(frozen=True)
class World:
    """What there is, and what may happen."""

    ops: tuple[int, ...]
    holders: int = 1
    deaths: int = 1
    moves: int = 1
    """So often A takes its journal elsewhere."""
    wrong: frozenset[str] = frozenset()

    # -- the storage

    def _effect(self, s: State, op: int) -> State:
        """Carried out by whomever; as it is for a kernel that knows nothing of the log."""
        kind = self.ops[op]
        now = {"x": s.x, "y": s.y, "g": s.g, "p": s.p}
        if (kind == RENAME and s.x == 0) or (kind == UNLINK and s.g == 0):
            return s
        if any(now[name] == NEWER for name in TOUCHES[kind]):
            raise WrongError("older over newer")
        if s.done < op:
            raise WrongError(f"operation {op} before {s.done}: no prefix")
        if s.done > op + 1:
            raise WrongError(f"operation {op} again, after {s.done - 1}")
        if kind == RENAME:
            changed = s._replace(x=0, y=s.x)
        elif kind == UNLINK:
            changed = s._replace(g=0)
        else:
            changed = s._replace(x=1) if kind == STORE else s._replace(p=1)
        return changed._replace(done=max(s.done, op + 1))

    def _is_to_do(self, s: State, op: int) -> bool:
        """What an adopter sees who looks before it carries out an operation."""
        has = {STORE: s.x == 0, RENAME: s.x == 1, UNLINK: s.g == 1, POINTER: s.p == 0}
        return has[self.ops[op]]

    def _carried_out(self, s: State) -> Iterator[Step]:
        """An operation of A."""
        if s.call < 0:
            return
        r = s._replace(call=-1)
        if not s.alive:
            yield "call is lost", r
        if s.is_fenced and KINDS[self.ops[s.call]] is OpKind.STORE:
            yield "call is refused", r._replace(to=None, is_out=s.alive)
            return
        r = self._effect(r, s.call)
        if s.is_read and (r.x, r.y, r.g, r.p) != (s.x, s.y, s.g, s.p):
            raise WrongError("an origin that was adopted commits")
        yield "call", r._replace(own=s.call + 1) if s.alive else r

    def _written(self, s: State) -> Iterator[Step]:
        """What A writes about itself."""
        if s.writing is None:
            return
        mark, known = s.writing
        r = s._replace(writing=None)
        if not s.alive:
            yield "write is lost", r
        if s.is_fenced and "marks are not fenced" not in self.wrong:
            yield "write is refused", r._replace(to=None, is_out=s.alive)
        elif mark is None:
            r = r._replace(stored=known)
            if s.alive and s.to is not None:
                r = r._replace(writing=(s.to, known))
            yield "journal on the storage", r._replace(acked=known) if s.to is None else r
        else:
            r = r._replace(mark=mark)
            if s.alive:
                r = r._replace(at=mark, acked=known, to=None, is_failing=False)
                if mark[0] and not mark[1]:
                    r = r._replace(copied=max(r.copied, known.log))
            yield "mark", r

    # -- A

    def _origin(self, s: State) -> Iterator[Step]:
        if s.alive:
            yield "A is gone", s._replace(alive=False)
        if not s.alive or s.is_out:
            return
        if s.closed < len(self.ops):
            yield "close", s._replace(closed=s.closed + 1)
        yield from self._beginning(s)
        if s.put is not None or s.writing is not None or s.to is not None or s.at == NO_MARK:
            return
        known = Known(s.closed, s.begun, s.own)
        if not s.is_failing and known != s.acked:
            if s.at[1]:
                yield "append there", s._replace(writing=(None, known))
            else:
                yield "append", s._replace(put=Put(s.at[0], 0, known))
        if s.moves < self.moves:
            yield from self._moving(s, known)

    def _moving(self, s: State, known: Known) -> Iterator[Step]:
        moving = s._replace(moves=s.moves + 1)
        if not s.at[1]:
            to = (s.at[0], True)
            yield "goes to the storage", moving._replace(to=to, writing=(None, known))
        for other in range(B, B + self.holders):
            if (other, False) != s.at:
                to = (other, False)
                yield f"goes to {other}", moving._replace(to=to, put=Put(other, 0, known))
        if (
            s.own >= s.copied or "withdrawn though needed" in self.wrong
        ):  # else what was told to be copied would count no more
            yield "withdraws", moving._replace(to=NO_MARK, writing=(NO_MARK, known))

    def _beginning(self, s: State) -> Iterator[Step]:
        if s.own >= s.closed or s.to is not None or s.call >= 0:
            return
        if s.begun == s.own:
            yield "note as begun", s._replace(begun=s.own + 1)
        elif s.at == NO_MARK or (not s.is_failing and not self._must_know(s)):
            yield "begin", s._replace(call=s.own)

    def _must_know(self, s: State) -> bool:
        """`Mirror._must_know`."""
        op = s.own
        if "begun untold" in self.wrong:
            return s.acked.log <= op
        unknown = range(s.acked.done, op)
        alone = any(not self._repeats(one) for one in unknown)
        names = set(TOUCHES[self.ops[op]])
        met = any(names & set(TOUCHES[self.ops[one]]) for one in unknown)
        is_told = self._repeats(op) or s.acked.begun > op
        return s.acked.log <= op or alone or met or not is_told

    def _repeats(self, op: int) -> bool:
        return KINDS[self.ops[op]] in HOLDER_PATIENCE.repeatable

    def _bytes(self, s: State) -> Iterator[Step]:
        """Of a journal, at the holder: there is room, they are written, and that is told."""
        if s.put is None:
            return
        holder = _holder(s, s.put.to)
        asks = s.put.step != 1 and not (
            s.put.step == 2 and "bytes told after the claim" in self.wrong
        )
        if asks and holder.is_closed and "session not closed" not in self.wrong:
            refused = s._replace(put=None, is_failing=s.alive, to=None)
            yield "is refused", refused
        elif s.put.step == 0:
            yield "room", s._replace(put=s.put._replace(step=1))
        elif s.put.step == 1:
            kept = Known(*map(max, holder.journal, s.put.known))
            written = _with(s, s.put.to, holder._replace(journal=kept))
            yield "written", written._replace(put=s.put._replace(step=2) if s.alive else None)
        elif not s.alive:
            yield "nobody asks", s._replace(put=None)
        elif s.to is not None:
            yield "seeded", s._replace(put=None, writing=(s.to, s.put.known))
        else:
            copied = max(s.copied, s.put.known.log)
            yield "told", s._replace(put=None, acked=s.put.known, copied=copied)

    # -- a holder

    def _journal(self, s: State, mark: tuple[int, bool]) -> Known:
        """What counts: copies are at the holder, whoever has the journal."""
        held = _holder(s, mark[0]).journal
        if not mark[1]:
            return held
        return s.stored._replace(log=min(s.stored.log, held.log))

    def _not_fenced(self, known: Known) -> bool:
        if "begun operations are not looked for" in self.wrong:
            return False
        return any(not self._repeats(op) for op in range(known.done, known.begun))

    def _watch(self, s: State, me: int) -> Iterator[Step]:
        it = _holder(s, me)
        if it.at != IDLE and s.deaths < self.deaths:
            # a session that was closed for a look, and not claimed, is open for the next worker
            died = it._replace(at=IDLE, is_closed=it.is_closed and it.at > READ)
            yield f"{me} DIES", _with(s._replace(deaths=s.deaths + 1), me, died)
            # the worker alone: the next one knows nothing of the mount
            knows_claim = "opened though it is claimed" not in self.wrong
            if it.at == MOUNTING and not (s.claimed_by == me and knows_claim):
                opened = it._replace(is_closed=False)
                yield f"{me}'s worker DIES", _with(s._replace(deaths=s.deaths + 1), me, opened)
        does = {
            IDLE: self._idle,
            CLOSED: self._first_look,
            READ: self._second_look,
            MOUNTING: self._mounting,
            CLAIMED: self._fencing,
            FENCED: self._reading,
            DRAINING: self._draining,
        }
        yield from does[it.at](s, me)

    def _first_look(self, s: State, me: int) -> Iterator[Step]:
        it = _holder(s, me)
        known = self._journal(s, it.mark)
        if not it.mark[1] and self._not_fenced(known):
            opened = it._replace(at=IDLE, is_closed=False)
            yield f"{me} asks a person", _with(s, me, opened)
        else:
            yield f"{me} has read", _with(s, me, it._replace(at=READ, read=known))

    @staticmethod
    def _second_look(s: State, me: int) -> Iterator[Step]:
        it = _holder(s, me)
        if states.may_claim_closed(is_mark_same=s.mark == it.mark, why=""):
            yield f"{me} mounts", _with(s, me, it._replace(at=MOUNTING, is_closed=True))
        else:
            yield f"{me} opens it", _with(s, me, it._replace(at=IDLE, is_closed=False))

    def _mounting(self, s: State, me: int) -> Iterator[Step]:
        it = _holder(s, me)
        may = states.may_take_over(
            NAMES[me],
            NAMES[s.claimed_by],
            NAMES[s.mark[0]],
            alone=not it.by_person and "mark not read before the claim" not in self.wrong,
        )
        if "no way past a claim" in self.wrong:
            may = may and s.claimed_by in (NOBODY, me)
        if not it.is_closed and "claimed though it is open again" not in self.wrong:
            may = False  # looked at with the lock under which it is opened
        given_up = _with(s, me, it._replace(at=IDLE))
        if s.alive and not it.by_person:
            yield f"{me} sees that it lives", given_up
        if "read before the fence" in self.wrong:
            it = it._replace(mark=s.mark, read=self._journal(s, s.mark))
        if may and not (it.by_person or s.claimed_by or s.mark[0] == me):
            raise WrongError("a node that may live is shut out by a copy that does not count")
        if may:
            yield f"{me} claims", _with(s._replace(claimed_by=me), me, it._replace(at=CLAIMED))
        else:
            yield f"{me} is refused", given_up

    def _fencing(self, s: State, me: int) -> Iterator[Step]:
        is_fenced = s.is_fenced or "no fence" not in self.wrong
        fenced = s._replace(is_fenced=is_fenced)
        yield f"{me} fences", _with(fenced, me, _holder(s, me)._replace(at=FENCED))

    def _idle(self, s: State, me: int) -> Iterator[Step]:
        it = _holder(s, me)
        if s.left:
            return
        counts = s.mark[0] == me
        if it.is_closed:
            if s.claimed_by == me:
                if counts or s.mark[0] == NOBODY:
                    yield f"{me} goes on", _with(s, me, it._replace(at=MOUNTING))
            else:
                yield f"{me} opens it again", _with(s, me, it._replace(is_closed=False))
        elif counts and states.may_claim(
            HolderState.HOLDING, silent=True, answers=False, has_left=s.left
        ):
            closed = it._replace(is_closed=True, at=CLOSED, mark=s.mark)
            if "journal read before closing" in self.wrong:
                # while it is open yet; it is closed at a later step
                known = self._journal(s, s.mark)
                closed = closed._replace(is_closed=False, at=READ, read=known)
            yield f"{me} closes the session", _with(s, me, closed)
        if not s.alive:  # who says that A's machine is off
            asked = it._replace(is_closed=True, at=MOUNTING, by_person=True)
            off = s._replace(call=-1, writing=None, put=None)
            if counts or s.mark[0] == NOBODY:
                yield f"{me} is asked", _with(off, me, asked)

    def _reading(self, s: State, me: int) -> Iterator[Step]:
        it = _holder(s, me)
        mark = s.mark
        is_old = {"mark not read after the fence", "read before the fence"} & self.wrong
        if is_old and not it.by_person:
            mark = it.mark if it.mark != NO_MARK else mark
        if s.claimed_by != me or (mark[0] != me and not (mark == NO_MARK and it.by_person)):
            yield f"{me} refuses: not its", _with(s, me, it._replace(at=IDLE))
            return
        known = self._journal(s, mark) if mark != NO_MARK else Known()
        if _READ_ONCE & self.wrong and it.read != Known():
            known = it.read
        if not it.by_person and self._not_fenced(known):
            yield f"{me} refuses: begun", _with(s, me, it._replace(at=IDLE))
            return
        first = it.next if it.next >= 0 else known.done
        drains = it._replace(at=DRAINING, next=first, cut=max(it.cut, known.log))
        yield f"{me} reads", _with(s._replace(is_read=True), me, drains)

    def _draining(self, s: State, me: int) -> Iterator[Step]:
        it = _holder(s, me)
        if s.claimed_by != me:
            yield f"{me} is shut out", _with(s, me, it._replace(at=IDLE))
        elif it.next >= it.cut:
            if it.cut < s.copied and max(s.done, it.cut) < s.copied:
                raise WrongError("what was told to be copied is lost")
            yield f"{me} leaves", _with(s._replace(left=True), me, it._replace(at=IDLE))
        else:
            r = s
            if "adopter is blind" in self.wrong or self._is_to_do(s, it.next):
                r = self._effect(s, it.next)
            yield f"{me} drains {it.next}", r  # it may die before it notes that
            yield f"{me} drains and notes {it.next}", _with(r, me, it._replace(next=it.next + 1))

    # -- all

    def steps(self, s: State) -> list[Step]:
        """What may come next.

        Raises:
            WrongError: one of them must never be.
        """
        found = [*self._carried_out(s), *self._written(s), *self._bytes(s), *self._origin(s)]
        for me in range(B, B + self.holders):
            found += self._watch(s, me)
        found += self._others(s)
        return [one for one in found if one[1] != s]

    def _others(self, s: State) -> Iterator[Step]:
        """Another member writes names of which the log has nothing more to do."""
        if s.left and s.later < 2:
            yield "others write", s._replace(later=2, x=NEWER, y=NEWER, g=NEWER, p=NEWER)
        elif s.done and not s.later:
            left = "".join(TOUCHES[kind] for kind in self.ops[s.done :])
            done = "".join(TOUCHES[kind] for kind in self.ops[: s.done])
            names = dict.fromkeys({*done} - {*left}, NEWER)
            yield "others write", s._replace(later=1, **names)  # type: ignore[arg-type]

    def is_well(self, s: State) -> bool:
        """A lives and may go on, with its holder, or what it told to be copied is there."""
        if s.done >= s.copied or s.left:
            return True
        is_shut = s.mark[0] != NOBODY and _holder(s, s.mark[0]).is_closed
        return s.alive and not s.is_out and not (is_shut and s.claimed_by == NOBODY)


_READ_ONCE = {"journal not read again", "journal read before closing", "read before the fence"}


def _holder(s: State, me: int) -> Holder:
    return s.b if me == B else s.c


def _with(s: State, me: int, holder: Holder) -> State:
    return s._replace(b=holder) if me == B else s._replace(c=holder)


class Walked(NamedTuple):
    """What was found."""

    states: int
    steps: int
    wrong: str
    """ "": nothing."""
    path: tuple[str, ...] = ()


def walk(world: World) -> Walked:
    """All states, breadth first, until one is wrong, or nobody may go on from it."""
    first = State()
    number = {first: 0}
    order = [first]
    came: list[tuple[int, str]] = [(-1, "")]
    edges = array("I")
    steps = 0
    for at, s in enumerate(order):
        try:
            found = world.steps(s)
        except WrongError as error:
            return Walked(len(order), steps, str(error), _path(came, at))
        steps += len(found)
        for name, r in found:
            to = number.setdefault(r, len(order))
            if to == len(order):
                order.append(r)
                came.append((at, name))
            if not name.endswith("DIES"):
                edges.extend((to, at))
    stuck = _stuck(world, order, edges)
    if stuck >= 0:
        return Walked(len(order), steps, "nobody may go on", _path(came, stuck))
    return Walked(len(order), steps, "")


def _stuck(world: World, order: list[State], edges: array[int]) -> int:
    """A state from which what was copied can come no more; -1: none."""
    before: list[list[int]] = [[] for _ in order]
    for at in range(0, len(edges), 2):
        before[edges[at]].append(edges[at + 1])
    todo = [at for at, s in enumerate(order) if world.is_well(s)]
    well = bytearray(len(order))
    while todo:
        at = todo.pop()
        if not well[at]:
            well[at] = True
            todo += before[at]
    return well.find(0)


def _path(came: list[tuple[int, str]], at: int) -> tuple[str, ...]:
    names = []
    while at > 0:
        at, name = came[at]
        names.append(name)
    return tuple(reversed(names))


@dataclass(frozen=True)
class Variant:
    """A protocol that is wrong, and the smallest log with which that is found."""

    ops: tuple[int, ...] = (UNLINK,)
    holders: int = 1
    deaths: int = 0
    moves: int = 1


WRONG = {
    "session not closed": Variant(),
    "journal read before closing": Variant(),
    "bytes told after the claim": Variant(),
    "begun untold": Variant(),
    "begun operations are not looked for": Variant(),
    "journal not read again": Variant(),
    "mark not read after the fence": Variant(),
    "marks are not fenced": Variant(),
    "read before the fence": Variant(),
    "withdrawn though needed": Variant((STORE,)),
    "no fence": Variant((STORE,)),
    "adopter is blind": Variant((STORE,)),
    "no way past a claim": Variant(holders=2),
    "mark not read before the claim": Variant(),
    "claimed though it is open again": Variant(deaths=1),
    "opened though it is claimed": Variant(deaths=2, moves=0),
}
"""Name → with what."""


def main(ops: str = "0,2,3", *rest: str) -> None:
    holders, deaths, moves = (int(one) for one in (*rest[:3], *"111"[len(rest[:3]) :]))
    kinds = tuple(map(int, ops.split(",")))
    print(walk(World(kinds, holders, deaths, moves, frozenset(rest[3:]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
