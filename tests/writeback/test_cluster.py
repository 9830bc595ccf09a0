"""One node's gate over records in memory: what is asked anew before a pointer goes."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.config import ClusterOrder, Settings
from acpfs.errors import RefusedError
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import WITHHELD, Op, OpKind, VersionState
from acpfs.writeback.log.stages import Aside, Step
from acpfs.writeback.members import gate as gate_module
from acpfs.writeback.members.cluster import (
    BEATS_PER_LISTING,
    HEARD_BEATS,
    KNOWN_BEATS_MAX,
    Cluster,
    OwnDrain,
)
from acpfs.writeback.members.gate import LOOKED_AT_OPS_MAX, Gate
from acpfs.writeback.members.placed import Placed
from acpfs.writeback.members.standing_elsewhere import Texts
from acpfs.writeback.order import order as order_module
from acpfs.writeback.order.order import SCAN_OPS_MAX
from tests.rig.runtime import REAL, runtime_of
from tests.writeback.conftest import Run
from tests.writeback.given_pointers import GivenPointers
from tests.writeback.world import InlinePool, World

clause = pytest.mark.clause
KNOWS_SOMEBODY = {"z": 0.0}
"""Of the clocks that a record tells of: its node is not alone."""


class Records(dict[str, NodeRecord]):
    """What lies in `.acpfs/nodes`."""

    def publish(self, record: NodeRecord) -> None:
        self[record.node] = record

    def names(self) -> list[str]:
        return sorted(self)

    def read(self, node: str) -> NodeRecord | None:
        return self.get(node)

    def remove(self, node: str) -> None:
        self.pop(node, None)

    def remove_temporary(self, node: str) -> None:
        pass


def is_pointer(op: Op) -> bool:
    return op.name == b"latest" and not takes_pointer(op)


def takes_pointer(op: Op) -> bool:
    return op.name == b"latest" and op.kind is OpKind.UNLINK


class Node:
    """A cluster of which only this node is real; its log is never drained."""

    def __init__(
        self,
        directory: Path,
        monotonic: Callable[[], float] | None = None,
        is_pointer: Callable[[Op], bool] = is_pointer,
        texts: Texts = lambda _paths: {},
        **settings: Any,
    ) -> None:
        """`monotonic`: instead of `now`, which stands still. `texts`: what pointers say."""
        state = StateDatabase(directory / "state", REAL)
        self.log = OperationLog(state, REAL.clock)
        self.records = Records()
        self.now = 1000.0
        placed = Placed(state)
        pointers = GivenPointers(is_pointer, takes_pointer)
        self.gate = Gate(self.log, pointers, ClusterOrder.POINTERS, placed=placed)
        self.log.follow(self.gate.note)
        lock = threading.RLock()

        @contextlib.contextmanager
        def section() -> Iterator[None]:
            with lock:
                yield
                state.commit()

        chosen = Settings(
            backing=Path("/backing"), mountpoint=Path("/mount"), heartbeat_s=1.0, **settings
        )
        pool = InlinePool("nodes", 1, REAL)
        given = runtime_of(monotonic or (lambda: self.now))
        self.cluster = Cluster(
            self.records,
            NodeRecord("a"),
            OwnDrain(self.gate, self.log, state, section, lambda: None, texts=texts),
            chosen,
            pool,
            given,
        )

    def other(self, **fields: object) -> NodeRecord:
        now = self.log.clock.now()
        record = replace(
            NodeRecord(
                "b",
                incarnation="1",
                beat=1,
                clock=now,
                watermark=now,
                heartbeat_s=1.0,
                heard=KNOWS_SOMEBODY,
            ),
            **fields,  # type: ignore[arg-type]
        )
        self.records.publish(record)
        return record

    def next_ino(self) -> Ino:
        """Of what is closed next."""
        return Ino(10 + len(self.log))

    def close(self, name: bytes) -> Op:
        return self.log.append(
            OpKind.SYMLINK,
            self.next_ino(),
            parent=ROOT,
            name=name,
            logged_at=self.log.clock.now(),
        )

    def remove(self, name: bytes) -> Op:
        return self.log.append(
            OpKind.UNLINK,
            Ino(10 + len(self.log)),
            parent=ROOT,
            name=name,
            logged_at=self.log.clock.now(),
        )

    async def looked(self) -> None:
        """One round of what `_gate_forever` does."""
        gated = self.gate.gated()
        await self.cluster._look(gated, self.gate.unasked())
        self.cluster._judge(gated)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@clause("S160")
def test_a_node_that_came_back_is_asked_although_it_had_left(node: Node) -> None:
    """Found by reading: its record of before said that all was persisted, and was not read
    again.
    """

    async def scenario() -> None:
        left = node.other(state=NodeState.LEFT)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 1.0
        node.other(
            incarnation="2", beat=7, watermark=left.watermark - 60.0
        )  # mounted again, and has something to drain
        pointer = node.close(b"latest")
        await node.looked()
        assert not node.gate.is_open(pointer)
        node.other(incarnation="2", beat=8, state=NodeState.LEFT)
        await node.looked()
        assert node.gate.is_open(pointer)

    trio.run(scenario)


@clause("S163")
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_mount_begins_when_who_was_alone_knows_of_it(
    tmp_path: Path, run: Run, is_asked: bool
) -> None:
    """Else a removal there does not wait for a pointer that is closed here. Found by the simulation
    (members 49).
    """

    async def scenario() -> None:
        node = Node(tmp_path, monotonic=trio.current_time)
        began = trio.Event()

        async def join() -> None:
            await node.cluster.join()
            began.set()

        now = node.log.clock.now()
        node.other(heard={}, clock=now if is_asked else now - 60.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            await trio.sleep(2.0)
            assert began.is_set() != is_asked
            if is_asked:
                node.other(heard={"a": 0.0}, beat=2)
            with trio.fail_after(1.0):
                await began.wait()

    run(scenario)


@clause("S163")
def test_a_mount_does_not_wait_for_good_for_who_is_alone(tmp_path: Path, run: Run) -> None:
    async def scenario() -> None:
        node = Node(tmp_path, monotonic=trio.current_time)
        node.other(heard={})
        with trio.fail_after(KNOWN_BEATS_MAX + 1.0):
            await node.cluster.join()
        assert trio.current_time() >= KNOWN_BEATS_MAX - 1.0

    run(scenario)


@clause("S163")
def test_who_is_alone_lists_the_records_with_each_of_its_own(tmp_path: Path, run: Run) -> None:
    """Whoever has just come waits for that."""

    async def scenario() -> None:
        node = Node(tmp_path, monotonic=trio.current_time)
        await node.cluster.join()
        async with trio.open_nursery() as nursery:
            await nursery.start(node.cluster.run)
            await trio.sleep(2.0)
            node.other(heard={})
            with trio.fail_after(2.0):
                while "b" not in node.records["a"].heard:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()

    run(scenario)


@clause("S163")
def test_who_is_alone_and_cannot_say_so_has_its_removals_wait(node: Node) -> None:
    """Nobody who begins waits for a node that is silent, and what its client remembers of the
    records may be old. Found by the simulation (members 9000013).
    """

    async def scenario() -> None:
        await node.cluster.join()
        node.gate.begin()
        node.now += 1.0
        assert node.gate.is_open(node.remove(b"x")), "nobody else is there"
        own = node.records["a"]
        assert node.gate.heard_until == own.clock + HEARD_BEATS * own.heartbeat_s
        node.gate.heard_until = node.log.clock.now() - 0.1  # it was written long ago
        removal = node.remove(b"y")
        assert not node.gate.is_open(removal)
        await node.looked()
        assert node.gate.is_open(removal), "it has told, and looked, since"

    trio.run(scenario)


@clause("S459")
def test_others_act_until_they_are_known_to_have_ended(node: Node) -> None:
    """Names that only one may make are asked for anew as long as somebody else may make them."""
    others = [node.cluster._names.others]

    async def scenario() -> None:
        await node.cluster.join()
        others.append(node.cluster._names.others)
        node.other()
        await node.cluster._list()
        others.append(node.cluster._names.others)
        for state in (NodeState.LIVE, NodeState.LEFT, NodeState.LIVE, NodeState.AWAY):
            node.other(state=state, beat=len(others) + 1)
            await node.cluster._read_some()
            others.append(node.cluster._names.others)
        assert others == [True, False, True, True, False, True, False]

    trio.run(scenario)


class Counted(str):
    """A node id that counts with how many others it is compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


