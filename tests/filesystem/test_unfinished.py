"""What is being written is never published: not by a change of workers, not by its age, not because its writer was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from tests.filesystem.world import CALLER, World, world

OLD, HALF, REST = b"old and complete", b"half of", b" what is new"


def stored(w: World) -> list[bytes]:
    """Names of the files that the log would store."""
    return [op.name for op in w.log if op.version is not None]


@pytest.mark.clause("S6", "S7", "S12", "S81")
def test_a_change_of_workers_publishes_nothing_that_is_being_written(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, session="s") as w:
            new, _attributes = await w.create(b"new")
            ino = await w.write(b"rewritten", OLD)
            await w.drained()
            w.engine.hold(True)
            again = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
            await w.do(w.fs.write(new.handle, 0, HALF))
            await w.do(w.fs.write(again.handle, 0, HALF))
        async with world(tmp_path, session="s") as w:
            with w.fs.lock:
                assert w.fs.freeze_old() == 0, "their age is not that of the machine"
            assert stored(w) == []
            for opened in (new, again):
                await w.do(w.fs.write(opened.handle, len(HALF), REST))
                await w.close(opened)
            await w.drained()
            assert (w.backing / "new").read_bytes() == (w.backing / "rewritten").read_bytes() == HALF + REST

    trio.run(main)
