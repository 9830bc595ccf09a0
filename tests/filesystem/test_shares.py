"""A share of RAM for the files of one owner (`ram_per_user`): who has used it up waits, and nobody
waits for him.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from acpfs.config import WhenFull
from acpfs.filesystem.records import AttributeChange, Caller, Lane, OpenFile
from acpfs.ram.shares import OwnerReport
from acpfs.types import ROOT
from tests.filesystem.test_hold import Kernel, tick
from tests.filesystem.test_overflow import MIB, block
from tests.filesystem.test_room import Call
from tests.filesystem.world import CALLER, World, run, world

ANN = 1001
BOB = 1002
SHARE = 2 * MIB


async def opened(w: World, name: bytes, uid: int, flags: int = os.O_WRONLY) -> OpenFile:
    caller = Caller(uid=uid, gid=0, pid=uid)
    file, _attributes = await w.do(w.fs.create(ROOT, name, 0o644, flags, caller))
    return file


async def save(w: World, name: bytes, uid: int, data: bytes) -> None:
    file = await opened(w, name, uid)
    await w.do(w.fs.write(file.handle, 0, data))
    await w.close(file)


def owners(w: World) -> dict[int, int]:
    """User → dirty bytes."""
    with w.fs.lock:
        return {one.uid: one.taken_bytes for one in w.inner.room.owners() if one.taken_bytes}


@pytest.mark.clause("S571")
def test_who_has_used_up_his_share_waits_and_nobody_waits_for_him(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await save(w, b"a1", ANN, block(1) * 2)
        a2 = await opened(w, b"a2", ANN)
        waits = Call(w, a2, block(2))
        assert waits.result is None
        (waiting,) = w.fs.statistics().waiting
        assert waiting.reason == (
            "user 1001 has 2 MiB of RAM, and his share is 2 MiB (ram_per_user): 1 MiB too much"
        )
        await save(w, b"b1", BOB, block(3) * 2)
        await save(w, b"b2", 0, block(3) * 2)
        assert waits.result is None
        with w.fs.lock:
            assert w.inner.room.owners()[:2] == (
                OwnerReport(0, 2 * MIB, 0, 0),
                OwnerReport(ANN, 2 * MIB, 0, 1),
            )
        await w.drained()
        assert await waits.done() == MIB
        await w.close(a2)
        await w.drained()
        assert (w.backing / "a2").read_bytes() == block(2)
        assert owners(w) == {}
        assert w.tier.reserved_bytes == 0

    run(tmp_path, scenario, budget_bytes=16 * MIB, ram_per_user=SHARE)


@pytest.mark.clause("S571")
def test_a_share_is_a_part_of_the_budget_and_goes_with_it(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await save(w, b"a1", ANN, block(1) * 4)
        waits = Call(w, await opened(w, b"a2", ANN), block(2))
        assert waits.result is None
        with w.fs.lock:
            w.tier.change_budget(32 * MIB)
        assert await waits.done() == MIB

    run(tmp_path, scenario, budget_bytes=16 * MIB, ram_per_user="25%")


@pytest.mark.clause("S571")
@pytest.mark.parametrize("wanted", [0, 8 * MIB])
def test_another_share_holds_for_those_who_wait_already(tmp_path: Path, wanted: int) -> None:
    async def scenario(w: World) -> None:
        await save(w, b"a1", ANN, block(1) * 2)
        waits = Call(w, await opened(w, b"a2", ANN), block(2))
        assert waits.result is None
        with w.fs.lock:
            w.inner.charges.change(wanted)
            w.tier.room_changed()
        assert await waits.done() == MIB
        with w.fs.lock:
            w.inner.charges.change(SHARE)
        assert owners(w) == {ANN: 3 * MIB}
        await w.drained()

    run(tmp_path, scenario, budget_bytes=16 * MIB, ram_per_user=SHARE)


@pytest.mark.clause("S571")
@pytest.mark.parametrize("policy", [WhenFull.ERROR, WhenFull.NATIVE])
def test_what_happens_is_what_when_full_says(tmp_path: Path, policy: WhenFull) -> None:
    async def scenario(w: World) -> None:
        await save(w, b"a1", ANN, block(1) * 2)
        a2 = await opened(w, b"a2", ANN)
        said = await Call(w, a2, block(2)).done()
        if policy is WhenFull.NATIVE:
            assert said == MIB
            assert w.fs.statistics().overflowed_files == 1
            await w.close(a2)
        else:
            assert isinstance(said, OSError)
            assert said.errno == errno.ENOSPC
            with pytest.raises(OSError, match="No space left"):
                await w.do(w.fs.flush(a2.handle))
            await w.do(w.fs.release(a2.handle))
        await save(w, b"b", BOB, block(3) * 2)
        await w.drained()
        assert (w.backing / "b").read_bytes() == block(3) * 2
        assert (w.backing / "a2").exists() is (policy is WhenFull.NATIVE)

    run(tmp_path, scenario, budget_bytes=16 * MIB, ram_per_user=SHARE, when_full=policy)


@pytest.mark.clause("S571")
def test_a_file_larger_than_the_share_goes_on_in_the_storage(tmp_path: Path) -> None:
    """To wait for the own file's end would be to wait for ever."""

    async def scenario(w: World) -> None:
        a = await opened(w, b"a", ANN)
        for number in range(4):
            assert await Call(w, a, block(number), number * MIB).done() == MIB
        await w.close(a)
        await w.drained()
        assert (w.backing / "a").read_bytes() == b"".join(map(block, range(4)))

    run(tmp_path, scenario, budget_bytes=16 * MIB, ram_per_user=SHARE)


