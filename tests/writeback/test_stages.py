"""How far an operation has come."""

from __future__ import annotations

import errno

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
