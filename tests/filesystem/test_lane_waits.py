"""An open that waits before its lane is taken: what others do to the file meanwhile counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.filesystem.records import Lane
from acpfs.filesystem.steps import settled
from tests.filesystem.held_call import HeldCall
from tests.filesystem.world import CALLER, World, run

MIB = 1 << 20


@pytest.mark.clause("S335")
def test_a_writer_looks_again_who_has_the_file_open_when_its_bytes_were_copied_aside(
    tmp_path: Path,
) -> None:
    """Somebody may have mapped it meanwhile, whose changes the daemon must see; and the kernel
    would end one of the two opens with EIO.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"iter_100.pt", b"x" * 4 * MIB)
        held = HeldCall(w.tier.copy)
        w.tier.copy = held  # type: ignore[assignment, method-assign]
        call = w.fs.open(ino, os.O_WRONLY, CALLER)
        try:
            copied = w.fs.steps.step(call, None)
            assert not copied.done()
            mapper = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
            assert mapper.lane is Lane.DIRECT
        finally:
            held.go_on.set()
        await settled(copied)
        with pytest.raises(StopIteration) as end:
            w.fs.steps.step(call, copied)
        assert end.value.value.lane is Lane.DIRECT
        await w.close(end.value.value)
        await w.close(mapper)

    run(tmp_path, scenario, passthrough=True)