@pytest.mark.clause("S572")
def test_what_the_storage_has_is_nobodys_until_it_is_changed(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await save(w, b"a1", ANN, block(1) * 2)
        await w.drained()
        assert owners(w) == {}
        w.engine.hold(True)
        await save(w, b"a2", ANN, block(2))
        a1 = await opened(w, b"a1", ANN)
        waits = Call(w, a1, b"x", 5)  # a byte, and all of the file is his again
        assert waits.result is None
        await w.drained()
        assert await waits.done() == 1
        assert owners(w) == {ANN: 2 * MIB}
        await w.close(a1)
        await w.drained()
        assert (w.backing / "a1").read_bytes()[:7] == b"\1\1\1\1\1x\1"

    run(tmp_path, scenario, budget_bytes=16 * MIB, ram_per_user=SHARE)


@pytest.mark.clause("S572")
def test_a_chown_moves_what_is_charged(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await save(w, b"a1", ANN, block(1) * 2)
        waits = Call(w, await opened(w, b"a2", ANN), block(2))
        assert waits.result is None
        found = await w.do(w.fs.lookup(ROOT, b"a1"))
        await w.do(w.fs.setattr(found.ino, AttributeChange(uid=BOB), None, CALLER))
        with w.fs.lock:
            w.inner.room.look_again()
        assert await waits.done() == MIB
        assert owners(w) == {ANN: MIB, BOB: 2 * MIB}
        await w.drained()

    run(tmp_path, scenario, budget_bytes=16 * MIB, ram_per_user=SHARE)


@pytest.mark.clause("S572")
def test_a_deleted_file_is_charged_as_long_as_it_takes_ram(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        a = await opened(w, b"a", ANN)
        await w.do(w.fs.write(a.handle, 0, block(1) * 2))
        await w.do(w.fs.unlink(ROOT, b"a"))
        assert owners(w) == {ANN: 2 * MIB}
        # only its writer's own close makes room: that is not waited for
        a2 = await opened(w, b"a2", ANN)
        assert await Call(w, a2, block(2)).done() == MIB
        assert w.fs.statistics().overflowed_files == 1
        await w.close(a)
        assert owners(w) == {}
        await w.close(a2)
        await w.drained()

    run(tmp_path, scenario, budget_bytes=16 * MIB, ram_per_user=SHARE)


@pytest.mark.clause("S572")
def test_the_next_worker_finds_the_same_charges(tmp_path: Path) -> None:
    found = []

    async def first(w: World) -> None:
        await save(w, b"a1", ANN, block(1))
        await save(w, b"a2", ANN, block(2))
        await save(w, b"b1", BOB, block(3))
        await w.do(w.fs.rename(ROOT, b"a2", ROOT, b"a3", 0))
        found.append(owners(w))

    async def second(w: World) -> None:
        found.append(owners(w))
        waits = Call(w, await opened(w, b"a4", ANN), block(2))
        assert waits.result is None
        await w.drained()
        assert await waits.done() == MIB

    run(tmp_path, first, second, budget_bytes=16 * MIB, ram_per_user=SHARE)
    assert found == [{ANN: 2 * MIB, BOB: MIB}] * 2


def in_passthrough(
    tmp_path: Path, scenario: Callable[[World, Kernel], Awaitable[None]], share: int
) -> None:
    async def main() -> None:
        async with world(
            tmp_path, budget_bytes=256 * MIB, unknown_bytes=0, ram_per_user=share
        ) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            await scenario(w, Kernel(w))
            await w.drained()

    trio.run(main)


@pytest.mark.clause("S573")
def test_a_passthrough_writer_over_his_share_is_held_and_others_are_not(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        await save(w, b"before", ANN, b"x" * 12 * MIB)
        a = await opened(w, b"a", ANN)
        b = await opened(w, b"b", BOB)
        assert {a.lane, b.lane} == {Lane.PASSTHROUGH}
        of_a = (await w.do(w.fs.lookup(ROOT, b"a"))).ino
        of_b = (await w.do(w.fs.lookup(ROOT, b"b"))).ino
        os.pwrite(a.backing_fd, b"a" * 19 * MIB, 0)
        os.pwrite(b.backing_fd, b"b" * 18 * MIB, 0)
        tick(w)
        assert (kernel.is_held(of_a), kernel.is_held(of_b)) == (True, False)
        (held,) = w.fs.statistics().held
        assert held.reason.startswith("user 1001 has 31 MiB of RAM, and his share is 32 MiB")
        assert owners(w) == {ANN: 31 * MIB, BOB: 18 * MIB}
        await w.drained()
        tick(w)
        assert not kernel.is_held(of_a)
        await w.close(a)
        await w.close(b)
        await w.drained()
        assert (w.backing / "a").read_bytes() == b"a" * 19 * MIB

    in_passthrough(tmp_path, scenario, 32 * MIB)


@pytest.mark.clause("S573")
def test_who_has_no_room_in_his_share_does_not_get_the_kernels_lane(tmp_path: Path) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        await save(w, b"before", ANN, b"x" * 20 * MIB)
        a = await opened(w, b"a", ANN)
        b = await opened(w, b"b", BOB)
        assert (a.lane, b.lane) == (Lane.DIRECT, Lane.PASSTHROUGH)
        assert "its owner's share of RAM is used up" in w.fs.statistics().lane_choices
        await w.close(a)
        await w.close(b)

    in_passthrough(tmp_path, scenario, 32 * MIB)
