"""What a commit costs does not grow with what its file has: calls on the backing directory, rows,
and calls in Python are counted.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.rig.python_calls import counted
from tests.writeback.memory_lower import error
from tests.writeback.world import World

pytestmark = pytest.mark.clause("S414")
FEW = 10
MANY = 1000
NOISE = 1.5
"""How often trio's own calls run is not quite the same in two runs; what grows with the names is a
hundred times as much.
"""


def drain(world: World) -> None:
    trio.run(world.drain, clock=MockClock(autojump_threshold=0))


def cost_of(world: World, act: Callable[[World], Any]) -> tuple[int, int]:
    """Calls on the backing directory, and rows, of what is done and its drain."""
    lower = sum(world.lower.calls.values())
    rows = world.state.changes
    act(world)
    drain(world)
    return sum(world.lower.calls.values()) - lower, world.state.changes - rows


def with_names(base: Path, count: int) -> World:
    """One drained file with so many further names."""
    base.mkdir()
    world = World(base)
    world.store("f", b"x")
    for number in range(count):
        world.link("f", f"l{number:04}")
    drain(world)
    return world


def after_a_failed_flush(world: World) -> None:
    """All that the group made is looked at."""
    failures = itertools.count()

    def fault(label: str, _path: object) -> None:
        if label.startswith("sync") and next(failures) == 0:
            raise error(errno.EIO)

    world.lower.fault = fault
    world.link("f", "flushed twice")
    world.setattr("f", permissions=0o640)


def after_a_restart(world: World) -> None:
    """Others may have changed the backing directory meanwhile."""
    world.lower.fault = lambda _label, _path: None
    world.link("f", "after a restart")
    world.setattr("f", permissions=0o644)
    world.engine.expect_foreign_changes(world.log.last_seq)


ACTS: dict[str, Callable[[World], Any]] = {
    "link": lambda world: world.link("f", "new"),
    "attributes": lambda world: world.setattr("f", permissions=0o600),
    "unlink": lambda world: world.unlink(f"l{FEW - 1:04}"),
    "rename": lambda world: world.rename("l0000", "moved"),
    "another file": lambda world: world.store("another", b"y"),
    "a failed flush": after_a_failed_flush,
    "a restart": after_a_restart,
}


def test_a_commit_asks_nothing_of_further_names(tmp_path: Path) -> None:
    few, many = (with_names(tmp_path / str(count), count) for count in (FEW, MANY))
    costs = {what: (cost_of(few, act), cost_of(many, act)) for what, act in ACTS.items()}
    assert {what: cost for what, cost in costs.items() if cost[0] != cost[1]} == {}


@pytest.mark.clause("S630")
def test_a_save_by_way_of_a_temporary_name_costs_what_a_plain_one_does(tmp_path: Path) -> None:
    """It is one rename of the staging file, and one look at what came."""

    def by_way(world: World, number: int) -> None:
        world.store(f"tmp{number}", b"x")
        world.rename(f"tmp{number}", f"f{number}")

    def straight(world: World, number: int) -> None:
        world.store(f"f{number}", b"x")

    def per_file(base: str, save: Callable[[World, int], None]) -> dict[str, int]:
        (tmp_path / base).mkdir()
        world = World(tmp_path / base)
        before = dict(world.lower.calls)
        for number in range(FEW):
            save(world, number)
        drain(world)
        calls = {name: count - before.get(name, 0) for name, count in world.lower.calls.items()}
        # what is done once per group, or at times, is fewer
        each = {name: count for name, count in calls.items() if count >= FEW}
        assert each["rename"] == FEW
        return each

    assert per_file("by way", by_way) == per_file("straight", straight)


def made_and_removed(world: World, count: int) -> None:
    """As LTP's linkat02 leaves it: all of it is logged when the drain comes to it."""
    world.store("f", b"x")
    for number in range(count):
        world.link("f", f"l{number:04}")
    for number in range(count):
        world.unlink(f"l{number:04}")
    world.unlink("f")


def kept(world: World, count: int) -> None:
    world.store("f", b"x")
    for number in range(count):
        world.link("f", f"l{number:04}")
    for number in range(count):
        world.unlink(f"l{number:04}")


def rewritten(world: World, count: int) -> None:
    for number in range(count):
        world.store("f", b"%d" % number)
        world.setattr("f", permissions=0o600 | number % 8)


@pytest.mark.parametrize("act", [made_and_removed, kept, rewritten])
def test_an_operation_costs_the_same_behind_many_on_its_file(
    tmp_path: Path, act: Callable[[World, int], None]
) -> None:
    def calls_per_operation(count: int) -> float:
        base = tmp_path / str(count)
        base.mkdir()
        world = World(base)
        act(world, count)
        operations = len(world.log)
        with counted() as calls:
            drain(world)
        return calls[0] / operations

    assert calls_per_operation(MANY // 4) < NOISE * calls_per_operation(MANY // 8)


def test_what_is_counted_of_a_node_is_so(tmp_path: Path) -> None:
    """Nothing is left behind when the log is empty."""
    log = with_names(tmp_path / "w", FEW).log
    assert list(log) == []
    kept = (log._net_removals, log._replacing, log._handed_out)
    assert not any(kept)
