"""A file of two names, one of which was deleted and is held back by the guard: the other one is as
persisted as ever.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.types import ROOT
from tests.filesystem.world import CALLER, World, run

clause = pytest.mark.clause
BYTES = 11_694


async def hold_one_of_two_names(w: World) -> None:
    step = (await w.do(w.fs.mkdir(ROOT, b"step_1", 0o755, CALLER))).ino
    await w.write(b"mm.bin", b"m" * (2 << 20), step)
    ino = await w.write(b"a.bin", b"x" * BYTES, step)
    await w.do(w.fs.link(ino, step, b"b.bin"))
    await w.do(w.fs.unlink(step, b"a.bin"))
    await w.drained()
    assert [op.name for op in w.log.all_aside()] == [b"a.bin"]


def states(w: World) -> dict[bytes, str]:
    return {row.path: row.state for row in w.fs.files_report()}


@clause("S141", "S404")
def test_its_content_is_clean_and_may_leave(tmp_path: Path) -> None:
    """Found by attack: `flush` said persisted, its bytes counted as dirty for ever, and umount said
    that it was not persisted.
    """

    async def scenario(w: World) -> None:
        await hold_one_of_two_names(w)
        assert w.fs.statistics().content.dirty_bytes == 0
        assert states(w) == {b"step_1/b.bin": "clean", b"step_1/mm.bin": "clean"}
        with w.fs.lock, w.state.step():
            assert w.inner.contents.retention.let_leave(1 << 30, also_retained=True) > 0
        assert w.fs.statistics().content.dirty_bytes == 0

    async def again(w: World) -> None:
        """The next worker, in which the deletion is held anew."""
        await w.drained()
        assert w.log.all_aside()
        assert w.fs.statistics().content.dirty_bytes == 0

    run(tmp_path, scenario, again)


@clause("S404")
def test_it_is_written_and_persisted_under_that_name(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await hold_one_of_two_names(w)
        step = next(ino for (_parent, name), ino in w.tree if name == b"step_1")
        await w.write(b"b.bin", b"newer", step)
        assert states(w)[b"step_1/b.bin"] == "complete"
        await w.drained()
        assert states(w)[b"step_1/b.bin"] == "clean"
        assert w.fs.statistics().content.dirty_bytes == 0
        assert (w.backing / "step_1/a.bin").read_bytes() == b"x" * BYTES
        assert (w.backing / "step_1/b.bin").read_bytes() == b"newer"

    run(tmp_path, scenario)
