"""Random histories of three members that close pointers and shards, die and come back: what is
committed in which order.

Each member has a log, a gate and a cluster as they are; records lie in memory, clocks are
simulated, and the order of commits is the simplest that there is. Mutants that forget what other
members withhold must be found.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
import trio.testing

from acpfs.backing.member_records import NodeRecord
from acpfs.config import ClusterOrder, Settings
from acpfs.ram.node_clock import NodeClock
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino, Seq
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.members.cluster import Cluster, OwnDrain
from acpfs.writeback.members.gate import Gate
from acpfs.writeback.members.scopes import EVERYBODYS
from tests.rig.runtime import REAL, clock_of, runtime_of
from tests.writeback.given_pointers import GivenPointers
from tests.writeback.test_cluster import Records
from tests.writeback.world import InlinePool

pytestmark = pytest.mark.clause("S160", "S161", "S400")
NAMES = (b"run/latest", b"run/step/.metadata", b"other/latest")
NODES = ("a", "b", "c")
BOUND_S = 0.5
TIMEOUT_S = 30.0
SEEDS = 16
STEPS = 60
ROUNDS = 60
"""In which all that is left must be committed."""


@dataclass
class Closed:
    """What an application has closed, and when, by nobody's clock."""

    member: str
    name: bytes
    at: float
    needs: frozenset[str] | None = None
    pointer: bool = False


class Times:
    """One time for all, from which the members' clocks differ."""

    def __init__(self) -> None:
        self.now = 1_000_000.0


