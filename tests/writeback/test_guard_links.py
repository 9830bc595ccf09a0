"""The guard, and files of a held checkpoint that have other names, under which they are
rewritten.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.writeback.conftest import Run
from tests.writeback.memory_lower import MemoryLower
from tests.writeback.test_guard import FILES, SHARD, guarded_world, held, kept, remove, save
from tests.writeback.test_guard_after_death import live
from tests.writeback.test_random import Mortal
from tests.writeback.world import World

LINKED = FILES[-1]
OLD = SHARD + b"run/checkpoint-1"


def rewritten_under_another_name(world: World, run: Run) -> None:
    """A whole checkpoint is held; one of its files has got other content under its other name."""
    save(world, "run/checkpoint-1")
    world.link(f"run/checkpoint-1/{LINKED}", "run/copy")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    world.store("run/copy", b"new")
    run(world.drain)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return guarded_world(tmp_path)


@pytest.mark.clause("S226")
def test_a_later_worker_holds_it_too(world: World, run: Run) -> None:
    rewritten_under_another_name(world, run)
    for _ in range(2):
        world.restart()
        run(world.drain)
        assert held(world) == [b"run/checkpoint-1"]
        assert world.lower.visible()[b"run/checkpoint-1/%s" % LINKED.encode()] == OLD
    world.engine.guard.release(())
    run(world.drain)
    assert world.lower.visible() == world.application_view()


@pytest.mark.clause("S226")
@pytest.mark.parametrize("restart", [True, False])
def test_it_goes_aside_with_the_rest_and_is_not_in_the_new_one(
    world: World, run: Run, restart: bool
) -> None:
    rewritten_under_another_name(world, run)
    if restart:
        world.restart()
    world.mkdir("run/checkpoint-1")
    run(world.drain)
    assert {path.split("/", 1)[1] for path in kept(world) if not path.endswith("/")} == set(FILES)
    assert world.lower.visible() == world.application_view()
    save(world, "run/checkpoint-2")
    run(world.drain)
    assert not kept(world)
    assert world.lower.visible() == world.application_view()


@pytest.mark.clause("S226")
def test_rewritten_once_more_and_again_under_the_held_name(world: World, run: Run) -> None:
    rewritten_under_another_name(world, run)
    world.store("run/copy", b"newer")
    run(world.drain)
    assert world.lower.visible()[b"run/checkpoint-1/%s" % LINKED.encode()] == OLD
    world.mkdir("run/checkpoint-1")
    world.link("run/copy", f"run/checkpoint-1/{LINKED}")
    world.store("run/copy", b"newest")
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert f"{LINKED}" in {path.rsplit("/", 1)[1] for path in kept(world)}


@pytest.mark.clause("S226")
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("calls", range(1, 16))
def test_the_worker_dies_in_the_middle(tmp_path: Path, run: Run, calls: int, after: bool) -> None:
    lower = MemoryLower()
    mortal = Mortal(lower)
    world = World(tmp_path, mortal, keep_last_persisted=True)
    world.mkdir("run")
    save(world, "run/checkpoint-1")
    world.link(f"run/checkpoint-1/{LINKED}", "run/copy")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    world.store("run/copy", b"new")
    world.mkdir("run/checkpoint-1")
    mortal.calls_left = calls
    mortal.after = after
    live(world)
    mortal.calls_left = -1
    lower.descriptors.clear()
    world.restart()
    run(world.drain)
    assert lower.visible() == world.application_view()
    assert held(world) == [b"run/checkpoint-1"]
    world.engine.guard.release(())
    run(world.drain)
    assert lower.visible() == world.application_view()
    assert not kept(world)
