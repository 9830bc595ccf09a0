"""Removals that wait for other nodes' pointers: what passes them, what has them take their turn,
and what others are told meanwhile.
"""

from __future__ import annotations

import errno
import math
import time
from pathlib import Path

import pytest
import trio

from acpfs.backing.member_records import NodeState
from acpfs.config import ClusterOrder
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.members.gate import LOOKED_AT_OPS_MAX, TIDY_OPS_MIN, Gate, ToCome
from acpfs.writeback.order.order import GROUP_OPS_MAX, SCAN_OPS_MAX
from tests.rig.runtime import REAL
from tests.writeback.conftest import Run
from tests.writeback.given_pointers import GivenPointers
from tests.writeback.memory_lower import FailNth
from tests.writeback.test_cluster import Node, let_pass
from tests.writeback.test_guard import FILES, guarded_world, released, remove, save, told, whole
from tests.writeback.world import World

clause = pytest.mark.clause


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def with_peers(world: World) -> Gate:
    world.engine.gate.has_peers = True
    world.engine.gate.begin()
    return world.engine.gate


@clause("S467")
@pytest.mark.parametrize("waiting", [0, 1, GROUP_OPS_MAX + 1])
@pytest.mark.parametrize("made_and_removed", [0, GROUP_OPS_MAX, SCAN_OPS_MAX])
def test_what_lies_behind_much_that_is_left_out_or_waits_is_stored_without_being_asked_for(
    world: World, run: Run, made_and_removed: int, waiting: int
) -> None:
    """One look at the order ends after so many operations; where none of them is to be committed,
    nobody rings for the next look.
    """
    for number in range(waiting):
        world.store(f"old-{number}", b"old")
    run(world.drain)
    with_peers(world)
    for number in range(waiting):
        world.unlink(f"old-{number}")  # waits for what other nodes have to say
    for _each in range(made_and_removed):
        world.mkdir("scratch")
        world.rmdir("scratch")
    world.mkdir("new")
    run(world.run_for, 60.0)
    assert b"new" in world.lower.root.children


@clause("S160")
@pytest.mark.parametrize("killed", [False, True])
def test_what_a_removal_waits_for_nobody_else_does(world: World, run: Run, killed: bool) -> None:
    """Or two nodes would wait for each other, and clocks decide: another's pointer for what is
    written here behind the removal.
    """
    world.store("shard", b"old")
    run(world.drain)
    gate = with_peers(world)
    removal = world.unlink("shard")
    after = world.store("next", b"new")
    run(world.run_for, 1.0)
    if killed:
        world.restart()
        gate = with_peers(world)
        run(world.run_for, 1.0)
        removal = world.log.front(1)[0]
    assert world.lower.visible() == {b"shard": b"old", b"next": b"new"}
    assert gate.watermark(math.inf) == gate.pointers(math.inf) == math.inf
    assert (gate.head(), world.log.get(after.seq), world.log.get(removal.seq)) == (
        None,
        None,
        removal,
    )
    let_pass(world)
    run(world.drain)
    assert world.lower.visible() == {b"next": b"new"}


@clause("S160")
def test_what_needs_the_name_of_a_removal_that_waits_has_it_take_its_turn(
    world: World, run: Run
) -> None:
    """As a pointer does: others are told of it, and of the two that wait for each other the earlier
    one goes first.
    """
    for name in ("shard", "other"):
        world.store(name, b"old")
    run(world.drain)
    gate = with_peers(world)
    needed = world.unlink("shard")
    unneeded = world.unlink("other")
    world.symlink(
        b"new", "shard"
    )  # ready at once: it must not pass in the very group in which the removal is put off
    run(world.run_for, 1.0)
    later = world.store("later", b"new")
    run(world.run_for, 1.0)
    assert world.lower.visible() == {b"shard": b"old", b"other": b"old"}
    assert (gate.yields(needed), gate.yields(unneeded)) == (False, True)
    assert gate.watermark(math.inf) == gate.head() == needed.logged_at
    assert world.log.get(later.seq) is later, "all that comes after it has its place, too"
    gate.passes(next(gated for gated in gate.gated() if gated.op is needed))
    run(world.run_for, 1.0)
    assert world.lower.visible() == {b"shard": b"new", b"other": b"old", b"later": b"new"}