@dataclass
class Member:
    """One of them."""

    node: str
    times: Times
    records: Records
    directory: Path
    ahead_s: float
    up: bool = True
    closed: dict[Seq, Closed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state = StateDatabase(self.directory / self.node, REAL)
        self.log = OperationLog(state, REAL.clock)
        self.log.clock = NodeClock(
            state,
            clock_of(wall=lambda: self.times.now + self.ahead_s, since_boot=lambda: self.times.now),
        )
        pointers = GivenPointers(_is_pointer, lambda _op: False)
        self.gate = Gate(self.log, pointers, ClusterOrder.POINTERS)
        self.log.follow(self.gate.note)
        lock = threading.RLock()

        @contextlib.contextmanager
        def section() -> Iterator[None]:
            with lock:
                yield
                state.commit()

        settings = Settings(
            backing=Path("/backing"),
            mountpoint=Path("/mount"),
            heartbeat_s=1.0,
            clock_bound_s=BOUND_S,
            node_timeout_s=TIMEOUT_S,
        )
        self.cluster = Cluster(
            self.records,
            NodeRecord(self.node),
            OwnDrain(self.gate, self.log, state, section, lambda: None),
            settings,
            InlinePool("nodes", 1, REAL),
            runtime_of(lambda: self.times.now),
        )

    def close(self, name: bytes, needs: frozenset[str] | None) -> None:
        ino = Ino(10 + int(self.log.last_seq))
        if needs is not None:
            self.log.needs.tell(ino, tuple(sorted(needs)))
        op = self.log.append(
            OpKind.SYMLINK, ino, parent=ROOT, name=name, logged_at=self.log.clock.now()
        )
        self.closed[op.seq] = Closed(self.node, name, self.times.now, needs, _is_pointer(op))

    async def look(self) -> None:
        await self.cluster.publish()
        gated = self.gate.gated()
        await self.cluster._look(gated, self.gate.unasked())
        self.cluster._judge(gated)

    def next(self) -> Op | None:
        """The oldest that may be committed: what is withheld is passed by what has another name."""
        aside: set[bytes] = set()
        for op in self.log:
            if op.withheld:
                aside.add(op.name)
            elif op.name not in aside:
                return op if self.gate.is_open(op) else None
        return None

    def commit(self, op: Op) -> Closed:
        self.gate.persisted(op)
        self.log.remove(op)
        return self.closed.pop(op.seq)


def _is_pointer(op: Op) -> bool:
    return not op.name.startswith(b"shard")


class History:
    """A run of all three; `committed` is what the storage shows, one after the other."""

    def __init__(self, directory: Path, rng: random.Random, records: Records) -> None:
        self.rng = rng
        self.times = Times()
        self.members = [
            Member(node, self.times, records, directory, rng.uniform(-0.1, 0.1)) for node in NODES
        ]
        self.violations: list[str] = []

    async def run(self) -> None:
        for member in self.members:
            await member.cluster.join()
            member.gate.begin()
        for _ in range(STEPS):
            await self.step()
        for member in self.members:
            member.up = True
        for _ in range(ROUNDS):
            if not self.left:
                break
            self.times.now += 0.6
            await self.all_look()

    async def all_look(self) -> None:
        for member in self.members:
            if member.up:
                await member.look()
                self.commit(member)

    async def step(self) -> None:
        self.times.now += self.rng.choice((0.01, 0.6, 2.0))
        member = self.rng.choice(self.members)
        what = self.rng.random()
        if what < 0.3 and member.up:
            name = self.rng.choice((*NAMES, b"shard%d" % self.rng.randint(0, 3)))
            living = frozenset(other.node for other in self.members if other.up)
            says = _names_a_pointer(name) and self.rng.random() < 0.3
            member.close(name, living if says else None)
        elif what < 0.36:
            member.up = not member.up or sum(other.up for other in self.members) < 2
        elif what < 0.46:
            for _ in range(3):  # until who is down is missing
                self.times.now += TIMEOUT_S / 2
                await self.all_look()
        elif what < 0.8 and member.up:
            await member.look()
        elif member.up:
            self.commit(member)

    def commit(self, member: Member) -> None:
        while (op := member.next()) is not None:
            closed = member.commit(op)
            if closed.pointer:
                self.check(closed)
            if self.rng.random() < 0.2:
                break

    def check(self, pointer: Closed) -> None:
        """Whatever it waits for and others had closed before, by more than the bound, is there."""
        for member in self.members:
            if member.node == pointer.member:
                continue  # that is for its own order
            waits = pointer.needs is None or member.node in pointer.needs
            for other in member.closed.values() if waits else ():
                is_before = other.at < pointer.at - 2 * BOUND_S
                if is_before and self.is_waited_for(pointer, other):
                    self.violations.append(f"{pointer} before {other}")

    @staticmethod
    def is_waited_for(pointer: Closed, other: Closed) -> bool:
        if pointer.needs is None and other.needs is None:
            return True
        beside_or_below = other.name == pointer.name or other.name.startswith(
            pointer.name.rpartition(b"/")[0] + b"/step/"
        )
        return not other.pointer or beside_or_below

    @property
    def left(self) -> int:
        return sum(len(member.log) for member in self.members)


def _names_a_pointer(name: bytes) -> bool:
    return name in NAMES


def histories(directory: Path, make: Callable[[], Records]) -> list[History]:
    found = []
    for seed in range(SEEDS):
        (directory / str(seed)).mkdir()
        history = History(directory / str(seed), random.Random(seed), make())
        trio.run(history.run, clock=trio.testing.MockClock(autojump_threshold=0.0))
        found.append(history)
    return found


def test_whatever_dies_and_comes_back_pointers_keep_their_order_and_none_waits_for_ever(
    tmp_path: Path,
) -> None:
    found = histories(tmp_path, Records)
    assert [violation for history in found for violation in history.violations] == []
    assert [history.left for history in found] == [0] * SEEDS


class Forgetful(Records):
    """A mutant, and at the same time members of an older acpfs: nobody tells what is withheld."""

    def publish(self, record: NodeRecord) -> None:
        super().publish(replace(record, held={}))


def test_without_a_word_about_what_is_withheld_the_order_breaks(tmp_path: Path) -> None:
    found = histories(tmp_path, Forgetful)
    assert any(history.violations for history in found)
    assert [history.left for history in found] == [0] * SEEDS, "and yet nobody waits for ever"


class Narrow(Records):
    """A mutant: only what has to do with a pointer by its name counts, although all waited for the
    same member.
    """

    def publish(self, record: NodeRecord) -> None:
        held = {key: at for key, at in record.held.items() if key != EVERYBODYS}
        super().publish(replace(record, held=held))


def test_without_what_all_wait_for_the_order_breaks(tmp_path: Path) -> None:
    assert any(history.violations for history in histories(tmp_path, Narrow))


class OneIsOlder(Records):
    """During a rolling upgrade."""

    def publish(self, record: NodeRecord) -> None:
        super().publish(replace(record, held={}) if record.node == "b" else record)


@pytest.mark.clause("S400")
def test_a_member_of_an_older_version_dead_locks_with_nobody(tmp_path: Path) -> None:
    assert [history.left for history in histories(tmp_path, OneIsOlder)] == [0] * SEEDS