class CountedRecords(Records):
    """Each listing has texts of its own, as that of a directory."""

    def names(self) -> list[str]:
        return [Counted(f"{name}") for name in sorted(self)]


@clause("S438")
def test_what_a_listing_costs_grows_in_proportion_to_the_members(node: Node) -> None:
    """All applications wait for the lock under which it is looked through."""
    records = CountedRecords()
    node.cluster._records = records
    compared = []

    async def scenario() -> None:
        for count in (50, 100, 200):
            for number in range(count):
                records.publish(NodeRecord(f"node-{number:04}", incarnation="1", beat=1))
            await node.cluster._list()
            Counted.compared = 0
            await node.cluster._list()
            compared.append(Counted.compared / count)

    trio.run(scenario)
    assert max(compared) <= 4, compared


@clause("S162")
def test_a_node_is_not_forgotten_because_nobody_read_its_record_for_long(tmp_path: Path) -> None:
    node = Node(tmp_path, node_forget_after_s=60.0)

    async def scenario() -> None:
        slow = time.time() - 1000.0
        node.other(watermark=slow)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 61.0  # with many nodes, each is read seldom while nothing is gated
        node.other(beat=9, watermark=slow)
        pointer = node.close(b"latest")
        await node.looked()
        assert not node.gate.is_open(pointer)
        node.now += 61.0
        await node.looked()
        assert node.gate.is_open(pointer), "now it is silent indeed"

    trio.run(scenario)


