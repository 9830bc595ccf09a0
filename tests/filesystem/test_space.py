"""What statfs tells as free: what is in RAM alone has been taken already."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import SpaceInfo
from acpfs.types import ROOT
from tests.filesystem.world import World, run
from tests.rig.runtime import runtime_of

pytestmark = pytest.mark.clause("S433")

MIB = 1 << 20
FREE_BLOCKS = 2560
"""Of 4 KiB: 10 MiB."""


class Disk(BackingDirectory):
    """Has as much room as is said, whatever others write to its disk."""

    blocks = FREE_BLOCKS
    asked = 0
    hangs: threading.Event | None = None

    def space(self) -> SpaceInfo:
        self.asked += 1
        if self.hangs is not None:
            self.hangs.wait()
        return SpaceInfo(4096, 1 << 20, self.blocks, self.blocks, 1000, 900, 255)


def disk(w: World) -> Disk:
    assert isinstance(w.lower, Disk)
    return w.lower


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
        assert await free_bytes(w) == 5 * MIB, "its answer is of before"
        await w.at_rest()
        now[0] += 10
        assert await free_bytes(w) == 10 * MIB, "what is there has been taken from what is told"
        await w.close(opened)
        await w.write(b"too much", b"x" * 11 * MIB)
        assert await free_bytes(w) == 0
        assert (await w.do(w.fs.statfs())).blocks == 1 << 20

    now = [1.0]
    run(tmp_path, scenario, make_lower=Disk, runtime=runtime_of(lambda: now[0]))


def test_so_it_is_for_the_next_worker(tmp_path: Path) -> None:
    async def writes(w: World) -> None:
        await w.write(b"closed", b"x" * 2 * MIB)

    async def finds(w: World) -> None:
        assert await free_bytes(w) == 8 * MIB

    run(tmp_path, writes, finds, make_lower=Disk)


@pytest.mark.clause("S43")
def test_what_has_just_arrived_there_is_not_free_again(tmp_path: Path) -> None:
    """Who saves, waits until it is safe, and looks before the next save."""

    async def scenario(w: World) -> None:
        await w.write(b"a save", b"x" * 2 * MIB)
        assert await free_bytes(w) == 8 * MIB
        await w.drained()
        disk(w).blocks -= 512
        asked = disk(w).asked
        assert await free_bytes(w) == 8 * MIB
        assert await free_bytes(w) == 8 * MIB
        assert disk(w).asked == asked, "many that look while it drains do not ask it each"
        await w.at_rest()
        now[0] += 10
        assert await free_bytes(w) == 8 * MIB
        assert disk(w).asked == asked + 1

    now = [1.0]
    run(tmp_path, scenario, make_lower=Disk, runtime=runtime_of(lambda: now[0]))


def test_what_was_deleted_before_it_arrived_is_free_at_once(tmp_path: Path) -> None:
    """Who makes room for a save by an old one that is not stored yet."""

    async def scenario(w: World) -> None:
        w.engine.hold(True)
        await w.write(b"an old save", b"x" * 2 * MIB)
        assert await free_bytes(w) == 8 * MIB
        await w.do(w.fs.unlink(ROOT, b"an old save"))
        w.engine.hold(False)
        await w.drained()
        assert await free_bytes(w) == 10 * MIB

    run(tmp_path, scenario, make_lower=Disk, runtime=runtime_of(lambda: 1.0))


@pytest.mark.clause("S43")
def test_what_was_heard_long_ago_is_asked_for_anew(tmp_path: Path) -> None:
    """Who looks once in half an hour is not told what others had left half an hour ago."""
    now = [1.0]

    async def scenario(w: World) -> None:
        assert await free_bytes(w) == 10 * MIB
        disk(w).blocks = 256
        assert await free_bytes(w) == 10 * MIB
        await w.at_rest()
        now[0] += 1800
        assert await free_bytes(w) == MIB

    run(tmp_path, scenario, make_lower=Disk, runtime=runtime_of(lambda: now[0]))


@pytest.mark.clause("S43")
def test_a_storage_that_hangs_is_asked_once_and_what_was_heard_is_told(tmp_path: Path) -> None:
    now = [1.0]

    async def scenario(w: World) -> None:
        asked = disk(w).asked
        hangs = threading.Event()
        disk(w).hangs = hangs
        disk(w).blocks = 256
        await w.at_rest()
        now[0] += 1800
        try:
            assert await free_bytes(w) == 10 * MIB
            assert await free_bytes(w) == 10 * MIB
            assert disk(w).asked == asked + 1
        finally:
            hangs.set()
        while await free_bytes(w) != MIB:  # as soon as the late answer has come
            assert disk(w).asked <= asked + 2

    run(
        tmp_path,
        scenario,
        make_lower=Disk,
        runtime=runtime_of(lambda: now[0]),
        patience_s=1.0,  # a thread that has the time asks meanwhile
    )


@pytest.mark.clause("S43")
@pytest.mark.parametrize("error", [OSError(5, "input/output error"), TimeoutError()])
def test_a_storage_that_does_not_say_leaves_what_was_heard(
    tmp_path: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1.0]

    def fails(_self: Disk) -> SpaceInfo:
        raise error

    async def scenario(w: World) -> None:
        with monkeypatch.context() as changed:
            changed.setattr(Disk, "space", fails)
            await w.at_rest()
            now[0] += 1800
            assert await free_bytes(w) == 10 * MIB
        disk(w).blocks = 256
        assert await free_bytes(w) == MIB

    run(tmp_path, scenario, make_lower=Disk, runtime=runtime_of(lambda: now[0]))


@pytest.mark.clause("S43")
def test_saves_that_replace_each_other_use_up_nothing_where_the_storage_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statfs fails for hours, and the rest of it works: each save is as large as the one that
    goes.
    """
    now = [1.0]

    def fails(_self: Disk) -> SpaceInfo:
        raise OSError(5, "input/output error")

    async def scenario(w: World) -> None:
        assert await free_bytes(w) == 10 * MIB
        monkeypatch.setattr(Disk, "space", fails)
        await w.at_rest()
        now[0] += 10
        for left in (6, 2, 0):
            await w.write(b"save", b"x" * 4 * MIB)
            await w.drained()
            assert await free_bytes(w) == left * MIB
        assert await free_bytes(w) == 0, "it may be as full as that"
        await w.at_rest()
        now[0] += 300
        assert await free_bytes(w) == 10 * MIB
        w.engine.hold(True)
        await w.write(b"save", b"y" * 4 * MIB)
        assert await free_bytes(w) == 6 * MIB, "what it has not got yet is taken off"
        await w.drained()
        assert await free_bytes(w) == 10 * MIB

    run(tmp_path, scenario, make_lower=Disk, runtime=runtime_of(lambda: now[0]))