@clause("S160")
def test_without_room_a_removal_that_waits_takes_its_turn(world: World, run: Run) -> None:
    """A pointer of another node may wait for what has no room here, and the removal for that
    pointer.
    """
    world.store("shard", b"old")
    run(world.drain)
    gate = with_peers(world)
    removal = world.unlink("shard")
    run(world.run_for, 1.0)
    world.lower.fault = FailNth("write", 1, errno.ENOSPC, times=0)
    world.store("next", b"new")
    run(world.run_for, 1.0)
    assert gate.head() == removal.logged_at
    assert not gate.yields(removal)


@clause("S160")
def test_others_are_told_of_every_pointer_that_is_still_to_come_or_to_go(
    world: World, run: Run
) -> None:
    """Withheld, or removed, or replaced; the watermark says nothing of what is withheld."""
    gate = world.engine.gate
    gate.begin()
    first = world.store("latest", b"1")
    run(world.run_for, 1.0)
    assert gate.pointers(math.inf) == first.logged_at
    assert gate.withholds(gate.gated()[0])
    assert (gate.watermark(math.inf), gate.pointers(math.inf)) == (math.inf, first.logged_at)
    let_pass(world)
    run(world.drain)
    assert gate.pointers(math.inf) == math.inf
    with_peers(world)
    removal = world.unlink("latest")
    assert not gate.yields(removal)
    assert gate.watermark(math.inf) == gate.pointers(math.inf) == removal.logged_at
    let_pass(world)
    run(world.drain)
    assert gate.pointers(math.inf) == math.inf


@clause("S160")
def test_a_withheld_pointer_holds_no_removals_up_when_a_later_one_is_there(
    world: World, run: Run
) -> None:
    """As on its own node: it may be withheld for ever."""
    gate = world.engine.gate
    gate.begin()
    world.mkdir("run")
    old = world.store("run/latest", b"1")
    run(world.run_for, 1.0)
    assert gate.withholds(gate.gated()[0])
    world.store("run/latest_other", b"2")
    run(world.run_for, 1.0)
    assert gate.pointers(math.inf) == old.logged_at
    gate.passes(next(gated for gated in gate.gated() if gated.op is not old))
    run(world.run_for, 1.0)
    assert gate.pointers(math.inf) == math.inf


@clause("S160")
def test_so_many_removals_that_wait_hide_no_pointer(node: Node) -> None:
    """Of 257 operations only the oldest 256 are looked at, and these removals wait until others'
    pointers are there.
    """

    async def scenario() -> None:
        now = node.log.clock.now()
        node.other(watermark=now + 60.0, pointers=now - 60.0)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 1.0
        removals = [node.remove(b"%d" % number) for number in range(LOOKED_AT_OPS_MAX)]
        pointer = node.close(b"latest")
        await node.looked()
        assert node.gate.is_open(pointer)
        assert not any(map(node.gate.is_open, removals))
        node.other(beat=2, watermark=now + 60.0, pointers=now + 60.0)
        await node.looked()
        assert all(map(node.gate.is_open, removals))

    trio.run(scenario)


@clause("S160", "S81")
def test_a_removal_waits_again_in_the_next_worker_which_has_not_looked_for_other_nodes_yet(
    node: Node,
) -> None:
    """A worker that takes over joins nobody: its node never left.

    What the last one had not let pass was carried out at once.
    """

    async def scenario() -> None:
        now = node.log.clock.now()
        node.other(watermark=now + 60.0, pointers=now - 1.0)
        removal = node.remove(b"shard")
        node.gate.begin()
        await node.looked()
        assert not node.gate.is_open(removal)
        node.other(beat=2, watermark=now + 60.0, pointers=now + 60.0)
        await node.looked()
        assert node.gate.is_open(removal)

    trio.run(scenario)


@clause("S162")
def test_a_node_that_left_and_holds_a_pointers_removal_back_can_be_forgotten(node: Node) -> None:
    async def scenario() -> None:
        left = node.other(state=NodeState.LEFT, pointers=node.log.clock.now() - 1.0)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 1.0
        removal = node.remove(b"shard")
        pointer = node.close(b"latest")
        await node.looked()
        assert (node.gate.is_open(removal), removal.withheld, node.gate.is_open(pointer)) == (
            False,
            True,
            True,
        ), left
        assert await node.cluster.forget("b")
        await node.looked()
        assert node.gate.is_open(removal)

    trio.run(scenario)