@clause("S430")
def test_the_order_is_said_to_wait_for_others_as_long_as_one_that_was_asked_has_something(
    node: Node,
) -> None:
    """Who waits for room behind that pointer learns so that only another machine ends it.

    A removal that yields stops nobody.
    """

    async def scenario() -> None:
        left = node.other(state=NodeState.LEFT)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 1.0
        node.other(incarnation="2", beat=7, watermark=left.watermark - 60.0)
        pointer = node.close(b"latest")
        removal = node.remove(b"old")
        before = [op.awaits_members for op in (pointer, removal)]
        await node.looked()
        asked = [op.awaits_members for op in (pointer, removal)]
        node.other(incarnation="2", beat=8, state=NodeState.LEFT)
        await node.looked()
        passed = [op.awaits_members for op in (pointer, removal)]
        assert [before, asked, passed] == [[False, False], [True, False], [False, False]]

    trio.run(scenario)


@clause("S161")
def test_of_many_nodes_none_is_missing_because_its_turn_has_not_come(node: Node) -> None:
    """With 600 nodes and 16 looks per beat most records are read less often than node_timeout_s."""
    others = [f"n{number:03}" for number in range(600)]

    def beats(beat: int) -> None:
        for name in others:
            node.other(node=name, beat=beat)

    async def scenario() -> None:
        beats(1)
        await node.cluster.join()
        for beat in range(2, 102):
            node.now += 0.6
            beats(beat)
            await node.cluster._read_some()
        assert not any(peer.missing for peer in node.cluster.statistics().peers)
        node.now += 31.0
        beats(102)
        node.other(node="n000", beat=101)
        await node.cluster.look()
        assert not any(
            peer.missing for peer in node.cluster.statistics().peers if peer.node != "n000"
        )
        node.now += 61.0
        beats(103)
        node.other(node="n000", beat=101)
        await node.cluster.look()
        assert [peer.node for peer in node.cluster.statistics().peers if peer.missing] == ["n000"]

    trio.run(scenario)


