"""How long calls took is counted where they are made."""

import os
from pathlib import Path

import pytest
from trio.testing import wait_all_tasks_blocked

from acpfs.filesystem.durations import BOUNDS_S, Distribution
from tests.filesystem.world import CALLER, World, run
from tests.rig.runtime import REAL


def counted(w: World) -> dict[str, int]:
    return {name: sum(one.counts) for name, one in w.inner.durations.all().items()}


@pytest.mark.clause("S320")
def test_each_save_load_and_fsync_is_counted_once(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened, attributes = await w.create(b"f")
        await w.do(w.fs.write(opened.handle, 0, b"x"))
        await w.do(w.fs.fsync(opened.handle, False))
        assert counted(w)["fsync"] == 1
        await w.do(w.fs.write(opened.handle, 1, b"x"))
        await w.do(w.fs.flush(opened.handle, 1))
        assert counted(w)["file_save"] == 1
        await w.do(w.fs.flush(opened.handle, 1))  # of a copy of the descriptor
        await w.do(w.fs.release(opened.handle))
        assert (counted(w)["file_save"], counted(w)["file_load"]) == (1, 0)
        await w.drained()
        await wait_all_tasks_blocked()
        assert counted(w)["file_persist"] >= 1
        reader = await w.do(w.fs.open(attributes.ino, os.O_RDONLY, CALLER))
        assert counted(w)["file_load"] == 0
        await w.close(reader)
        assert (counted(w)["file_save"], counted(w)["file_load"]) == (1, 1)
        assert 0 <= w.inner.durations.load.sum_s < 60

    run(tmp_path, scenario)


def test_a_duration_is_counted_below_the_bound_that_it_does_not_pass() -> None:
    one = Distribution(REAL.clock)
    for seconds in (-1.0, BOUNDS_S[0], BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        one.observe(seconds)
    assert (one.counts[0], one.counts[-2], one.counts[-1]) == (2, 1, 1)
    assert one.sum_s == BOUNDS_S[0] + 2 * BOUNDS_S[-1] + 1
