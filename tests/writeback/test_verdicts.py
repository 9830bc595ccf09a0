"""Why an operation is not carried out yet: people are told what the order decided by (S292)."""

from __future__ import annotations

import errno

import pytest

from acpfs.writeback.log.ops import Op
from acpfs.writeback.log.stages import Aside, Step
from acpfs.writeback.log.verdicts import Why
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import MemoryLower
from tests.writeback.world import World

pytestmark = pytest.mark.clause("S292")


def told(world: World) -> dict[str, Why]:
    """By name: what `status` shows."""
    return {entry.name: Why(entry.why) for entry in world.engine.statistics().queue}


def refuse(lower: MemoryLower, number: int, *names: bytes) -> None:
    def fault(label: str, path: tuple[bytes, ...]) -> None:
        if label in ("rename", "mkdir") and path[-1] in names:
            raise OSError(number, "refused")

    lower.fault = fault


def test_what_waits_for_its_application_says_so(world: World, run: Run) -> None:
    world.store("open", b"1").take(Step.CLOSED)
    world.store("grows", b"1").take(Step.OUTGROWN)
    world.mkdir("d")
    assert told(world) == {"open": Why.TENTATIVE, "grows": Why.UNSEALED, "d": Why.READY}
    run(world.run_for, 1.0)
    assert told(world) == {"open": Why.TENTATIVE, "grows": Why.UNSEALED, "d": Why.READY}, (
        "these wait, and what is behind them for its turn"
    )


def test_what_failed_and_what_is_not_copied_say_so(world: World, run: Run) -> None:
    world.store("f", b"1")
    assert told(world) == {"f": Why.BYTES}
    refuse(world.lower, errno.EIO, b"f")
    run(world.run_for, 0.01)
    assert told(world) == {"f": Why.AGAIN}


def test_what_is_behind_something_refused_says_what_it_has_to_do_with_it(
    world: World, run: Run
) -> None:
    world.store("old", b"1")
    run(world.drain)
    refuse(world.lower, errno.EACCES, b"bad")
    world.mkdir("bad")
    world.store("bad/below", b"1")
    world.rename("bad/below", "moved")
    world.unlink("old")
    world.store("latest", b"bad")
    run(world.run_for, 100.0)
    assert world.engine.statistics().queue[2].why == Why.TOUCHES_REFUSED.value
    by_kind = {
        (entry.operation, entry.name): Why(entry.why) for entry in world.engine.statistics().queue
    }
    assert by_kind == {
        ("mkdir", "bad"): Why.REFUSED,
        ("store", "below"): Why.TOUCHES_REFUSED,
        ("rename", "below"): Why.TOUCHES_REFUSED,
        ("unlink", "old"): Why.DELETES_BEFORE_REFUSED,
        ("store", "latest"): Why.NAMES_REFUSED,
    }


def test_what_waits_for_other_nodes_says_so(world: World, run: Run) -> None:
    world.store("old", b"1")
    run(world.drain)
    gate = world.engine.gate
    gate.begin()
    world.store("latest", b"1")
    run(world.run_for, 1.0)
    assert told(world) == {"latest": Why.OTHERS}
    assert gate.withholds(gate.gated()[0])
    world.unlink("old")
    world.store("latest", b"2").take(Step.CLOSED)  # not to be left out for it
    run(world.run_for, 1.0)
    kinds = [(entry.operation, Why(entry.why)) for entry in world.engine.statistics().queue]
    assert kinds == [
        ("store", Why.MISSING),
        ("unlink", Why.DELETES_BEFORE_POINTER),
        ("store", Why.TOUCHES_REFUSED),
    ]


def test_what_the_order_passed_over_is_what_people_are_told(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One function decides and tells: a verdict that is given to the order shows in `status`, and
    holds the operation.
    """
    order = world.engine._order
    verdict = order._verdict
    monkeypatch.setattr(
        order, "_verdict", lambda op, now: Why.GUARDED if op.name == b"f" else verdict(op, now)
    )
    world.mkdir("f")
    run(world.run_for, 1.0)
    assert told(world) == {"f": Why.GUARDED}
    monkeypatch.undo()
    run(world.drain)


@pytest.mark.parametrize("aside", Aside)
def test_there_are_words_for_each(world: World, aside: Aside) -> None:
    op = world.mkdir("d")
    op.aside = aside
    op.held_for = Why.TOUCHES_HELD
    assert why(world, op)


def why(world: World, op: Op) -> str:
    return world.engine._order.why(op).value