@clause("S161")
def test_what_is_withheld_in_great_number_hides_no_pointer(node: Node) -> None:
    """Found by reading: of 257 operations only the oldest 256 were ever looked at, and one that
    nobody looks at holds up all behind it.
    """

    async def scenario() -> None:
        node.other(watermark=time.time() - 1000.0)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 31.0
        removals = [node.remove(b"%d" % number) for number in range(LOOKED_AT_OPS_MAX)]
        pointer = node.close(b"latest")
        for _ in range(2):
            await node.looked()
        assert all(op.withheld for op in [*removals, pointer])
        node.other(beat=2, watermark=time.time() + 10.0)
        for _ in range(2):
            await node.looked()
        assert all(map(node.gate.is_open, [*removals, pointer]))

    trio.run(scenario)


@clause("S161")
def test_a_great_tree_that_is_withheld_hides_nothing_that_comes_after_it(
    world: World, run: Run
) -> None:
    """Found by reading: with more set aside at the front than was scanned, nothing at all was
    committed any more.
    """
    names = [str(number) for number in range(SCAN_OPS_MAX + 1)]
    for name in names:
        world.symlink(b"target", name)
    run(world.drain)
    for name in names:
        op = world.unlink(name)
        op.last_error = WITHHELD
        world.log.park(op)
    after = world.symlink(b"target", "after")
    group, _again = world.engine._order.group(math.inf)
    assert group == [after]


def written_by_others(world: World, path: str) -> None:
    inode = world.lower.inode(path)
    inode.content = bytearray(b"theirs")
    inode.mtime_ns = inode.mtime_ns + 1


def let_pass(world: World) -> None:
    for gated in world.engine.gate.gated():
        world.engine.gate.passes(gated)


@clause("S160", "S631")
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_removal_that_waited_leaves_what_another_node_has_written_since(
    world: World, run: Run, killed: bool, forgotten: bool
) -> None:
    """Found by reading: a checkpoint that rank 0 deletes and all ranks make again lost what they
    wrote while the deletion waited.

    Found by simulation: so did one whose node was forgotten, and the directory waited for ever.
    """
    world.mkdir("last")
    for name in ("last/ours", "last/theirs"):
        world.store(name, b"old")
    run(world.drain)
    world.engine.gate.has_peers = True
    world.engine.gate.begin()
    removals = [world.unlink(name) for name in ("last/ours", "last/theirs")]
    world.rmdir("last")
    run(world.run_for, 1.0)
    written_by_others(world, "last/theirs")
    world.engine.gate.has_peers = not forgotten
    if killed:  # right after it was let pass: whether it was carried out nobody knows
        world.log.mark_begun(removals[1])
        world.state.commit()
        world.restart()
        world.engine.gate.has_peers = not forgotten
        world.engine.gate.begin()
    let_pass(world)
    run(world.drain)
    assert world.lower.visible() == {b"last/": b"", b"last/theirs": b"theirs"}
    assert [conflict.path for conflict in world.engine.statistics().conflicts] == [
        "last/theirs",
        "last",
    ]
    assert world.engine.statistics().parked == ()


@clause("S160")
def test_a_removal_that_waited_removes_what_was_written_here_right_before_it(
    world: World, run: Run
) -> None:
    """In one group: the file system is not told yet of what it looks like."""
    world.store("f", b"old")
    run(world.drain)
    world.engine.gate.has_peers = True
    world.engine.gate.begin()
    world.store("f", b"newer")
    world.unlink("f")
    let_pass(world)
    run(world.drain)
    assert (world.lower.visible(), world.engine.statistics().conflicts) == ({}, ())


