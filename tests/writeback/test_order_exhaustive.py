"""Every history of three calls, and what becomes of at most two of its operations: what the order
hands out, in which groups.

Log, committed tree, gate and order are as they are; the storage is a model that carries out what it
is given. The oracle knows no rule of the order. It looks at every state in between, and at every
state that a loss of power may leave of a group: the pointer names what is whole, and one whole
checkpoint is there, wherever that was so in all states that the application saw. Retention is off.
Orders in which one of the rules is left out must be found.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import pytest

from acpfs.backing.lower import LowerPath
from acpfs.types import NO_INO, NO_TIER, ROOT, Ino, Seq
from acpfs.writeback.log.ops import WITHHELD, Op, OpKind, VersionState
from acpfs.writeback.order.order import Order
from acpfs.writeback.order.parked import Told
from acpfs.writeback.order.standing_pointers import StandingPointers
from tests.writeback.world import World

clause = pytest.mark.clause
CALLS = 3
A = Ino(2)
X = Ino(3)
LATEST = Ino(4)
FIRST_NEW = 10
CONTENT = b"x"
POINTER = b"latest"
TEMPORARY = b"t"


class Fact(Enum):
    """What becomes of an operation."""

    BYTES = auto()
    """They are not on the storage yet."""
    RETRY = auto()
    REFUSED = auto()
    MISSING = auto()
    """A member that it waits for."""


@dataclass(frozen=True)
class Call:
    """What it logs."""

    kind: OpKind
    ino: Ino
    parent: Ino = NO_INO
    name: bytes = b""
    new_name: bytes = b""
    victim: Ino = NO_INO
    is_directory: bool = False
    content: tuple[bytes, int] = (b"", 0)
    """Of a pointer: which directory, and at least which generation lies there; else its
    generation.
    """


@dataclass
class Model:
    """Names on the storage, and contents."""

    at: dict[tuple[Ino, bytes], Ino] = field(default_factory=dict)
    content: dict[Ino, tuple[bytes, int]] = field(default_factory=dict)

    @staticmethod
    def start() -> Model:
        names = {(ROOT, b"a"): A, (A, CONTENT): X, (ROOT, POINTER): LATEST}
        return Model(names, {X: (CONTENT, 0), LATEST: (b"a", 0)})

    def copy(self) -> Model:
        return Model(dict(self.at), dict(self.content))

    def do(self, call: Call) -> None:
        """Raises KeyError: the storage has not what the call needs."""
        place = (call.parent, call.name)
        if call.parent not in (NO_INO, ROOT, *self.at.values()):
            raise KeyError(call.parent)
        if call.kind is OpKind.STORE:
            self.at[place] = call.ino
            self.content[call.ino] = call.content
        elif call.kind is OpKind.MKDIR:
            self._put(place, call.ino)
        elif call.kind in (OpKind.UNLINK, OpKind.RMDIR):
            self._take(place, call.ino)
            if any(parent == call.ino for parent, _name in self.at):
                raise KeyError("not empty")
        elif call.kind is OpKind.RENAME:
            self._take(place, call.ino)
            self._put((ROOT, call.new_name), call.ino, call.victim)

    def _put(self, place: tuple[Ino, bytes], ino: Ino, instead: Ino = NO_INO) -> None:
        if self.at.get(place, NO_INO) != instead:
            raise KeyError(place)
        self.at[place] = ino

    def _take(self, place: tuple[Ino, bytes], ino: Ino) -> None:
        if self.at.pop(place) != ino:
            raise KeyError(place)

    def generation(self, directory: bytes) -> int | None:
        """Of the checkpoint there; None: there is none that is whole."""
        ino = self.at.get((ROOT, directory))
        content = self.at.get((ino, CONTENT)) if ino is not None else None
        return None if content is None else self.content[content][1]

    def names_what_is_whole(self) -> bool:
        pointer = self.at.get((ROOT, POINTER))
        if pointer is None:
            return True
        directory, least = self.content[pointer]
        generation = self.generation(directory)
        return generation is not None and generation >= least

    def has_a_checkpoint(self) -> bool:
        return any(self.generation(name) is not None for name in (b"a", b"b"))


def calls(model: Model, number: int) -> Iterator[Call]:
    """All that an application may do next."""
    new = Ino(FIRST_NEW + number)
    for name, other in ((b"a", b"b"), (b"b", b"a")):
        directory = model.at.get((ROOT, name))
        if directory is None:
            yield Call(OpKind.MKDIR, new, ROOT, name, is_directory=True)
            continue
        content = model.at.get((directory, CONTENT))
        yield Call(OpKind.STORE, content or new, directory, CONTENT, content=(CONTENT, number))
        if content is None:
            yield Call(OpKind.RMDIR, directory, ROOT, name, is_directory=True)
        else:
            yield Call(OpKind.UNLINK, content, directory, CONTENT)
            yield Call(OpKind.SETATTR, content)
            for pointer in (POINTER, TEMPORARY):
                ino = model.at.get((ROOT, pointer), new)
                generation = model.content[content][1]
                yield Call(OpKind.STORE, ino, ROOT, pointer, content=(name, generation))
        if (ROOT, other) not in model.at:
            yield Call(OpKind.RENAME, directory, ROOT, name, other, is_directory=True)
    latest = model.at.get((ROOT, POINTER))
    temporary = model.at.get((ROOT, TEMPORARY))
    if latest is not None:
        yield Call(OpKind.UNLINK, latest, ROOT, POINTER)
    if temporary is not None:
        yield Call(OpKind.RENAME, temporary, ROOT, TEMPORARY, POINTER, latest or NO_INO)


def histories(count: int) -> Iterator[tuple[list[Call], list[Model]]]:
    """With all states that the application saw."""

    def go(done: list[Call], seen: list[Model]) -> Iterator[tuple[list[Call], list[Model]]]:
        if len(done) == count:
            yield done, seen
            return
        for call in calls(seen[-1], len(done) + 1):
            after = seen[-1].copy()
            after.do(call)
            yield from go([*done, call], [*seen, after])

    yield from go([], [Model.start()])


def possible(call: Call) -> list[Fact]:
    facts = [Fact.RETRY, Fact.REFUSED]
    if call.kind is OpKind.STORE:
        facts.append(Fact.BYTES)
    is_pointer = call.name == POINTER or call.kind is OpKind.RENAME
    if is_pointer or call.kind in (OpKind.UNLINK, OpKind.RMDIR):
        facts.append(Fact.MISSING)
    return facts


def choices(history: Sequence[Call], most: int) -> Iterator[dict[int, Fact]]:
    for count in range(most + 1):
        for where in itertools.combinations(range(len(history)), count):
            for facts in itertools.product(*[possible(history[n]) for n in where]):
                yield dict(zip(where, facts, strict=True))


class Today:
    """The parts as they are, over one world that is used again and again."""

    def __init__(self, world: World, *, has_needs: bool) -> None:
        """`has_needs`: whoever gives a directory another name says whom he needs."""
        self.world = world
        self.has_needs = has_needs
        self.order: Order = world.engine._order
        self.calls: dict[Seq, Call] = {}
        self.storage = Model.start()
        self.order.standing._text = self._text  # type: ignore[method-assign]

    def _text(self, path: LowerPath) -> bytes | None:
        """What a pointer says."""
        ino = self.world.tree.at(path)
        return b"" if ino is None else self.storage.content[ino][0]

    def load(self, history: Sequence[Call], facts: dict[int, Fact]) -> None:
        log = self.world.log
        tree = self.world.tree
        for op in list(log):
            log.remove(op)
        for ino in [Ino(number) for number in range(2, FIRST_NEW + CALLS + 1)]:
            tree.forget(ino)
        for place, ino in Model.start().at.items():
            tree.add(ino, *place)
        directories = {ROOT, A} | {call.ino for call in history if call.is_directory}
        self.world.directory_inos.clear()
        self.world.directory_inos.update(directories)
        self.order._due.clear()
        self.order.gate.pointer_seq = 0
        self.order.standing._said.clear()
        self.storage = Model.start()
        ops = [self._logged(call) for call in history]
        self.calls = {op.seq: call for op, call in zip(ops, history, strict=True)}
        for number, fact in facts.items():
            self._set(ops[number], fact)

    def _logged(self, call: Call) -> Op:
        log = self.world.log
        version = None
        if call.kind is OpKind.STORE:
            version = log.new_version(call.ino, NO_TIER, 1, "staged")
            version.state = VersionState.STAGED
        fields: dict[str, Any] = {"parent": call.parent, "name": call.name, "version": version}
        if call.new_name:
            if call.is_directory and self.has_needs:
                log.needs.tell(call.ino, ("b",))
            fields |= {"new_parent": ROOT, "new_name": call.new_name, "victim": call.victim}
        return log.append(call.kind, call.ino, **fields)

    def _set(self, op: Op, fact: Fact) -> None:
        if fact is Fact.BYTES:
            assert op.version is not None
            op.version.state = VersionState.COMPLETE
        elif fact is Fact.RETRY:
            self.order._due[op.seq] = 1e18
        else:
            op.last_error = WITHHELD if fact is Fact.MISSING else errno.EACCES
            self.world.log.park(op)

    def group(self) -> list[Op] | None:
        """None: something was left out, and the history is another one."""
        before = len(self.world.log)
        group, _again = self.order.group(1e9)
        while not group and self.order.standing.wanted:
            self.order.standing.read()
            group, _again = self.order.group(1e9)
        return group if len(self.world.log) == before else None

    def commit(self, op: Op) -> None:
        call = self.calls[op.seq]
        tree = self.world.tree
        place = (op.parent, op.name)
        if call.kind in (OpKind.STORE, OpKind.MKDIR) and not tree.places(op.ino):
            tree.add(op.ino, *place)
        elif call.kind in (OpKind.UNLINK, OpKind.RMDIR):
            tree.remove(*place)
        elif call.kind is OpKind.RENAME:
            tree.begin_move()
            tree.move(place, (op.new_parent, op.new_name))
            tree.end_move()
        self.order.gate.persisted(op)
        self.world.log.remove(op)


def broken(today: Today, history: Sequence[Call], seen: Sequence[Model]) -> str:
    """What does not hold of some state of the storage; "" for nothing."""
    names = all(model.names_what_is_whole() for model in seen)
    has = all(model.has_a_checkpoint() for model in seen)
    storage = today.storage

    def wrong(model: Model) -> str:
        if names and not model.names_what_is_whole():
            return "the pointer names what is not there"
        return "no checkpoint is there" if has and not model.has_a_checkpoint() else ""

    while group := today.group():
        todo = [today.calls[op.seq] for op in group]
        for kept in itertools.product((False, True), repeat=len(todo)):
            model = storage.copy()
            try:
                for call in itertools.compress(todo, kept):
                    model.do(call)
            except KeyError:
                continue  # the storage cannot have kept that without the rest
            if found := wrong(model):
                return f"power lost: {found}"
        for op, call in zip(group, todo, strict=True):
            storage.do(call)
            today.commit(op)
            if found := wrong(storage):
                return found
    return ""


def first_broken(directory: Path, most: int, *, has_needs: bool = False) -> str:
    today = Today(World(directory), has_needs=has_needs)
    for history, seen in histories(CALLS):
        for facts in choices(history, most):
            today.load(history, facts)
            if found := broken(today, history, seen):
                return f"{found}: {history} {facts}"
    return ""


@clause("S6", "S402", "S403", "S408")
@pytest.mark.parametrize("has_needs", [False, True])
def test_no_history_of_three_calls_leaves_a_pointer_to_nothing_or_no_checkpoint(
    tmp_path: Path,
    has_needs: bool,
) -> None:
    assert first_broken(tmp_path, 1, has_needs=has_needs) == ""


@clause("S6", "S402", "S403", "S408")
@pytest.mark.slow
@pytest.mark.parametrize("has_needs", [False, True])
def test_nor_where_something_becomes_of_two_of_them(tmp_path: Path, has_needs: bool) -> None:
    assert first_broken(tmp_path, 2, has_needs=has_needs) == ""


def _makes_only(self: Order, op: Op, _group: list[Op]) -> bool:
    return self._pointers.makes(op)


def _never(*_arguments: object, **_options: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("owner", "method", "mutant", "most"),
    [
        (Order, "_begins", _makes_only, 0),
        (Order, "_begins", _never, 0),
        (Order, "_waits_for_refused", _never, 1),
        (Told, "concerns", _never, 1),
        (StandingPointers, "lead_to", _never, 1),
    ],
)
def test_an_order_without_one_of_its_rules_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    mutant: Callable[..., bool],
    most: int,
) -> None:
    monkeypatch.setattr(owner, method, mutant)
    assert first_broken(tmp_path, most, has_needs=True) != ""
