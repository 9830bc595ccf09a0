"""What statfs tells as free: what is in RAM alone has been taken already."""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import SpaceInfo
from tests.filesystem.world import World, run

pytestmark = pytest.mark.clause("S433")

MIB = 1 << 20
FREE_BLOCKS = 2560
"""Of 4 KiB: 10 MiB."""


class Disk(BackingDirectory):
    """Has as much room as is said, whatever others write to its disk."""

    def space(self) -> SpaceInfo:
        return SpaceInfo(4096, 1 << 20, FREE_BLOCKS, FREE_BLOCKS, 1000, 900, 255)


async def free_bytes(w: World) -> int:
    space = await w.do(w.fs.statfs())
    assert space.blocks_free == space.blocks_available
    return space.blocks_available * space.block_bytes


def test_what_the_backing_directory_has_not_got_yet_is_not_free(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        assert await free_bytes(w) == 10 * MIB
        await w.write(b"closed", b"x" * 2 * MIB)
        assert await free_bytes(w) == 8 * MIB
        opened, _attributes = await w.create(b"open")
        await w.do(w.fs.write(opened.handle, 0, b"x" * 3 * MIB))
        assert await free_bytes(w) == 5 * MIB
        await w.do(w.fs.fsync(opened.handle, False))
        assert await free_bytes(w) == 5 * MIB, "counted once"
        await w.drained()
        assert await free_bytes(w) == 10 * MIB, "what is there has been taken from what is told"
        await w.close(opened)
        await w.write(b"too much", b"x" * 11 * MIB)
        assert await free_bytes(w) == 0
        assert (await w.do(w.fs.statfs())).blocks == 1 << 20

    run(tmp_path, scenario, make_lower=Disk)


def test_so_it_is_for_the_next_worker(tmp_path: Path) -> None:
    async def writes(w: World) -> None:
        await w.write(b"closed", b"x" * 2 * MIB)

    async def finds(w: World) -> None:
        assert await free_bytes(w) == 8 * MIB

    run(tmp_path, writes, finds, make_lower=Disk)
