"""The descriptor of a file that is removed while it is open, when the removal does not come about,
or the supervisor does not answer.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import trio

from acpfs.config import WarmReads
from acpfs.types import ROOT, HandleId, Ino
from tests.filesystem.held_call import HeldCall
from tests.filesystem.world import CALLER, World, world
from tests.rig.mounts import staging_files

pytestmark = pytest.mark.clause("S81")

OLD = b"old content"
NEW = b"the new content"
MORE = b"more"
MIB = 1 << 20
SMALL_BYTES = 3 * MIB
SIZE = 5 * MIB
"""More than such a RAM tier holds."""


class Keeper:
    """A supervisor that answers when it is let."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.lets = threading.Event()
        self.kept: dict[Ino, list[int]] = {}
        self.forgotten = threading.Event()

    def keep(self, ino: Ino, fds: list[int]) -> None:
        self.asked.set()
        assert self.lets.wait(60)
        self.kept[ino] = fds
        if not fds:
            self.forgotten.set()


async def cold_and_open(w: World) -> tuple[Ino, HandleId]:
    (w.backing / "f").write_bytes(OLD)
    ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
    return ino, (await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))).handle


async def read_new(w: World, ino: Ino) -> bytes:
    await w.write(b"f", NEW)
    await w.drained()
    with w.fs.lock:
        w.inner.eviction.evict(b"f")
    assert (w.backing / "f").read_bytes() == NEW
    return await w.read(ino)


def test_what_was_not_removed_after_all_is_read_as_it_is(tmp_path: Path) -> None:
    """Whoever removes it is killed while the supervisor is asked to keep its descriptor."""
    keeper = Keeper()

    async def scenario() -> None:
        async with world(tmp_path, warm_reads=WarmReads.OFF, patience_s=30.0) as w:
            w.fs.keep_deleted({}, keeper.keep)
            ino, handle = await cold_and_open(w)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.fs.steps.drive, w.fs.unlink(ROOT, b"f"))
                assert await trio.to_thread.run_sync(keeper.asked.wait, 60)
                nursery.cancel_scope.cancel()
            keeper.lets.set()
            assert await w.names() == [b"f"]
            assert await read_new(w, ino) == NEW
            assert await trio.to_thread.run_sync(keeper.forgotten.wait, 60)
            assert keeper.kept == {ino: []}
            await w.do(w.fs.unlink(ROOT, b"f"))
            await w.drained()
            assert await w.do(w.fs.read(handle, 0, 100)) == NEW
            await w.do(w.fs.release(handle))

    trio.run(scenario)


def test_a_supervisor_that_does_not_answer_holds_up_no_removal(tmp_path: Path) -> None:
    keeper = Keeper()

    async def scenario() -> None:
        async with world(tmp_path, warm_reads=WarmReads.OFF) as w:
            w.inner.lower_view.nameless._patience_s = 0.1  # of the supervisor, not of the storage
            w.fs.keep_deleted({}, keeper.keep)
            ino, handle = await cold_and_open(w)
            await w.do(w.fs.unlink(ROOT, b"f"))
            await w.drained()
            assert not (w.backing / "f").exists()
            assert await w.do(w.fs.read(handle, 0, 100)) == OLD
            await w.do(w.fs.release(handle))
            keeper.lets.set()
            assert await trio.to_thread.run_sync(keeper.forgotten.wait, 60)
            assert keeper.kept == {ino: []}

    trio.run(scenario)


def test_what_the_last_worker_did_not_live_to_remove_is_read_as_it_is(tmp_path: Path) -> None:
    """It died after the supervisor had the descriptor, before the name went."""
    keeper = Keeper()
    keeper.lets.set()

    async def scenario() -> None:
        async with world(tmp_path, warm_reads=WarmReads.OFF) as w:
            ino, handle = await cold_and_open(w)
            w.fs.keep_deleted({ino: os.open(w.backing / "f", os.O_RDONLY)}, keeper.keep)
            assert await trio.to_thread.run_sync(keeper.forgotten.wait, 60)
            assert await read_new(w, ino) == NEW
            await w.do(w.fs.release(handle))

    trio.run(scenario)


@pytest.mark.clause("S39")
def test_a_removal_whose_caller_is_killed_removes_nothing(tmp_path: Path) -> None:
    """It waits for the storage to open the file for those who read it: without that they lost
    it.
    """

    async def scenario() -> None:
        async with world(tmp_path, warm_reads=WarmReads.OFF) as w:
            _ino, handle = await cold_and_open(w)
            held = HeldCall(w.lower.open_read)
            w.lower.open_read = held  # type: ignore[assignment, method-assign]
            call = w.fs.unlink(ROOT, b"f")
            opened = w.fs.steps.step(call, None)
            assert await trio.to_thread.run_sync(held.began.wait, 60)
            assert opened.cancel()
            try:
                with pytest.raises(InterruptedError):
                    w.fs.steps.step(call, opened)
            finally:
                held.go_on.set()
            await w.drained()
            assert await w.names() == [b"f"]
            assert await w.do(w.fs.read(handle, 0, 100)) == OLD
            await w.do(w.fs.release(handle))

    trio.run(scenario)


@pytest.mark.clause("S39", "S507")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget_bytes", [SMALL_BYTES, 4 * SIZE])
def test_what_was_stored_from_its_staging_file_is_written_to_without_a_name(
    tmp_path: Path, late: bool, budget_bytes: int
) -> None:
    """`late`: its name goes while it is being stored, which comes first all the same."""
    data = bytearray(os.urandom(SIZE))

    async def scenario() -> None:
        async with world(tmp_path, budget_bytes=SMALL_BYTES, warm_reads=WarmReads.OFF) as w:
            opened, attributes = await w.create(b"f", flags=os.O_RDWR)
            for start in range(0, SIZE, MIB):
                await w.do(w.fs.write(opened.handle, start, bytes(data[start : start + MIB])))
            assert w.inner.table[attributes.ino].body.is_overflowed
            await w.do(w.fs.fsync(opened.handle, datasync=False))
            if late:
                held = HeldCall(w.lower.rename)
                w.lower.rename = held  # type: ignore[assignment, method-assign]
                w.engine.hold(False)
                assert await trio.to_thread.run_sync(held.began.wait, 60)
                await w.do(w.fs.unlink(ROOT, b"f"))
                held.go_on.set()
            else:
                await w.drained()
                await w.do(w.fs.unlink(ROOT, b"f"))
            await w.drained()
            assert await w.names() == []
            assert os.listdir(w.backing) == [".acpfs"]
            with w.fs.lock:
                w.tier.change_budget(budget_bytes)
            assert await w.do(w.fs.read(opened.handle, MIB, 100)) == data[MIB : MIB + 100]
            await w.do(w.fs.write(opened.handle, 10, MORE))
            data[10 : 10 + len(MORE)] = MORE
            for start in range(0, SIZE, MIB):
                assert await w.do(w.fs.read(opened.handle, start, MIB)) == data[start : start + MIB]
            await w.close(opened)
            await w.drained()
            assert os.listdir(w.backing) == [".acpfs"]
            with trio.fail_after(60):
                while staging_files(w.backing):  # noqa: ASYNC110  # a thread removes it
                    await trio.sleep(0.001)

    trio.run(scenario)