@clause("S161")
def test_all_that_a_missing_node_withheld_goes_when_it_is_back(
    node: Node, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: after the oldest had passed nobody looked at the others until something new
    was gated.
    """
    monkeypatch.setattr(gate_module, "LOOKED_AT_OPS_MAX", 4)

    async def scenario() -> None:
        node.other(watermark=time.time() - 1000.0)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 31.0
        removals = [node.remove(b"%d" % number) for number in range(20)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.cluster._gate_forever)
            await trio.sleep(0.1)
            assert all(op.withheld for op in removals), "without a pause between each few of them"
            node.other(beat=2, watermark=time.time() + 10.0)
            await trio.sleep(1.0)
            assert all(map(node.gate.is_open, removals))
            nursery.cancel_scope.cancel()

    run(scenario)


@clause("S161")
def test_a_node_that_came_back_is_missing_no_more_once_they_were_looked_at(
    node: Node, run: Run
) -> None:
    """Found by CI: `flush` went by a look from before it had come back, and failed.

    Who asks does not wait for the clock's next one.
    """

    async def scenario() -> None:
        node.other(watermark=time.time() - 1000.0)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 31.0
        removal = node.remove(b"old")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.cluster._gate_forever)
            await node.cluster.looked()
            assert removal.withheld
            node.other(beat=2, watermark=time.time() - 1000.0)
            await node.cluster.looked()
            assert not any(op.withheld for op in [removal]), "it waits, as for anyone who lives"
            nursery.cancel_scope.cancel()

    run(scenario)


@clause("S161")
def test_a_look_that_is_under_way_does_not_count_for_who_asks_now(
    node: Node, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have read the record of a node that came back before the question already."""

    async def scenario() -> None:
        node.other(watermark=time.time() - 1000.0)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 31.0
        removal = node.remove(b"old")
        has_read = trio.Event()
        goes_on = trio.Event()
        looks = node.cluster._look

        async def slow(*gated: Any) -> int:
            records = await looks(*gated)
            has_read.set()
            await goes_on.wait()
            return records

        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.cluster._gate_forever)
            await node.cluster.looked()
            assert removal.withheld
            monkeypatch.setattr(node.cluster, "_look", slow)
            node.cluster._bell.ring()
            await has_read.wait()
            node.other(beat=2, watermark=time.time() - 1000.0)
            async with trio.open_nursery() as asking:
                asking.start_soon(node.cluster.looked)
                await trio.testing.wait_all_tasks_blocked()
                goes_on.set()
            assert not any(op.withheld for op in [removal])
            nursery.cancel_scope.cancel()

    run(scenario)


@clause("S161")
def test_nodes_that_cannot_be_looked_at_hold_up_who_asks_for_a_while_only(node: Node) -> None:
    async def scenario() -> None:
        await node.cluster.join()
        node.gate.begin()
        node.close(b"latest")
        await node.cluster.looked()  # nobody looks

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0.0))


@clause("S160")
def test_a_pointer_that_is_rewritten_before_others_have_let_it_pass_is_not_left_out(
    world: World, run: Run
) -> None:
    """Found by reading: the newer one's time was told instead, and a pointer that another node
    closed in between passed without either.
    """
    gate = world.engine.gate
    gate.begin()

    async def scenario() -> None:
        ops = [world.store("latest", b"%d" % number) for number in range(4)]
        await world.run_for(1.0)
        assert (gate.head(), gate.watermark(math.inf)) == (ops[0].logged_at, ops[0].logged_at)
        staged = VersionState.STAGED
        complete = VersionState.COMPLETE
        assert [op.version and op.version.state for op in ops] == [
            staged,
            complete,
            complete,
            staged,
        ], "what may be left out waits"
        for gated in gate.gated()[:1]:
            gate.passes(gated)
        await world.run_for(1.0)
        assert world.lower.visible() == {b"latest": b"0"}
        assert (gate.head(), gate.watermark(math.inf)) == (ops[1].logged_at, ops[1].logged_at)
        for gated in gate.gated():
            gate.passes(gated)
        await world.drain()
        assert world.lower.visible_history[-1][b"latest"] == b"3"
        assert world.engine.statistics().counters.elided_ops == 2, (
            "once they may pass, the newest stands for all"
        )

    run(scenario)


