"""Deletions of checkpoints while something else is parked: which of them wait."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.writeback.conftest import Run
from tests.writeback.memory_lower import error
from tests.writeback.test_guard import guarded_world, released, remove, save, whole
from tests.writeback.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return guarded_world(tmp_path)


def refuse(world: World, name: bytes) -> None:
    def fault(label: str, path: tuple[bytes, ...]) -> None:
        if label == "rename" and path[-1] == name:
            raise PermissionError(errno.EACCES, "refused")

    world.lower.fault = fault


@pytest.mark.clause("S241")
def test_what_is_parked_elsewhere_does_not_keep_what_a_newer_checkpoint_has_replaced(
    world: World, run: Run
) -> None:
    world.mkdir("theirs")
    save(world, "run/checkpoint-1")
    world.store("run/scratch", b"0")
    run(world.drain)
    refuse(world, b"bad")
    world.store("theirs/bad", b"1")
    save(world, "run/checkpoint-2")
    remove(world, "run/checkpoint-1")
    world.unlink("run/scratch")
    run(world.run_for, 100.0)
    seen = world.lower.visible()
    assert whole(seen, "run/checkpoint-2")
    assert not any(path.startswith(b"run/checkpoint-1") for path in seen)
    assert b"run/scratch" in seen  # nothing says what replaces it
    assert released(world) == {"newer": 1}
    world.lower.fault = lambda _label, _path: None
    world.engine.retry()
    run(world.drain)
    run(world.run_for, 100.0)  # what the guard has is not waited for
    assert world.lower.visible() == world.application_view()


@pytest.mark.clause("S241")
@pytest.mark.parametrize("refused", ["run/latest", "run/checkpoint-2/config.json", "latest"])
def test_what_is_parked_and_may_name_or_replace_a_checkpoint_keeps_it(
    world: World, run: Run, refused: str
) -> None:
    save(world, "run/checkpoint-1")
    world.store("run/latest", b"checkpoint-1")
    run(world.drain)
    refuse(world, refused.encode().rpartition(b"/")[2])
    if not refused.endswith(".json"):
        world.store(refused, b"checkpoint-2")
    save(world, "run/checkpoint-2")
    remove(world, "run/checkpoint-1")
    run(world.run_for, 100.0)
    assert whole(world.lower.visible(), "run/checkpoint-1")
    world.lower.fault = lambda _label, _path: None
    world.engine.retry()
    run(world.drain)
    run(world.run_for, 100.0)  # what the guard has is not waited for
    assert world.lower.visible() == world.application_view()


@pytest.mark.clause("S241")
def test_a_next_worker_has_it_wait_or_finds_the_same_again(tmp_path: Path, run: Run) -> None:
    """It dies after the guard let go, before anything was deleted: the storage refuses that for a
    while.
    """
    world = guarded_world(tmp_path)
    world.mkdir("theirs")
    save(world, "run/checkpoint-1")
    run(world.drain)

    def fault(label: str, path: tuple[bytes, ...]) -> None:
        if label == "unlink" and path[0] == b"run":
            raise error(errno.EIO)
        if label == "rename" and path[-1] == b"bad":
            raise PermissionError(errno.EACCES, "refused")

    world.lower.fault = fault
    world.store("theirs/bad", b"1")
    save(world, "run/checkpoint-2")
    remove(world, "run/checkpoint-1")
    run(world.run_for, 100.0)
    assert whole(world.lower.visible(), "run/checkpoint-1")
    world.restart()
    run(world.run_for, 100.0)
    assert whole(world.lower.visible(), "run/checkpoint-1")
    world.lower.fault = lambda _label, _path: None
    world.engine.retry()
    run(world.drain)
    run(world.run_for, 100.0)  # what the guard has is not waited for
    assert world.lower.visible() == world.application_view()
