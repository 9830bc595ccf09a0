"""What the guard costs under the lock: in proportion to what is let go or moved, never to all that
is held.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from acpfs.types import Ino
from acpfs.writeback.log.ops import Op
from tests.writeback.conftest import Run
from tests.writeback.test_guard import FILES, SHARD, guarded_world, held, remove, save
from tests.writeback.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return guarded_world(tmp_path)


class Looked(Counter[Ino]):
    """Counts how often it is looked at as a whole."""

    wholes = 0

    def items(self) -> Any:
        Looked.wholes += 1
        return super().items()


@pytest.mark.clause("S141")
def test_letting_go_costs_what_is_let_go(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was quadratic, under the lock."""
    files = tuple(f"shard-{i}" for i in range(50))
    save(world, "run/checkpoint-1", files)
    run(world.drain)
    remove(world, "run/checkpoint-1", files)
    run(world.drain)
    guard = world.engine.guard
    monkeypatch.setattr(guard, "_nodes", Looked(guard._nodes))
    monkeypatch.setattr(guard, "_above", Looked(guard._above))
    monkeypatch.setattr(Looked, "wholes", 0)
    assert guard.release(()) == 1
    assert Looked.wholes == 0
    assert not guard._nodes
    assert not guard._above
    assert not guard._held
    run(world.drain)
    assert not any(path.startswith(b"run/checkpoint-1") for path in world.lower.visible())


@pytest.mark.clause("S141")
def test_renames_beside_what_is_held_look_at_none_of_it(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 files renamed beside 2,000 held deletions took 14 s under the lock."""
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    guard = world.engine.guard
    indexed: list[Op] = []
    index = guard._index

    def counting(op: Op) -> None:
        indexed.append(op)
        index(op)

    monkeypatch.setattr(guard, "_index", counting)
    world.mkdir("other")
    world.store("other/file.tmp", SHARD)
    world.rename("other/file.tmp", "other/file")
    world.mkdir("run/tmp-checkpoint-2")
    world.rename("run/tmp-checkpoint-2", "run/beside")
    run(world.drain)
    assert indexed == []
    assert held(world) == [b"run/checkpoint-1"]
    world.rename("run", "moved")
    run(world.drain)
    assert len(indexed) == len(FILES) + 1, "all of it is known by another path now"
    guard.release(())
    run(world.drain)
    assert not any(b"checkpoint-1" in path for path in world.lower.visible())