@clause("S161")
def test_however_much_is_withheld_what_has_nothing_to_do_with_it_goes_on(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: more than 16,384 at the front of the log, and nothing behind them was seen;
    a deleted tree is as large.
    """
    for name in ("SCAN_OPS_MAX", "SET_ASIDE_OPS_MAX"):
        monkeypatch.setattr(order_module, name, 4)
    names = [str(number) for number in range(20)]
    for name in names:
        world.symlink(b"target", name)
    run(world.drain)
    before = world.setattr(names[-1], uid=1)
    withheld = [world.unlink(name) for name in names]
    for op in withheld:
        op.last_error = WITHHELD
        world.log.park(op)
    after = world.symlink(b"target", "after")
    again = world.symlink(b"target", names[0])
    order = world.engine._order
    assert order.group(math.inf) == ([before, after], math.inf), (
        "one that is older than they are does not wait for them"
    )
    assert again.aside is Aside.HELD
    for op in withheld:
        op.last_error = None
        world.log.unpark(op)
    assert order.group(math.inf)[0] == [before, *withheld, after, again]
    run(world.drain)
    assert set(world.lower.visible()) == {b"after", b"0"}


def test_a_withheld_pointer_is_left_out_for_a_newer_one(world: World, run: Run) -> None:
    gate = world.engine.gate
    gate.begin()

    async def scenario() -> None:
        world.store("latest", b"1")
        await world.run_for(1.0)
        assert gate.withholds(gate.gated()[0])
        newer = world.store("latest", b"2")
        await world.run_for(1.0)
        assert [gated.op for gated in gate.gated()] == [newer]

    run(scenario)


@clause("S161")
@pytest.mark.parametrize(
    "is_tentative", [False, True], ids=["after a shard", "whose close may not be the last"]
)
def test_a_withheld_pointer_is_left_out_for_one_that_may_not_stand_for_it_at_once(
    world: World, run: Run, is_tentative: bool
) -> None:
    """Found by CI: it was looked at when the newer one was logged, and never again, so both waited
    for ever.
    """
    gate = world.engine.gate
    gate.begin()

    async def scenario() -> None:
        world.store("latest", b"1")
        await world.run_for(1.0)
        assert gate.withholds(gate.gated()[0])
        if not is_tentative:
            world.store("shard", b"of the second")
        newer = world.store("latest", b"2")
        if is_tentative:
            newer.take(Step.CLOSED)
        await world.run_for(1.0)
        if is_tentative:
            newer.take(Step.CONFIRMED)
        world.log.on_append(newer)
        await world.run_for(1.0)
        assert [gated.op for gated in gate.gated()] == [newer]
        gate.passes(gate.gated()[0])
        await world.drain()
        assert world.lower.visible()[b"latest"] == b"2"

    run(scenario)


@clause("S165")
def test_records_are_written_twice_per_heartbeat_although_pointers_never_end(
    tmp_path: Path,
) -> None:
    """Found by reading: the gate kept to it, the beat beside it did not, which made three in a
    row.
    """
    node = Node(tmp_path, trio.current_time)
    written = list[float]()
    passed = list[float]()

    def publish(record: NodeRecord) -> None:
        if record.node == "a":
            written.append(trio.current_time())
        Records.publish(node.records, record)

    node.records.publish = publish  # type: ignore[method-assign]

    async def scenario() -> None:
        node.other(watermark=time.time() + 1000.0)
        await node.cluster.join()
        async with trio.open_nursery() as nursery:
            await nursery.start(node.cluster.run)
            for _ in range(150):
                pointer = node.close(b"latest")
                closed = trio.current_time()
                await trio.sleep(0.13)
                for _ in range(200):
                    await trio.sleep(0.0 if node.gate.is_open(pointer) else 0.01)
                passed.append(trio.current_time() - closed)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(written) > 20
    assert (
        min(third - first for first, third in zip(written, written[2:], strict=False)) > 1.0 - 1e-6
    ), "heartbeats"
    assert max(second - first for first, second in itertools.pairwise(written)) < 0.75 + 1e-6, (
        "what others know is never older"
    )
    assert max(passed) < 1.0


class RememberedRecords(Records):
    """As a client of a distributed file system gives them: which file a name was is remembered
    until the directory is listed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._remembered: dict[str, NodeRecord | None] = {}

    def names(self) -> list[str]:
        self._remembered.clear()
        return super().names()

    def read(self, node: str) -> NodeRecord | None:
        return self._remembered.setdefault(node, super().read(node))


@clause("S160")
def test_a_record_is_found_although_the_client_remembers_the_last_one(node: Node) -> None:
    """Found by a trace over GlusterFS: records were read a second and a half after they were
    written, which pointers waited for.
    """
    node.records = RememberedRecords()
    node.cluster._records = node.records

    async def scenario() -> None:
        node.other(watermark=time.time() - 1000.0)
        await node.cluster.join()
        node.gate.begin()
        node.now += 1.0
        pointer = node.close(b"latest")
        await node.looked()
        assert not node.gate.is_open(pointer)
        node.other(beat=2, watermark=time.time() + 10.0)
        await node.looked()
        assert node.gate.is_open(pointer)

    trio.run(scenario)


@clause("S160")
def test_a_pointer_is_looked_after_while_a_newer_one_waits_for_our_own_record(
    tmp_path: Path,
) -> None:
    """Found by a trace: `latest`, closed right after `.metadata`, held up the look for that one by
    half a heartbeat.
    """
    node = Node(tmp_path, trio.current_time, lambda op: op.name in (b"latest", b".metadata"))

    async def scenario() -> None:
        node.other(watermark=time.time() - 1000.0)
        await node.cluster.join()
        async with trio.open_nursery() as nursery:
            await nursery.start(node.cluster.run)
            metadata = node.close(b".metadata")
            await trio.sleep(
                0.65
            )  # our own record of it was written, and the next one may be in half a heartbeat
            latest = node.close(b"latest")
            await trio.sleep(0.05)
            node.other(beat=2, watermark=time.time() + 10.0)
            await trio.sleep(0.15)
            assert (node.gate.is_open(metadata), node.gate.is_open(latest)) == (True, False)
            await trio.sleep(0.6)
            assert node.gate.is_open(latest)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


@clause("S196")
def test_two_that_join_with_one_id_at_the_same_moment_do_not_both_serve(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = node.records.names

    def rival_joins() -> list[str]:
        node.records.publish(
            NodeRecord("a", incarnation="theirs", beat=1, host="host2", mountpoint="/mnt/theirs")
        )
        return names()

    async def scenario() -> None:
        monkeypatch.setattr(node.records, "names", rival_joins)
        with pytest.raises(RefusedError, match=r"node id a is in use: host2 serves /mnt/theirs"):
            await node.cluster.join()

    trio.run(scenario)


@clause("S196")
def test_a_record_that_somebody_else_writes_is_told_and_forgiven_when_that_ends(node: Node) -> None:
    async def scenario() -> None:
        await node.cluster.join()
        for _ in range(BEATS_PER_LISTING):
            node.records.publish(
                NodeRecord(
                    "a", incarnation="theirs", beat=1, host="host2", mountpoint="/mnt/theirs"
                )
            )
            await node.cluster.publish()
        assert "host2 serves /mnt/theirs" in node.cluster.statistics().error
        assert "host2 serves /mnt/theirs" in node.cluster.record().errors[0]
        for _ in range(BEATS_PER_LISTING):
            await node.cluster.publish()
        assert node.cluster.statistics().error == ""

    trio.run(scenario)
