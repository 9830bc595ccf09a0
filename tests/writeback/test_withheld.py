"""What one member withholds, and who has to do with it: keys, judgements, and what is told of
it.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.backing.member_records import (
    ANYTHING,
    BLOCK_BYTES,
    NodeRecord,
    NodeRecords,
    NodeState,
)
from acpfs.config import SpillMode
from acpfs.ram.state import StateDatabase
from acpfs.writeback.log.stages import Aside
from acpfs.writeback.members.peers import RECORDS_AFTER, Peer, Terms, Verdict
from acpfs.writeback.members.placed import PLACED_MAX, Placed
from acpfs.writeback.members.scopes import EVERYBODYS, KEYS_MAX, Scope, of_record
from tests.rig.runtime import REAL
from tests.writeback.conftest import Run
from tests.writeback.test_cluster import Node, let_pass
from tests.writeback.world import World

clause = pytest.mark.clause
pytestmark = clause("S400")
TERMS = Terms("a", clock_bound_s=0.5, drift_s=0.0, node_timeout_s=30.0, forget_after_s=0.0)
CLOSED = 1000.0


def file(path: str) -> Scope:
    return Scope(frozenset({path.encode()}))


def directory(path: str) -> Scope:
    return Scope(frozenset({path.encode()}), is_directory=True)


def change(path: str) -> Scope:
    return Scope(frozenset({path.encode()}), changes=True)


@pytest.mark.parametrize(
    ("withheld", "later", "has_to_do"),
    [
        (file("run/latest"), file("run/latest"), True),
        (file("run/step/.metadata"), file("run/latest"), True),
        (file("run/a/b/.metadata"), file("run/latest"), True),
        (directory("run/step"), file("run/latest"), True),
        (directory("run/step"), file("run/step/.metadata"), False),
        (file("run/step/.metadata"), file("latest"), True),
        (file("run/latest"), file("run/tracker"), False),
        (file("run/latest"), file("run/step/.metadata"), False),
        (file("run/step/.metadata"), file("other/latest"), False),
        (file("run/latest"), directory("run/step"), False),
        (change("run/latest"), directory("run/step"), True),
        (change("latest"), directory("run/step"), True),
        (change("run/a/latest"), directory("run/step"), True),
        (change("other/latest"), directory("run/step"), False),
        (change("run/latest"), file("run/tracker"), False),
    ],
)
def test_what_has_to_do_with_what(withheld: Scope, later: Scope, has_to_do: bool) -> None:
    assert bool(withheld.tells() & later.asks()) is has_to_do


def test_a_record_stays_small_however_much_is_withheld() -> None:
    many = [(file(f"run/step-{n}/.metadata").tells(), 1000.0 + n) for n in range(KEYS_MAX)]
    assert of_record(many) == {ANYTHING: 1000.0}
    few = of_record(many[5:7] * 100)
    assert (len(few), set(few.values())) == (2 + 2, {1005.0, 1006.0})


def test_where_there_is_no_room_for_it_all_of_others_pointers_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backing").mkdir()
    backing = BackingDirectory(tmp_path / "backing", "a", REAL)
    records = NodeRecords(backing)
    record = NodeRecord("a", "1", 1, clock=1000.0, watermark=999.0)
    records.publish(record)

    def no_room(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    overwrite = backing.overwrite_own

    def fits(path: tuple[bytes, ...], content: bytes) -> bool:
        return len(content) <= BLOCK_BYTES and overwrite(path, content)

    monkeypatch.setattr(backing, "write_own", no_room)
    monkeypatch.setattr(backing, "overwrite_own", fits)
    many = {f"{n:016x}": 900.0 + n for n in range(KEYS_MAX)}
    records.publish(replace(record, held=many, standing=many, standing_of_lost=many))
    found = records.read("a")
    assert found is not None
    told = (found.held, found.standing, found.standing_of_lost)
    assert told == ({ANYTHING: 900.0},) * 3
    backing.disconnect()


def peer_of(**fields: Any) -> Peer:
    peer = Peer("b", 0.0)
    record = NodeRecord("b", beat=1, clock=1002.0, watermark=1002.0, heartbeat_s=2.0)
    peer.saw(replace(record, **fields), 1002.0, 0.0)
    peer.read_at = 1.0
    return peer


@clause("S160")
@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, Verdict.PASSES),
        ({"held": {"k": CLOSED - 1}}, Verdict.WITHHELD),
        ({"held": {"k": CLOSED + 1}}, Verdict.PASSES),
        ({"held": {"other": CLOSED - 1}}, Verdict.PASSES),
        ({"held": {"k": CLOSED - 1}, "watermark": CLOSED - 2}, Verdict.WITHHELD),
        ({"held": {"k": CLOSED - 1}, "gated": CLOSED + 1}, Verdict.WITHHELD),
        ({"held": {"k": CLOSED - 1}, "state": NodeState.AWAY}, Verdict.MISSING),
        ({"held": {"k": CLOSED - 1}, "state": NodeState.LEFT}, Verdict.MISSING),
        ({"held": {"k": CLOSED - 1}, "state": NodeState.GONE}, Verdict.PASSES),
    ],
)
def test_a_pointer_waits_for_what_is_withheld_elsewhere(
    fields: dict[str, Any], verdict: Verdict
) -> None:
    peer = peer_of(**fields)
    assert peer.judge(CLOSED, TERMS, asks={"k"}, since=1.0) is verdict
    assert peer.judge(CLOSED, TERMS, asks={"k"}, since=1.0, yields=True) is not Verdict.WITHHELD


STANDING = {"latest": 0.0}
"""Since long before what is removed."""
ADOPTS: dict[str, Any] = {
    "adopts": "holder",
    "node_id": "a",
    "spill": Path("/spill"),
    "spill_mode": SpillMode.MIRROR,
}


@clause("S463")
@pytest.mark.parametrize(
    ("fields", "text", "makes_room", "why"),
    [
        ({}, b"step-7", False, ""),
        ({"standing": STANDING}, b"step-7", False, "named"),
        ({"standing": STANDING}, b"step-7", True, "named"),
        ({"standing": STANDING}, b"step-5", True, ""),
        ({"standing": STANDING}, b"", False, ""),
        ({"standing": STANDING}, None, False, "named"),
        ({"standing": {"run/latest": 0.0}}, None, False, ""),
        ({"standing": {ANYTHING: 0.0}}, b"", False, "named"),
        ({"standing": {"latest": math.inf}}, b"step-7", False, ""),
        ({"standing": STANDING, "state": NodeState.AWAY}, b"step-7", False, "missing"),
        ({"standing": STANDING, "state": NodeState.GONE}, b"step-7", False, ""),
        ({"standing_of_lost": STANDING}, b"step-7", False, ""),
        ({"standing_of_lost": STANDING}, b"step-7", True, "named"),
    ],
)
def test_a_removal_that_takes_its_turn_waits_for_a_pointer_of_another_member_that_names_it(
    tmp_path: Path, fields: dict[str, Any], text: bytes | None, makes_room: bool, why: str
) -> None:
    """The other member has persisted all but what it withholds."""

    async def scenario() -> None:
        member.other(state=NodeState.LEFT)
        await member.cluster.join()
        await member.cluster.look()
        member.gate.begin()
        member.now += 1.0
        removal = member.remove(b"step-7")
        member.gate.put_off(removal)
        member.gate.need([removal], makes_room=makes_room)
        persisted = member.log.clock.now() + 60.0
        member.other(**{"beat": 2, "watermark": persisted, **fields})
        await member.looked()
        assert [one.missing for one in member.gate.withheld()] == [{"b": why}] * bool(why)
        assert member.gate.is_open(removal) is not bool(why)
        shown = [(one.op, one.withheld) for one in member.cluster.statistics().waiting]
        assert shown == [(removal, True)] * (why == "named")
        member.other(beat=3, watermark=persisted)
        await member.looked()
        assert member.gate.is_open(removal)

    member = Node(tmp_path, texts=lambda paths: dict.fromkeys(paths, text))
    trio.run(scenario)


@clause("S622")
@pytest.mark.parametrize(
    ("settings", "fields", "text", "state"),
    [
        ({}, {"standing_of_lost": STANDING}, b"step-5", "yields"),
        (ADOPTS, {"standing_of_lost": STANDING}, b"step-5", "open"),
        (ADOPTS, {"standing_of_lost": STANDING}, b"step-7", "named"),
        (ADOPTS, {"standing_of_lost": STANDING, "watermark": 0.0}, b"step-5", "waits"),
        (ADOPTS, {"standing": STANDING}, b"step-5", "yields"),
        (ADOPTS, {}, b"step-5", "yields"),
    ],
)
def test_a_removal_of_an_adopted_log_does_not_wait_for_pointers_that_wait_for_its_loss(
    tmp_path: Path, settings: dict[str, Any], fields: dict[str, Any], text: bytes, state: str
) -> None:
    """Nor does it go before those that are not withheld, or while what they change names it."""

    async def scenario() -> str:
        member.other(state=NodeState.LEFT)
        await member.cluster.join()
        await member.cluster.look()
        member.gate.begin()
        now = member.log.clock.now()
        member.cluster._own.set_lost((now - 1.0, now))
        member.now += 1.0
        removal = member.remove(b"step-7")
        member.gate.put_off(removal)
        told = {"beat": 2, "watermark": now + 60.0, "pointers": 0.0, **fields}
        member.other(**told)
        await member.looked()
        await member.looked()
        if member.gate.is_open(removal):
            return "open"
        if member.gate.yields(removal):
            return "yields"
        return "named" if removal.withheld else "waits"

    member = Node(tmp_path, texts=lambda paths: dict.fromkeys(paths, text), **settings)
    assert trio.run(scenario) == state


@clause("S463")
def test_as_long_as_nobody_knows_what_a_pointer_says_it_names_all(tmp_path: Path) -> None:
    """The backing directory refuses to be read when the look comes to the pointer."""
    refuses = [True]

    def texts(paths: Iterable[LowerPath]) -> dict[LowerPath, bytes | None]:
        if refuses:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return dict.fromkeys(paths, b"step-5")

    async def scenario() -> None:
        member.other(state=NodeState.LEFT)
        await member.cluster.join()
        member.gate.begin()
        member.now += 1.0
        removal = member.remove(b"step-7")
        member.gate.put_off(removal)
        member.gate.need([removal])
        member.other(beat=2, watermark=member.log.clock.now() + 60.0, standing=STANDING)
        with pytest.raises(OSError):
            await member.looked()
        member.cluster._judge(member.gate.gated())
        assert not member.gate.is_open(removal)
        refuses.clear()
        await member.looked()
        assert member.gate.is_open(removal)

    member = Node(tmp_path, texts=texts)
    trio.run(scenario)


@clause("S484")
@pytest.mark.parametrize(
    ("fields", "replaced"),
    [
        ({}, False),
        ({"placed": {"k": CLOSED + 1}}, True),
        ({"placed": {"k": CLOSED + 0.4}}, False),
        ({"placed": {"k": CLOSED + 0.4}, "drift_s": 60.0}, False),
        ({"placed": {"k": CLOSED - 1}}, False),
        ({"placed": {"other": CLOSED + 1}}, False),
        ({"placed": {"k": CLOSED + 1}, "state": NodeState.GONE}, True),
    ],
)
def test_a_pointer_is_replaced_by_one_that_was_surely_closed_later(
    fields: dict[str, Any], replaced: bool
) -> None:
    assert peer_of(**fields).has_replaced({"k"}, CLOSED, TERMS) is replaced


@clause("S484")
def test_what_was_made_is_told_by_the_next_worker_too_and_of_the_newest_names_only(
    tmp_path: Path,
) -> None:
    state = StateDatabase(tmp_path / "state", REAL)
    placed = Placed(state)
    for number in range(PLACED_MAX + 2):
        placed.note((f"k{number}",), 1000.0 + number)
    placed.note(("k9",), 3.0)
    state.commit()
    told = Placed(state).told()
    assert told == placed.told()
    assert (len(told), "k1" in told, "k2" in told) == (PLACED_MAX, False, True)
    assert told["k9"] == 1009.0, "one that was closed earlier came later"


@clause("S484", "S162")
def test_what_a_forgotten_member_has_made_is_told_on(tmp_path: Path) -> None:
    """Else who was away with an older pointer brings it when he is back."""
    node = Node(tmp_path)

    async def scenario() -> None:
        await node.cluster.join()
        node.other(placed={"k": 1000.0}, state=NodeState.AWAY)
        assert await node.cluster.forget("b")

    trio.run(scenario)
    assert "b" not in node.records
    closed_at = node.records["a"].placed["k"]
    assert 1000.0 - 10.0 < closed_at < 1000.0, "less what the clocks may differ by"


@clause("S484")
def test_what_an_earlier_incarnation_has_made_is_told_on(tmp_path: Path) -> None:
    node = Node(tmp_path)

    async def scenario() -> None:
        before = node.other(placed={"k": 1000.0})
        node.records.publish(replace(before, node="a", incarnation="lost"))
        await node.cluster.join()

    trio.run(scenario)
    assert node.records["a"].placed == {"k": 1000.0}


@pytest.mark.parametrize("ahead_s", [-0.2, 0.0, 0.2, 3600.0, -3600.0])
def test_of_two_members_not_both_find_that_the_others_was_first(ahead_s: float) -> None:
    """B's clock is ahead by so much. Whatever the two stamps, one at most waits for the other."""
    for apart_s in (-2.0, -0.3, -0.001, 0.0, 0.001, 0.3, 2.0):
        ours = CLOSED
        theirs = CLOSED + ahead_s + apart_s
        b = peer_of(clock=1002.0 + ahead_s - 0.01, held={"k": theirs}, heard={"a": -ahead_s - 0.01})
        a = Peer("a", 0.0)
        record = NodeRecord("a", clock=1002.0 - 0.01, watermark=1002.0, held={"k": ours})
        a.saw(replace(record, heard={"b": ahead_s - 0.01}), 1002.0 + ahead_s, 0.0)
        ours_waits = b.judge(ours, TERMS, asks={"k"}) is Verdict.WITHHELD
        theirs_waits = a.judge(theirs, replace(TERMS, node="b"), asks={"k"}) is Verdict.WITHHELD
        assert not (ours_waits and theirs_waits)
        if abs(apart_s) > 1.0:
            assert (ours_waits, theirs_waits) == (apart_s < 0, apart_s > 0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def withheld_elsewhere(node: Node, ago_s: float = 60.0) -> None:
    now = node.log.clock.now()
    node.other(held={EVERYBODYS: now - ago_s}, watermark=now + 60.0)


def test_it_is_withheld_itself_and_told_of_in_turn_until_the_other_one_goes(node: Node) -> None:
    async def scenario() -> None:
        withheld_elsewhere(node)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 1.0
        pointer = node.close(b"latest")
        await node.looked()
        assert pointer.withheld
        await node.cluster.publish()
        told = node.records["a"].held
        assert set(told.values()) == {pointer.logged_at}
        assert EVERYBODYS in told, "they are passed on: what waits for this one waits for that"
        node.other(beat=2, watermark=node.log.clock.now() + 60.0)
        await node.looked()
        assert node.gate.is_open(pointer)

    trio.run(scenario)


def test_a_pointer_whose_writer_named_its_nodes_waits_for_its_own_name_alone(node: Node) -> None:
    async def scenario() -> None:
        withheld_elsewhere(node)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 1.0
        node.log.needs.tell(node.next_ino(), ("b",))
        pointer = node.close(b"latest")
        await node.looked()
        assert node.gate.is_open(pointer)

    trio.run(scenario)


@clause("S409", "S282")
@pytest.mark.parametrize(
    ("name", "fields", "waits"),
    [
        ("latest", {}, True),
        ("latest", {"state": NodeState.AWAY}, True),
        ("latest", {"state": NodeState.GONE}, False),
        ("step/.metadata", {}, False),
        ("latest", {"watermark": -math.inf, "held": {}}, False),
    ],
)
def test_what_a_node_that_was_not_named_withholds_under_its_name_comes_first(
    node: Node, name: str, fields: dict[str, Any], waits: bool
) -> None:
    """Else `latest` goes back when the node that all wait for is back.

    Nothing else of that node is waited for.
    """

    async def scenario() -> None:
        now = node.log.clock.now()
        held = dict.fromkeys(file(name).tells(), now - 60.0)
        node.other(watermark=now + 60.0)
        node.other(**{"node": "c", "watermark": now - 60.0, "held": held, **fields})
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 1.0
        node.log.needs.tell(node.next_ino(), ("b",))
        pointer = node.close(b"latest")
        await node.looked()
        assert pointer.withheld is waits
        assert node.gate.is_open(pointer) is not waits
        node.other(node="c", beat=2, watermark=now - 60.0)
        await node.looked()
        assert node.gate.is_open(pointer)

    trio.run(scenario)


@clause("S164")
def test_what_waits_for_what_is_lost_is_told_to_nobody(node: Node) -> None:
    """It may never come; pointers that were closed later are free."""

    async def scenario() -> None:
        now = node.log.clock.now()
        await node.cluster.join()
        node.gate.begin()
        node.now += 1.0
        pointer = node.close(b"latest")
        node.other(watermark=now + 60.0, lost=(now - 5.0, now + 5.0))
        await node.looked()
        assert pointer.withheld
        assert node.gate.held() == {}

    trio.run(scenario)


@clause("S164", "S409")
@pytest.mark.parametrize(
    ("told", "older"),
    [
        ({"latest": CLOSED - 5.0}, CLOSED - 5.0),
        ({ANYTHING: CLOSED - 5.0}, CLOSED - 5.0),
        ({"latest": CLOSED + 5.0}, None),
        ({"other/latest": CLOSED - 5.0}, None),
        ({}, None),
    ],
)
def test_a_record_tells_what_older_change_of_a_pointer_waits_for_a_loss(
    told: dict[str, float], older: float | None
) -> None:
    peer = peer_of(standing_of_lost=told)
    assert peer.tells_of_loss is bool(told)
    assert peer.older_of_loss({"latest"}, CLOSED, TERMS) == older
    assert peer.older_of_loss(set(), CLOSED, TERMS) is None
    assert peer.judge_freed(TERMS, 1.0) is Verdict.WITHHELD
    forgets = replace(TERMS, forget_after_s=10.0)
    peer.asked_at = 100.0  # silent, and forgotten
    assert peer.judge_freed(forgets, 1.0) is Verdict.PASSES


@clause("S164", "S409")
@pytest.mark.parametrize("is_forgotten", [True, False])
def test_what_a_loss_held_back_elsewhere_comes_before_later_ones_when_it_is_forgotten(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    """Whoever forgets the loss frees the older and the newer one, and the older must not be last.

    Also for who has not withheld the newer one for it, as a worker that began since. As long as the
    loss is there, what waits for it may never come, and later ones do not wait.
    """
    monkeypatch.setattr(node.gate, "changes", lambda _one: {"latest"})

    async def scenario() -> None:
        older = node.log.clock.now()
        if not is_forgotten:
            node.other(node="c", lost=(older - 5.0, older + 5.0))
        node.other(standing_of_lost={"latest": older})
        await node.cluster.join()
        node.gate.begin()
        node.now += 60.0
        pointer = node.close(b"latest")
        told = node.log.clock.now() + 60.0
        if not is_forgotten:
            node.other(node="c", beat=2, watermark=told, lost=(older - 5.0, older + 5.0))
        node.other(beat=2, watermark=told, standing_of_lost={"latest": older})
        await node.looked()
        assert pointer.withheld is is_forgotten
        assert node.gate.is_open(pointer) is not is_forgotten
        node.other(beat=3, watermark=told)
        await node.looked()
        assert node.gate.is_open(pointer)

    trio.run(scenario)


@clause("S161")
def test_who_drains_gives_a_node_that_withholds_time_to_tell_anew(node: Node, run: Run) -> None:
    """It may go by a look of its own from before the missing node's return: `flush` would say
    "withheld" of what goes in a moment.
    """

    async def scenario() -> None:
        withheld_elsewhere(node)
        await node.cluster.join()
        await node.cluster.look()
        node.gate.begin()
        node.now += 1.0
        pointer = node.close(b"latest")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.cluster._gate_forever)
            await trio.testing.wait_all_tasks_blocked()
            assert pointer.withheld

            async def beats() -> None:
                for beat in range(2, 2 + RECORDS_AFTER):
                    now = node.log.clock.now()
                    held = {EVERYBODYS: now - 60.0} if beat < RECORDS_AFTER else {}
                    await trio.sleep(0.5)
                    node.other(beat=beat, clock=now + beat, watermark=now + 60.0, held=held)

            nursery.start_soon(beats)
            await node.cluster.looked()
            assert not any(op.withheld for op in [pointer])
            nursery.cancel_scope.cancel()

    run(scenario)


@clause("S401")
def test_what_becomes_a_pointer_by_a_rename_is_not_there_before_that_may_be(
    world: World, run: Run
) -> None:
    """Found by attack: another node's file took its place under the temporary name, and was renamed
    in its stead.
    """
    gate = world.engine.gate
    gate.begin()
    world.mkdir("run")
    content = world.store("run/latest.tmp", b"1")
    pointer = world.rename("run/latest.tmp", "run/latest")
    run(world.run_for, 1.0)
    assert world.lower.visible() == {b"run/": b""}
    assert [one.op for one in gate.gated()] == [content, pointer]
    assert gate.head() == pointer.logged_at
    for one in gate.gated():
        assert gate.withholds(one)
    after = world.store("after", b"goes on")
    run(world.run_for, 1.0)
    assert world.log.get(after.seq) is None
    assert gate.watermark(math.inf) == math.inf
    assert content.aside is pointer.aside is Aside.WITHHELD
    for one in gate.gated():
        gate.frees(one)
    let_pass(world)
    run(world.drain)
    assert world.lower.visible() == world.application_view()


@clause("S401", "S81")
def test_the_next_worker_knows_that_too(world: World, run: Run) -> None:
    world.engine.gate.begin()
    world.store("latest.tmp", b"1")
    world.rename("latest.tmp", "latest")
    world.restart()
    world.engine.gate.begin()
    run(world.run_for, 1.0)
    assert world.lower.visible() == {}


@clause("S401")
def test_so_it_is_with_a_symbolic_link(world: World, run: Run) -> None:
    gate = world.engine.gate
    gate.begin()
    link = world.symlink(b"step_1", "latest.tmp")
    pointer = world.rename("latest.tmp", "latest")
    run(world.run_for, 1.0)
    assert world.lower.visible() == {}
    assert [one.op for one in gate.gated()] == [link, pointer]


@clause("S484")
@pytest.mark.parametrize("as_link", [False, True])
def test_what_another_member_has_replaced_leaves_the_order_with_all_that_is_its_own(
    world: World, run: Run, as_link: bool
) -> None:
    gate = world.engine.gate
    gate.begin()
    if as_link:
        world.symlink(b"step_1", "latest.tmp")
    else:
        world.store("latest.tmp", b"step_1")
    pointer = world.rename("latest.tmp", "latest")
    (gated,) = [one for one in gate.gated() if one.op is pointer]
    assert gate.names_made(gated)
    assert gate.supersede(gated)
    assert not gate.gated()
    world.store("after", b"goes on")
    run(world.drain)
    assert world.lower.visible() == {b"after": b"goes on"}


@clause("S484")
@pytest.mark.parametrize("what", ["moved", "removed", "replaced", "directory"])
def test_what_is_needed_here_stays(world: World, what: str) -> None:
    gate = world.engine.gate
    gate.begin()
    if what == "directory":
        world.mkdir("latest.tmp")
    else:
        world.store("latest.tmp", b"step_1")
    pointer = world.rename("latest.tmp", "latest")
    if what == "moved":
        world.rename("latest", "latest.bak")
    if what == "removed":
        world.unlink("latest")
    if what == "replaced":
        world.store("latest.tmp", b"step_2")
        world.rename("latest.tmp", "latest")
    (gated,) = [one for one in gate.gated() if one.op is pointer]
    assert not (gate.names_made(gated) and gate.supersede(gated))
    assert world.log.get(pointer.seq) is pointer