@clause("S140", "S160")
def test_with_other_nodes_the_pointers_of_a_checkpoint_go_first(tmp_path: Path, run: Run) -> None:
    """Each node's guard decides by itself: what another one's pointer names goes when that one is
    gone, which its guard may hold.
    """
    world = guarded_world(tmp_path)
    gate = world.engine.gate
    files = (".metadata", *FILES)
    save(world, "run/checkpoint-1", files)
    run(world.drain)
    gate.has_peers = True
    gate.begin()
    remove(world, "run/checkpoint-1", files)
    run(world.drain)
    pointer = world.log.all_aside()[0]
    assert (pointer.name, gate.pointers(time.time())) == (b".metadata", pointer.logged_at), (
        "others are told of what is held"
    )
    for gated in gate.gated():
        if gated.op.name == b".metadata":
            gate.passes(gated)
    save(world, "run/checkpoint-2", files)

    def let_pass_what_is_new() -> None:
        for gated in gate.gated():
            if not world.log.is_aside(gated.op):
                gate.passes(gated)

    run(world.run_for, 1.0)
    let_pass_what_is_new()
    run(world.run_for, 30.0)
    assert whole(world.lower.visible(), "run/checkpoint-2", files)
    assert b"run/checkpoint-1/.metadata" not in world.lower.visible()
    assert whole(world.lower.visible(), "run/checkpoint-1")
    assert told(world).why == "other nodes have not removed their pointers to it yet"
    for gated in gate.gated():
        gate.passes(gated)
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert released(world) == {"newer": 1}


def test_what_is_kept_aside_because_its_name_is_made_again_counts(tmp_path: Path, run: Run) -> None:
    """The removal of the directory has become a rename, which the new one of that name waits
    for.
    """
    world = guarded_world(tmp_path)
    save(world, "run/checkpoint-1")
    run(world.drain)
    gate = with_peers(world)
    assert gate.watermark(math.inf) == math.inf
    remove(world, "run/checkpoint-1")
    run(world.run_for, 1.0)
    moved = world.log.all_aside()[-1]
    assert gate.watermark(math.inf) == math.inf
    world.mkdir("run/checkpoint-1")
    run(world.run_for, 1.0)
    assert (moved.kind, gate.is_open(moved)) == (OpKind.RENAME, False)
    assert gate.watermark(math.inf) == moved.logged_at
    let_pass(world)
    run(world.run_for, 1.0)
    assert gate.watermark(math.inf) == math.inf


@pytest.mark.parametrize("peers", [False, True])
def test_many_removals_that_yield_are_not_walked_through_at_each_look(
    tmp_path: Path, peers: bool
) -> None:
    """All under the file system's lock, and several times per heartbeat: a job that removes 100,000
    shards would stand still for it.
    """
    log = OperationLog(StateDatabase(tmp_path / "state.sqlite", REAL), REAL.clock)
    looked_at = 0

    def takes_pointer(_op: Op) -> bool:
        nonlocal looked_at
        looked_at += 1
        return False

    pointers = GivenPointers(lambda op: op.kind is OpKind.STORE, takes_pointer)
    gate = Gate(log, pointers, ClusterOrder.POINTERS)
    gate.has_peers = peers
    gate.begin()
    for n in range(10 * LOOKED_AT_OPS_MAX):
        gate.note(log.append(OpKind.UNLINK, Ino(n + 2), parent=ROOT, name=b"shard-%d" % n))

    def look() -> tuple[float, float, float | None, int]:
        return gate.watermark(math.inf), gate.pointers(math.inf), gate.head(), len(gate.gated())

    nothing = (math.inf, math.inf, None, LOOKED_AT_OPS_MAX if peers else 0)
    assert look() == nothing
    looked_at = 0
    assert look() == nothing
    assert looked_at == 0
    stored = log.append(OpKind.STORE, Ino(1_000_000), parent=ROOT, name=b"latest")
    gate.note(stored)
    assert look()[:2] == (stored.logged_at, stored.logged_at)
    assert len(gate.gated()) == nothing[3] + 1
    log.remove(stored)
    assert look() == nothing


def test_what_is_done_behind_something_that_is_parked_is_forgotten(tmp_path: Path) -> None:
    """The parked one is met first at each look, for days perhaps, and all others are done behind
    it.
    """
    log = OperationLog(StateDatabase(tmp_path / "state.sqlite", REAL), REAL.clock)
    kept = ToCome(lambda op: log.get(op.seq) is op)
    parked = log.append(OpKind.STORE, Ino(2), parent=ROOT, name=b"shard")
    for n in range(2 * TIDY_OPS_MIN):
        op = log.append(OpKind.SETATTR, Ino(n + 3)) if n else parked
        kept.add(op)
        assert next(iter(kept)) is parked
        if op is not parked:
            log.remove(op)
    assert len(kept) <= TIDY_OPS_MIN + 2
