"""What the last worker carried out and did not live to note is no native change: the next worker's
guard must know it again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.writeback.memory_lower import MemoryLower
from tests.writeback.test_random import KilledError, Mortal
from tests.writeback.world import World


def live(world: World) -> bool:
    """Whether the worker lived."""
    try:
        trio.run(world.run_for, 5.0, clock=MockClock(autojump_threshold=0))
    except BaseException as error:
        if "KilledError" not in repr(error):
            raise
        return False
    return True


@pytest.mark.parametrize("calls", range(1, 12))
@pytest.mark.parametrize("after", [False, True])
def test_a_file_written_and_moved_around_a_death_is_no_conflict(
    tmp_path: Path, calls: int, after: bool
) -> None:
    lower = MemoryLower()
    mortal = Mortal(lower)
    world = World(tmp_path, mortal)
    world.store("f", b"first")
    trio.run(world.drain, clock=MockClock(autojump_threshold=0))
    world.store("f", b"second, longer")
    world.rename("f", "g")
    mortal.calls_left = calls
    mortal.after = after
    live(world)
    world.restart()
    mortal.calls_left = -1
    world.engine.expect_foreign_changes(world.log.last_seq)
    trio.run(world.drain, clock=MockClock(autojump_threshold=0))
    assert world.engine.statistics().conflicts_total == 0
    assert lower.visible() == {b"g": b"second, longer"}


def test_the_worker_dies_where_the_test_says() -> None:
    mortal = Mortal(MemoryLower())
    mortal.calls_left = 1
    with pytest.raises(KilledError):
        mortal.mkdir((b"d",))
