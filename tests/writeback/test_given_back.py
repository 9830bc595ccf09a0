"""What another node writes into a checkpoint that was deleted here, and is held, belongs to the one that is made under that name again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from acpfs.backing.lower import LowerPath
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import MemoryLower, error
from tests.writeback.test_guard import guarded_world, remove, save
from tests.writeback.world import World

pytestmark = pytest.mark.clause("S141")
THEIRS = "run/checkpoint-1/rank-7.pt"


@pytest.fixture
def world(tmp_path: Path, run: Run) -> World:
    """A checkpoint that was deleted, and is held; another node has written its part of the new one already."""
    world = guarded_world(tmp_path)
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    lower(world).put(THEIRS, b"theirs")
    return world


def lower(world: World) -> MemoryLower:
    assert isinstance(world.lower, MemoryLower)
    return world.lower


def test_it_goes_to_the_new_one(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    assert lower(world).visible() == world.application_view() | {THEIRS.encode(): b"theirs"}


def test_a_tree_goes_as_it_is(world: World, run: Run) -> None:
    lower(world).mkdir((b"run", b"checkpoint-1", b"global_step1"))
    lower(world).put("run/checkpoint-1/global_step1/shard", b"s")
    save(world, "run/checkpoint-1")
    run(world.drain)
    assert lower(world).visible()[b"run/checkpoint-1/global_step1/shard"] == b"s"


def test_nothing_that_comes_at_this_very_moment_is_replaced(world: World, run: Run) -> None:
    def fault(label: str, path: LowerPath) -> None:
        if label == "link" and path[-1] == b"rank-7.pt" and b"run/checkpoint-1/" in lower(world).visible():
            lower(world).put(THEIRS, b"newer")

    lower(world).fault = fault
    save(world, "run/checkpoint-1")
    run(world.drain)
    assert lower(world).visible()[THEIRS.encode()] == b"newer"


def test_cut_off_between_link_and_unlink_it_is_there_once(world: World, run: Run) -> None:
    cut_off: list[LowerPath] = []

    def fault(label: str, path: LowerPath) -> None:
        if label == "unlink" and path[-1] == b"rank-7.pt" and not cut_off:
            cut_off.append(path)
            raise error(errno.EIO)

    lower(world).fault = fault
    save(world, "run/checkpoint-1")
    run(world.drain)
    assert cut_off
    assert lower(world).visible()[THEIRS.encode()] == b"theirs"
    assert not [path for path in lower(world).own_files() if path.endswith(b"rank-7.pt")]
