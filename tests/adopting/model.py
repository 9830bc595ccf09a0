"""Every interleaving of copy, commit, claim, fence, adoption and return, for three members and a
storage whose calls may be late.

    python -m tests.adopting.model [K [VARIANT]]      K = 1 or 2 holders

A is the origin; B (and C, with two) hold copies. C's application also writes newer content, and a
pointer that names A's files. There is no clock: a member may be suspected at any moment at which it
is dead, or the one that suspects cannot reach it. A call that A has handed to its storage client
may be carried out at any later moment, also after A's death and after the fence.

What members decide is `acpfs.writeback.adopting.states`, called as the product has it. What the
storage and the applications do is here. A wrong variant replaces a decision there (`WRONG`), or
names in `World.wrong` how the storage or the protocol differ.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from acpfs.writeback.adopting import states
from acpfs.writeback.adopting.states import (
    AdopterStep,
    Adoption,
    HolderEvent,
    HolderKnows,
    HolderState,
    OriginEvent,
    OriginState,
    Turn,
)

STORE, RENAME, STORE_AGAIN, UNLINK = range(4)
"""STORE t, RENAME t → f, STORE t anew, UNLINK g."""
WHOLE = (STORE, RENAME, STORE_AGAIN, UNLINK)
NOTE = 0
"""In place of a term: the call writes the note, which is never fenced."""
NOBODY, A, B, C = range(4)
OURS = 7
NEWER = 9
"""Content of g before A removes it, and what a later writer puts at f or g. At t: 1, then 3."""


class Call(NamedTuple):
    """That is with the storage."""

    term: int
    op: int
    step: int


class Holding(NamedTuple):
    """What B or C is."""

    alive: bool = True
    state: HolderState = HolderState.HOLDING
    has: int = 0
    told: int = 0
    term: int = 0
    fenced: bool = False
    done: int = -1
    """-1: it has not read the notes."""
    step: int = 0
    looked: bool = False
    call: Call | None = None


class State(NamedTuple):
    """Of everything."""

    # the storage's names: content, 0 for none
    t: int = 0
    f: int = 0
    moved: int = 0
    """What of a rename lies in the staging directory."""
    g: int = OURS
    later_f: bool = False
    later_g: bool = False
    pointer_after: int = -1
    """So many operations A had closed when the pointer was closed."""
    pointer_there: bool = False
    done: int = 0
    """So many operations were carried out in truth."""
    noted: int = 0
    """By the note of the first term: so many are done."""
    adopter_noted: int = 0
    second: int = NOBODY
    """Who has claimed the second term."""
    third: int = NOBODY
    terms: int = 0b10
    """Of which terms there is a staging directory."""
    left: bool = False
    cut: int = 0
    watermark: int = 0
    # A
    alive: bool = True
    mode: OriginState = OriginState.LIVE
    term: int = 1
    closed: int = 0
    own: int = 0
    """So many operations A knows to be done."""
    call: Call | None = None
    copied: int = 0
    """So many were called copied."""
    a_b: bool = True
    a_c: bool = True
    crashes: int = 0
    b: Holding = Holding()
    c: Holding = Holding()


class WrongError(Exception):
    """What must never be."""


def _check(s: State) -> State:
    if s.f == 3:
        raise WrongError("f has content that it never had")
    if s.later_f and s.f != NEWER:
        raise WrongError("older content replaced what a later writer put at f")
    if s.later_g and s.g != NEWER:
        raise WrongError("what a later writer put at g was removed")
    if s.pointer_there and s.done < s.pointer_after:
        raise WrongError("pointer is there before what it names")
    if s.left and s.cut < s.copied:
        raise WrongError("fsync said copied, and it is lost")
    return s


Step = tuple[str, State]


@dataclass(frozen=True)
class World:
    """What there is, and what may happen."""

    holders: int = 1
    ops: tuple[int, ...] = WHOLE
    crashes: int = 1
    wrong: frozenset[str] = frozenset()

    def start(self) -> State:
        """With two holders all is closed at the beginning, and nobody else writes a pointer."""
        if self.holders == 1:
            return State()
        return State(closed=len(self.ops), pointer_after=0, pointer_there=True)

    # -- the storage

    def _goes_through(self, s: State, call: Call) -> bool:
        """A call of a term whose staging directory is gone fails, or should."""
        if s.terms >> call.term & 1:
            return True
        is_store = self.ops[call.op] in (STORE, STORE_AGAIN)
        return (
            ("fence by renaming" in self.wrong and is_store)
            or ("names not through staging" in self.wrong and not is_store)
            or "staging made anew" in self.wrong
        )

    @staticmethod
    def _in_order(s: State, op: int) -> None:
        if s.done < op:
            raise WrongError(f"operation {op} before {s.done}")
        if s.done > op + 1:
            raise WrongError(f"operation {op} carried out again after {s.done - 1}")

    def _carry_out(self, s: State, call: Call) -> State | None:
        """None: it fails."""
        if not self._goes_through(s, call):
            return None
        kind = self.ops[call.op]
        after = max(s.done, call.op + 1)
        if kind in (STORE, STORE_AGAIN):
            content = 1 if kind == STORE else 3
            self._in_order(s, call.op)
            if s.done == call.op + 1 and s.t != content:
                raise WrongError(f"operation {call.op} carried out again")
            return s._replace(t=content, done=after)
        if kind == RENAME:
            return self._rename(s, call, after)
        if s.g == 0:
            return s._replace(done=after) if s.done >= call.op else s
        self._in_order(s, call.op)
        return _check(s._replace(g=0, done=after))

    def _rename(self, s: State, call: Call, after: int) -> State:
        if "names not through staging" in self.wrong:
            if s.t == 0:
                return s
            moved = _check(s._replace(f=s.t, t=0, done=after))
            self._in_order(s, call.op)
            return moved
        if call.step == 0:
            if s.t == 0:
                return s
            if s.done > call.op + 1 or s.t == 3:
                raise WrongError("rename takes a newer file away")
            return s._replace(moved=s.t, t=0)
        if s.moved == 0:
            return s
        self._in_order(s, call.op)
        return _check(s._replace(f=s.moved, moved=0, done=after))

    def _calls_of(self, op: int) -> int:
        is_rename = self.ops[op] == RENAME
        return 2 if is_rename and "names not through staging" not in self.wrong else 1

    # -- looking: what is left to do of an operation that may have been begun

    def _look(self, s: State, op: int, step: int) -> str:
        """ "act"; "step": the first half is done; "pass": all is, or others changed it since."""
        kind = self.ops[op]
        if kind in (STORE, STORE_AGAIN):
            return "act" if s.t == 0 else "pass"
        if kind == UNLINK:
            return "act" if s.g == OURS else "pass"
        if step == 0:
            return "act" if s.t == 1 else "step" if s.moved == 1 else "pass"
        return "act" if s.moved == 1 and s.f == 0 else "pass"

    def _settled(self, s: State, op: int) -> State:
        """Done, or given up in favour of a later writer."""
        moved = 0 if self.ops[op] == RENAME else s.moved
        return s._replace(done=max(s.done, op + 1), moved=moved)

    # -- A

    def _copies(self, s: State) -> list[tuple[str, bool, Holding]]:
        return [("b", s.a_b, s.b), ("c", s.a_c, s.c)][: self.holders]

    def _origin(self, s: State) -> Iterator[Step]:
        if s.closed < len(self.ops):
            yield "close", s._replace(closed=s.closed + 1)
        is_first = s.mode is OriginState.LIVE and s.term == 1
        if is_first:
            yield from self._copying(s)
        if s.call is None and s.own < s.closed and s.mode is OriginState.LIVE:
            yield from self._first_term(s) if is_first else self._later_term(s)
        is_claimed = (s.second or s.third) and "no claim" not in self.wrong
        if is_first and s.call is None and is_claimed:
            mode = states.origin_after(s.mode, OriginEvent.CLAIM_SEEN)
            yield "sees the claim", s._replace(mode=mode)
        if is_first and s.watermark < s.own and not s.left:
            yield "publish", s._replace(watermark=s.own)
        if s.mode is OriginState.SUPERSEDED:
            yield from self._returning(s)
        if s.crashes < self.crashes:
            yield "CRASH A", s._replace(alive=False, crashes=s.crashes + 1)

    def _copying(self, s: State) -> Iterator[Step]:
        """Bytes and transactions in order; acknowledged when all holders have them."""
        for name, link, holder in self._copies(s):
            if not (link and holder.alive and holder.state in states.TAKES_BYTES):
                continue
            is_cut = holder.state is HolderState.HOLDING  # later it is not in the cut any more
            if holder.has < s.closed or (not is_cut and s.copied < s.closed):
                has = [one.has for other, _link, one in self._copies(s) if other != name]
                kept = holder._replace(has=holder.has + is_cut)
                reached = min([holder.has + 1 if is_cut else s.copied + 1, *has])
                copied = s._replace(copied=max(s.copied, reached))
                yield f"copy {name}", _put(copied, name, kept)
            if is_cut and holder.told < s.own:
                yield f"tell {name}", _put(s, name, holder._replace(told=s.own))

    def _first_term(self, s: State) -> Iterator[Step]:
        copies = [HolderKnows(holder.told, holder.has) for _name, _link, holder in self._copies(s)]
        chosen = states.turn(s.mode, s.own, copies, s.noted)
        if chosen is Turn.BEGIN:
            yield "begin", s._replace(call=Call(s.term, s.own, 0))
        elif chosen is Turn.TELL:
            yield "note", s._replace(call=Call(NOTE, s.own, 0))

    def _later_term(self, s: State) -> Iterator[Step]:
        """It came back, and nobody holds a copy of the rest."""
        if states.turn(s.mode, s.own, (), 0) is not Turn.BEGIN:
            return
        begun = s._replace(call=Call(s.term, s.own, 0))
        if not self._looks_on_return():
            yield "return: begin blind", begun
            return
        found = self._look(s, s.own, 0)
        if found == "step":
            begun = s._replace(call=Call(s.term, s.own, 1))
            found = self._look(s, s.own, 1)
        if found == "act":
            yield "return: begin", begun
        else:
            yield "return: left to the later", self._settled(s, s.own)._replace(own=s.own + 1)

    def _looks_on_return(self) -> bool:
        return "return is blind" not in self.wrong and states.looks_first(of_earlier_term=True)

    def _returning(self, s: State) -> Iterator[Step]:
        silent = {B: not s.b.alive, C: not s.c.alive, NOBODY: True, A: False}
        if not states.may_return(
            has_left=s.left, claimers_silent=silent[s.second] and silent[s.third]
        ):
            return
        # The next free term: claimed, all before it fenced, and then the notes are read.
        notes = [s.cut if s.left else 0, s.noted, s.adopter_noted]
        if "return replays" in self.wrong:
            notes.clear()
        yield (
            "returns",
            s._replace(
                mode=states.origin_after(s.mode, OriginEvent.CLAIMED),
                term=4 if s.third else 3,
                third=s.third or A,
                terms=0b10000 if s.third else 0b1000,
                own=states.done_by(s.own, notes),
            ),
        )

    def _storage_of_origin(self, s: State, call: Call) -> Iterator[Step]:
        if not s.alive:
            yield "call never arrives", s._replace(call=None)
        if call.term == NOTE:
            yield "noted", s._replace(noted=call.op, call=None)
            return
        r = self._carry_out(s, call)
        if r is None:
            mode = s.mode
            if s.alive and mode is not OriginState.SUPERSEDED:
                mode = states.origin_after(mode, OriginEvent.STAGING_GONE)
            yield "call fails", s._replace(call=None, mode=mode)
        elif not s.alive:
            yield "late call", r._replace(call=None)
        elif call.step + 1 < self._calls_of(call.op):
            yield self._second_half(r, call)
        else:
            done = max(r.done, call.op + 1)
            yield "call", r._replace(call=None, own=call.op + 1, done=done)

    def _second_half(self, s: State, call: Call) -> Step:
        """One that came back looks before each step."""
        looks = call.term != 1 and self._looks_on_return()
        if looks and s.mode is OriginState.LIVE and self._look(s, call.op, call.step + 1) != "act":
            settled = self._settled(s, call.op)
            return "call, left to the later", settled._replace(call=None, own=call.op + 1)
        return "call", s._replace(call=call._replace(step=call.step + 1))

    # -- B and C

    def _storage_of_holder(self, s: State, name: str, me: Holding, call: Call) -> Iterator[Step]:
        r = self._carry_out(s, call)
        if not me.alive:
            yield f"{name} call never arrives", _put(s, name, me._replace(call=None))
        if r is None:
            state = states.holder_after(me.state, HolderEvent.SUPERSEDED)
            given_up = me._replace(call=None, state=state if me.alive else me.state)
            yield f"{name} call fails", _put(s, name, given_up)
        elif not me.alive:
            yield f"{name} late call", _put(r, name, me._replace(call=None))
        elif call.step + 1 < self._calls_of(call.op):
            halfway = me._replace(call=None, looked=False, step=call.step + 1)
            yield f"{name} call", _put(r, name, halfway)
        else:
            yield f"{name} call", _put(self._settled(r, call.op), name, _past(me))

    def _holder(self, s: State, name: str, me: Holding, *, link: bool) -> Iterator[Step]:
        silent = not s.alive or not link or self.holders == 2
        if states.may_claim(me.state, silent=silent, answers=not silent, has_left=s.left):
            yield from self._claiming(s, name, me)
        adoption = Adoption(
            me.state,
            me.fenced,
            None if me.done < 0 else me.done,
            me.has,
            s.adopter_noted,
            me.looked,
        )
        chosen = states.adopter_step(adoption)
        if chosen is AdopterStep.FENCE:
            yield f"{name} fences", self._fence(s, name, me)
        elif chosen is AdopterStep.READ_NOTES:
            done = states.done_by(me.told, self._notes(s))
            yield f"{name} reads notes", _put(s, name, _ready(me._replace(done=done)))
        elif chosen is AdopterStep.FINISH:
            state = states.holder_after(me.state, HolderEvent.EMPTY)
            finished = s._replace(left=True, cut=max(me.has, me.done))
            yield f"{name} is done", _put(finished, name, me._replace(state=state))
        elif chosen is AdopterStep.NOTE:
            yield f"{name} notes", s._replace(adopter_noted=me.done)
        elif chosen is AdopterStep.LOOK:
            yield from self._looking(s, name, me)
        elif chosen is AdopterStep.ACT:
            call = Call(me.term, me.done, me.step)
            yield f"{name} begins", _put(s, name, me._replace(call=call))

    def _notes(self, s: State) -> list[int]:
        return [] if "note not read" in self.wrong else [s.noted, s.adopter_noted]

    def _looking(self, s: State, name: str, me: Holding) -> Iterator[Step]:
        found = self._look(s, me.done, me.step)
        if found == "act":
            yield f"{name} looks", _put(s, name, me._replace(looked=True))
        elif found == "step":
            yield f"{name} looks", _put(s, name, me._replace(step=1))
        else:
            yield f"{name} passes", _put(self._settled(s, me.done), name, _past(me))

    def _claiming(self, s: State, name: str, me: Holding) -> Iterator[Step]:
        who = B if name == "b" else C
        state = states.holder_after(me.state, HolderEvent.CLAIMED)
        alive = {B: s.b.alive, C: s.c.alive}.get(s.second, True)
        came_back = s.alive and s.mode is OriginState.LIVE and s.term > 1
        if not s.second or "no claim" in self.wrong:
            yield (
                f"{name} claims",
                _put(s._replace(second=who), name, me._replace(state=state, term=2)),
            )
        elif not s.third and s.second != who and not alive and not came_back:
            yield (
                f"{name} claims after the claimer",
                _put(s._replace(third=who), name, me._replace(state=state, term=3)),
            )

    def _fence(self, s: State, name: str, me: Holding) -> State:
        gone = s.terms & ~((1 << me.term) - 1)
        if "no fence" in self.wrong:
            gone = s.terms
        if "no claim" in self.wrong:
            gone = s.terms & ~2
        return _put(s._replace(terms=gone | 1 << me.term), name, _ready(me._replace(fenced=True)))

    # -- C's application, and its pointer

    def _application(self, s: State) -> Iterator[Step]:
        """A write between somebody's look and its rename is at the same time as that, and either
        may be last.
        """
        half = s.call is not None and self.ops[s.call.op] == RENAME and s.call.step == 1
        if not s.later_f and (s.f == 1 or (s.left and s.f == 0 and not half)):
            yield "C writes f", s._replace(f=NEWER, later_f=True)
        if not s.later_g and s.g == 0:
            yield "C writes g", s._replace(g=NEWER, later_g=True)
        if s.pointer_after < 0 and s.closed >= min(2, len(self.ops)):
            yield "C closes pointer", s._replace(pointer_after=s.closed)
        if s.pointer_after >= 0 and not s.pointer_there:
            after = s.pointer_after
            if s.watermark >= after or (s.left and states.passes(after, s.cut)):
                yield "pointer passes", s._replace(pointer_there=True)

    def steps(self, s: State) -> list[Step]:
        """All that may come next; names of faults begin with a capital letter."""
        found: list[Step] = []
        if s.alive:
            found += self._origin(s)
        if s.call is not None:
            found += self._storage_of_origin(s, s.call)
        if self.holders == 1:  # with two, each step may find its link up or down
            found.append(("LINK A B", s._replace(a_b=not s.a_b)))
        for name, link, holder in self._copies(s):
            if holder.alive and s.crashes < self.crashes:
                crashed = s._replace(crashes=s.crashes + 1)
                found.append((f"CRASH {name}", _put(crashed, name, holder._replace(alive=False))))
            if holder.call is not None:
                found += self._storage_of_holder(s, name, holder, holder.call)
            elif holder.alive:
                found += self._holder(s, name, holder, link=link)
        found += self._application(s)
        for _name, r in found:
            _check(r)
        return found

    def is_well(self, s: State) -> bool:
        """What was promised is there, or nobody is left who could bring it."""
        somebody = s.alive or s.b.alive or (self.holders == 2 and s.c.alive)
        return s.done >= s.copied or not somebody


def _put(s: State, name: str, holder: Holding) -> State:
    return s._replace(b=holder) if name == "b" else s._replace(c=holder)


def _past(me: Holding) -> Holding:
    """The operation is settled."""
    return me._replace(call=None, looked=False, done=me.done + 1, step=0)


def _ready(me: Holding) -> Holding:
    """It drains when it has fenced and has read."""
    if not me.fenced or me.done < 0:
        return me
    return me._replace(state=states.holder_after(me.state, HolderEvent.READY))


class Walked(NamedTuple):
    """What was found."""

    states: int
    steps: int
    wrong: str
    """ "": nothing."""
    path: tuple[str, ...] = ()
    is_whole: bool = True


def walk(world: World, limit: int = 1 << 62) -> Walked:
    """All states, breadth first, until one is wrong; `limit`: not more of them."""
    first = world.start()
    seen: dict[State, tuple[State, str] | None] = {first: None}
    order = [first]
    number = {first: 0}
    edges = array("I")
    """Pairs of numbers, later and earlier, of all steps but crashes."""
    steps = 0
    for s in order:
        try:
            found = world.steps(s)
        except WrongError as error:
            return Walked(len(seen), steps, str(error), _path(seen, s))
        except KeyError as error:
            return Walked(len(seen), steps, f"what cannot happen: {error}", _path(seen, s))
        steps += len(found)
        for name, r in found:
            if r not in seen:
                seen[r] = (s, name)
                number[r] = len(order)
                order.append(r)
            if not name.startswith("CRASH"):
                edges.extend((number[r], number[s]))
        if len(seen) > limit:
            return Walked(len(seen), steps, "", is_whole=False)
    stuck = _stuck(world, order, edges)
    if stuck is not None:
        return Walked(len(seen), steps, "what was promised can come no more", _path(seen, stuck))
    return Walked(len(seen), steps, "")


def _stuck(world: World, order: list[State], edges: array[int]) -> State | None:
    """A state from which no steps lead to what was promised, crashes left out."""
    before: list[list[int]] = [[] for _ in order]
    for at in range(0, len(edges), 2):
        before[edges[at]].append(edges[at + 1])
    todo = [number for number, s in enumerate(order) if world.is_well(s)]
    well = bytearray(len(order))
    while todo:
        number = todo.pop()
        if not well[number]:
            well[number] = True
            todo += before[number]
    return next((s for number, s in enumerate(order) if not well[number]), None)


def _path(seen: dict[State, tuple[State, str] | None], s: State) -> tuple[str, ...]:
    names = []
    before = seen[s]
    while before is not None:
        names.append(before[1])
        before = seen[before[0]]
    return tuple(reversed(names))


# -- wrong variants


def _begins_untold(_state: OriginState, _op: int, _copies: object, _noted: int) -> Turn:
    return Turn.BEGIN if _state is OriginState.LIVE else Turn.WAIT


def _reads_before_the_fence(adoption: Adoption) -> AdopterStep:
    if adoption.state is HolderState.CLAIMED and adoption.done is None:
        return AdopterStep.READ_NOTES
    return _RIGHT_STEP(adoption)


def _acts_blindly(adoption: Adoption) -> AdopterStep:
    chosen = _RIGHT_STEP(adoption)
    return AdopterStep.ACT if chosen is AdopterStep.LOOK else chosen


def _notes_nothing(adoption: Adoption) -> AdopterStep:
    return _RIGHT_STEP(adoption._replace(noted=len(WHOLE)))


def _begins_where_nobody_answers(
    state: OriginState, op: int, copies: list[HolderKnows], noted: int
) -> Turn:
    chosen = _RIGHT_TURN(state, op, copies, noted)
    return Turn.BEGIN if chosen is Turn.TELL else chosen


_RIGHT_STEP = states.adopter_step
_RIGHT_TURN = states.turn


@dataclass(frozen=True)
class Variant:
    """A protocol that is wrong."""

    world: str = ""
    """How the storage or the protocol differ (`World.wrong`)."""
    decisions: dict[str, object] = field(default_factory=dict)
    """In place of what `states` has."""
    ops: tuple[int, ...] = WHOLE
    """The fewest with which it is found: fewer states."""


WRONG = {
    "no fence": Variant("no fence"),
    "fence by renaming": Variant("fence by renaming"),
    "names not through staging": Variant("names not through staging"),
    "staging made anew": Variant("staging made anew"),
    "nobody is told": Variant(decisions={"turn": _begins_untold}),
    "no note": Variant(decisions={"turn": _begins_where_nobody_answers}),
    "note not read": Variant("note not read"),
    "note read before the fence": Variant(decisions={"adopter_step": _reads_before_the_fence}),
    "bytes taken after the claim": Variant(
        decisions={"TAKES_BYTES": {HolderState.HOLDING, HolderState.CLAIMED}}
    ),
    "left without lost": Variant(decisions={"passes": lambda _after, _cut: True}),
    "return replays": Variant("return replays"),
    "return is blind": Variant("return is blind"),
    "return does not wait": Variant(decisions={"may_return": lambda **_of: True}),
    "return waits for ever": Variant(
        decisions={"may_return": lambda *, has_left, claimers_silent: has_left},
        ops=(STORE,),
    ),
    "adopter writes no note": Variant(decisions={"adopter_step": _notes_nothing}),
    "adopter is blind": Variant(decisions={"adopter_step": _acts_blindly}, ops=(UNLINK,)),
}
"""Name → how; those of the design's table."""


def main(holders: int = 1, name: str = "") -> None:
    variant = WRONG[name] if name else Variant()
    ops = variant.ops if holders == 1 else WHOLE[:3]
    for decision, wrong in variant.decisions.items():
        setattr(states, decision, wrong)
    print(walk(World(holders, ops, holders, frozenset({variant.world}))))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, *sys.argv[2:3])
