"""Whom a pointer waits for, where its writer said so: who takes the words, and what the gate makes
of them.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import trio

from acpfs.backing.member_records import NodeState
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.needs import UNUSED_MAX, Needs, parse
from acpfs.writeback.log.ops import WITHHELD, Op, OpKind
from acpfs.writeback.members.gate import Gated
from tests.rig.runtime import REAL
from tests.writeback.test_cluster import Node

clause = pytest.mark.clause


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    made.gate.begin()
    return made


def pointer(node: Node, *needs: str) -> Op:
    """A pointer is closed; `needs`: what its writer said before."""
    ino = Ino(10 + len(node.log))
    if needs:
        node.log.needs.tell(ino, needs)
    return node.close(b"latest")


def gated(node: Node, op: Op) -> Gated | None:
    return next((one for one in node.gate.gated() if one.op is op), None)


async def looked(node: Node) -> None:
    """A record of its own may be written again."""
    node.now += 1.0
    await node.looked()


@clause("S282")
def test_a_pointer_takes_the_words_and_leaves_none(node: Node) -> None:
    plain = node.close(b"plain")
    node.log.needs.tell(plain.ino, ("b",))
    first = node.log.append(
        OpKind.SYMLINK, plain.ino, parent=ROOT, name=b"latest", logged_at=node.log.clock.now()
    )
    second = node.log.append(
        OpKind.SYMLINK, plain.ino, parent=ROOT, name=b"latest", logged_at=node.log.clock.now()
    )
    assert [node.log.needs.of(op) for op in (plain, first, second)] == [None, ("b",), None]
    assert node.log.needs.told(plain.ino) is None


@clause("S282")
def test_what_is_said_later_is_for_the_next_pointer(tmp_path: Path) -> None:
    """Also where the operation is noted anew: by its last close, or by the next worker, which found
    it in the log.
    """
    node = Node(tmp_path)
    node.gate.begin()
    op = pointer(node)
    node.log.needs.tell(op.ino, ("b",))
    node.gate.note(op)
    assert node.log.needs.of(op) is None
    node.log._state.commit()
    again = Node(tmp_path)
    again.gate.begin()
    assert (again.log.needs.of(op), again.log.needs.told(op.ino)) == (None, ("b",))


@clause("S282")
def test_an_exchange_has_the_words_of_both_and_one_that_is_taken_back_gives_them_back(
    node: Node,
) -> None:
    one = Ino(51)
    other = Ino(52)
    node.log.needs.tell(one, ("b", "c"))
    node.log.needs.tell(other, ("c", "d"))
    both = Op(node.log.last_seq, OpKind.EXCHANGE, one, victim=other)
    node.log.needs.take(both)
    assert (node.log.needs.of(both), bool(node.log.needs)) == (("b", "c", "d"), False)
    node.log.needs.tell(one, ("b",))
    node.log.needs.take(both)
    assert node.log.needs.of(both) == ("b",), "the other was given nothing, and adds nothing"
    op = pointer(node, "b")
    node.log.needs.give_back(op)
    assert (node.log.needs.of(op), node.log.needs.told(op.ino)) == (None, ("b",))
    node.log.needs.tell(op.ino, ("c",))
    node.log.needs.give_back(op)  # twice does no harm, and what was said since counts
    assert node.log.needs.told(op.ino) == ("c",)


@clause("S284")
def test_words_that_no_pointer_takes_are_bounded_and_those_taken_go_with_it(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state", REAL)
    log = OperationLog(state, REAL.clock)
    for ino in range(UNUSED_MAX + 5):
        log.needs.tell(Ino(ino), ("b",))
    assert [log.needs.told(Ino(ino)) for ino in (4, 5)] == [None, ("b",)]
    op = log.append(OpKind.SYMLINK, Ino(100), parent=ROOT, name=b"latest")
    log.needs.take(op)
    assert log.needs.of(op) == ("b",)
    log.remove(op)
    state.change("INSERT INTO op_needs VALUES (7, 'b')")  # of an operation that a salvage cut off
    state.commit()
    assert (log.needs.of(op), Needs(state)._taken) == (None, {})


@clause("S284")
@pytest.mark.parametrize(
    ("value", "nodes"), [(b"a", ("a",)), (b" a , b,a ", ("a", "b")), (b"x-1.y_2", ("x-1.y_2",))]
)
def test_good_values(value: bytes, nodes: tuple[str, ...]) -> None:
    assert parse(value) == nodes


@clause("S282", "S283")
def test_only_the_named_nodes_are_asked(node: Node) -> None:
    """`b` has all persisted, `c` is behind, `d` lost its RAM tier: for a pointer that names `b`
    neither of these counts.
    """

    async def scenario() -> None:
        now = node.log.clock.now()
        node.other()
        node.other(node="c", watermark=now - 100)
        node.other(node="d", lost=(now - 100, now + 100))
        await node.cluster.join()
        free, waits, lost, every = (
            pointer(node, *names) for names in (["a", "b"], ["b", "c"], ["d"], [])
        )
        node.other(clock=now, watermark=now + 60, beat=2)
        node.other(node="c", watermark=now - 100, beat=2)
        back = {"incarnation": "2", "beat": 2, "lost": (now - 100, now + 100)}
        node.other(node="d", clock=now, watermark=now + 60, **back)
        await looked(node)
        assert [gated(node, op) is None for op in (free, waits, lost, every)] == [
            True,
            False,
            False,
            False,
        ]
        assert (lost.last_error, every.last_error, waits.withheld) == (WITHHELD, WITHHELD, False)
        assert {
            name for op in (waits, lost) if (one := gated(node, op)) for name in one.missing
        } == {"c", "d"}

    trio.run(scenario)


@clause("S283")
def test_a_node_without_a_record_withholds_until_it_has_one(node: Node) -> None:
    async def scenario() -> None:
        await node.cluster.join()
        op = pointer(node, "b")
        await looked(node)
        assert (op.withheld, [one.needs for one in node.cluster.statistics().waiting]) == (
            True,
            [("b",)],
        )
        node.other(watermark=-math.inf)
        await looked(node)
        assert gated(node, op) is not None
        node.other(watermark=node.log.clock.now() + 60, beat=2)
        await looked(node)
        assert (gated(node, op), op.parked) == (None, False)

    trio.run(scenario)


@clause("S283", "S162")
def test_a_named_node_that_is_forgotten_somewhere_is_waited_for_no_more(node: Node) -> None:
    async def scenario() -> None:
        node.other(state=NodeState.AWAY, watermark=-math.inf)
        await node.cluster.join()
        await node.cluster.look()
        named = pointer(node, "b")
        unknown = pointer(node, "x", "y")
        await looked(node)
        assert (named.withheld, unknown.withheld) == (True, True)
        del node.records["b"]  # by an operator, on another node
        for _ in range(3):
            await looked(node)
        assert gated(node, named) is None
        assert not await node.cluster.forget("z")
        for name in ("x", "y"):
            assert gated(node, unknown) is not None
            assert await node.cluster.forget(name)
            await looked(node)
        assert (gated(node, unknown), node.log.needs.of(unknown)) == (None, ())

    trio.run(scenario)
