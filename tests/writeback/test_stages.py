"""How far an operation has come."""

from __future__ import annotations

import errno

import pytest

from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth
from tests.writeback.world import World


def test_attributes_given_after_others_that_a_dead_worker_had_given_are_stored(world: World, run: Run) -> None:
    """Found by reading: a look that failed had the operation be one that nothing was done for, and what was folded in was never given."""
    world.mkdir("d")
    run(world.drain)
    op = world.setattr("d", mode=0o700)
    assert op is not None
    with world.engine.section():
        world.log.mark_begun(op)
        world.lower.apply((b"d",), op.meta)
        world.log.mark_committed(op)
    world.restart()
    world.lower.fault = FailNth("lstat", 1, errno.EIO)
    run(world.run_for, 0.01)
    assert world.engine.statistics().retries
    world.setattr("d", mode=0o750)
    run(world.drain)
    assert world.lower.inode("d").mode & 0o777 == 0o750


def test_what_was_not_handed_over_is_in_no_doubt(world: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the table of steps: a look at moves before it failed, and from then on only carrying it out was certain."""
    world.mkdir("d")
    op = world.log.front(1)[0]
    looks = FailNth("look", 1, errno.EIO)
    monkeypatch.setattr(world.engine._committer._catching_up, "before", lambda _op: looks("look", ()))
    run(world.run_for, 0.01)
    assert (op.tries, op.begun) == (1, False)
    world.rmdir("d")
    run(world.drain)
    assert not world.lower.calls["mkdir"]
