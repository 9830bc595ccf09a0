"""Writers that wait for room: who they are, whose turn it is, what ends their waiting, and what
they leave when they are killed.
"""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing import filling
from acpfs.config import WhenFull
from acpfs.filesystem.content import overflow
from acpfs.filesystem.records import AttributeChange, Caller, OpenFile
from acpfs.filesystem.steps import settled
from acpfs.types import ROOT
from tests.filesystem.test_overflow import BUDGET, MIB, block
from tests.filesystem.world import CALLER, World, run, world

ZERO_RANGE = 0x11
PUNCH_HOLE = 0x03
"""Both with FALLOC_FL_KEEP_SIZE."""


async def writer(w: World, name: bytes, pid: int) -> OpenFile:
    opened, _attributes = await w.do(
        w.fs.create(ROOT, name, 0o644, os.O_WRONLY, Caller(uid=0, gid=0, pid=pid))
    )
    return opened


async def full(w: World) -> None:
    """RAM full of what the engine, which is held, does not drain."""
    await w.write(b"before", block(1) * 2)
    await w.write(b"more", block(2) * 2)


class Call:
    """A write that waits; driven by hand, as a transport does it."""

    def __init__(self, w: World, opened: OpenFile, data: bytes, offset: int = 0) -> None:
        self._w = w
        self._call = w.fs.write(opened.handle, offset, data)
        self.future: Future[Any] | None = None
        self.result: int | OSError | None = None
        self.go_on()

    def go_on(self) -> None:
        """Another step, and further ones as long as nothing is to be waited for."""
        try:
            while self.future is None or self.future.done():
                self.future = self._w.fs.steps.step(self._call, self.future)
        except StopIteration as stop:
            self.result = stop.value
        except OSError as error:
            self.result = error

    def kill(self) -> None:
        """Its process gets a deadly signal."""
        assert self.future is not None
        if not self.future.cancel():
            self.future = Future()
            self.future.cancel()
        self.go_on()

    async def done(self) -> int | OSError:
        while self.result is None:
            assert self.future is not None
            with trio.fail_after(60):
                await trio.to_thread.run_sync(self.future.exception, abandon_on_cancel=True)
            self.go_on()
        return self.result


@pytest.mark.clause("S133")
def test_everybody_who_waits_is_named(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await full(w)
        first = Call(w, await writer(w, b"first", 4711), block(3))
        second = Call(w, await writer(w, b"second", 4712), block(4)[: MIB // 2])
        waiting = w.fs.statistics().waiting
        assert [(one.path, one.pid, one.wanted_bytes, one.purpose) for one in waiting] == [
            (b"first", 4711, MIB, "write"),
            (b"second", 4712, MIB // 2, "write"),
        ]
        assert {one.reason for one in waiting} == {"RAM is full"}
        with w.fs.lock:
            w.tier.change_budget(MIB)
        assert "lowered" in w.fs.statistics().waiting[0].reason
        with w.fs.lock:
            w.tier.change_budget(BUDGET)
        await w.drained()
        assert [await first.done(), await second.done()] == [MIB, MIB // 2]
        assert w.fs.statistics().waiting == ()

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S133")
def test_another_policy_holds_for_those_who_wait_already(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await full(w)
        a = await writer(w, b"a", 1)
        b = await writer(w, b"b", 2)
        first = Call(w, a, block(3))
        with w.fs.lock:
            w.fs.change_when_full(WhenFull.NATIVE)
        assert await first.done() == MIB
        assert w.fs.statistics().overflowed_files == 1
        with w.fs.lock:
            w.fs.change_when_full(WhenFull.WAIT)
        second = Call(w, b, block(4))
        assert len(w.fs.statistics().waiting) == 1
        with w.fs.lock:
            w.fs.change_when_full(WhenFull.ERROR)
        refused = await second.done()
        assert isinstance(refused, OSError)
        assert refused.errno == errno.ENOSPC
        await w.close(a)
        with pytest.raises(OSError, match="No space left"):
            await w.do(w.fs.flush(b.handle))
        await w.do(w.fs.release(b.handle))
        await w.drained()
        assert (w.backing / "a").read_bytes() == block(3)
        assert not (w.backing / "b").exists()
        assert w.fs.statistics().interrupted_files == 1
        with w.fs.lock:
            assert w.inner.interrupted.discard(b"b") == (1, [])
        assert await w.names() == [b"a", b"before", b"more"]
        assert w.tier.reserved_bytes == 0

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S53")
def test_what_is_parked_is_not_waited_for(tmp_path: Path) -> None:
    """RAM is full of what the backing directory refused, and of files that are not complete: the
    writer goes on there.
    """

    async def scenario(w: World) -> None:
        await full(w)
        opened = await writer(w, b"shard", 1)
        call = Call(w, opened, block(3))
        assert len(w.fs.statistics().waiting) == 1
        with w.fs.lock:
            for op in w.log:
                op.last_error = errno.EACCES
                w.log.park(op)
            w.fs.look_after_waiting()
        assert await call.done() == MIB
        assert w.fs.statistics().overflowed_files == 1
        await w.close(opened)
        w.engine.retry()
        await w.drained()
        assert (w.backing / "shard").read_bytes() == block(3)
        assert (w.backing / "before").read_bytes() == block(1) * 2

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S132")
def test_a_writer_that_is_killed_while_it_waits_gives_its_turn_away_and_keeps_what_it_wrote(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"before", block(1) * 2)
        opened = await writer(w, b"killed", 1)
        assert await w.do(w.fs.write(opened.handle, 0, block(3))) == MIB
        large = Call(w, opened, block(4) * 2, MIB)
        small = Call(w, await writer(w, b"small", 2), block(5))
        assert len(w.fs.statistics().waiting) == 2
        large.kill()
        assert isinstance(large.result, InterruptedError)
        assert await small.done() == MIB
        assert (w.tier.reserved_bytes, w.fs.statistics().overflowed_files) == (0, 0)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "killed").read_bytes() == block(3)

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S132")
def test_room_that_comes_for_somebody_who_was_killed_just_then_is_not_lost(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await full(w)
        call = Call(w, await writer(w, b"killed", 1), block(3))
        assert call.future is not None
        await w.drained()
        await trio.to_thread.run_sync(call.future.exception)
        assert w.tier.reserved_bytes == MIB
        gone: Future[Any] = Future()
        gone.cancel()
        call.future = gone
        call.go_on()
        assert isinstance(call.result, InterruptedError)
        assert w.tier.reserved_bytes == 0

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S132")
def test_a_writer_that_is_killed_while_it_waits_for_another_s_copy_leaves_the_others_alone(
    tmp_path: Path,
) -> None:
    """All three wait for one thing.

    Who died used to take it away: EINTR for the living, and EIO for the one that made the copy.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"shared", block(1) * 2)
        await w.write(b"more", block(2) * 2)
        files = [await w.do(w.fs.open(ino, os.O_WRONLY, CALLER)) for _ in range(3)]
        copies = Call(w, files[0], b"copies")
        assert [one.purpose for one in w.fs.statistics().waiting] == ["copy aside"]
        dying = Call(w, files[1], b"dying", 10)
        living = Call(w, files[2], b"living", 20)
        dying.kill()
        assert isinstance(dying.result, InterruptedError)
        await w.drained()
        assert (await copies.done(), await living.done()) == (6, 6)
        for file in files:
            await w.close(file)
        await w.drained()
        assert (w.backing / "shared").read_bytes()[:30] == b"copies" + block(1)[
            :14
        ] + b"living" + block(1)[:4]

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S132", "S53")
def test_a_writer_that_is_killed_while_its_file_moves_out_of_ram_leaves_no_copy_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        create, remove, begun, goes_on, removed = (
            w.lower.create_staging,
            w.lower.remove_staging,
            *(threading.Event() for _ in range(3)),
        )

        def slowly(name: str) -> int:
            begun.set()
            goes_on.wait(60)
            return create(name)

        def noticed(name: str) -> None:
            remove(name)
            removed.set()

        monkeypatch.setattr(w.lower, "create_staging", slowly)
        monkeypatch.setattr(w.lower, "remove_staging", noticed)
        call = Call(w, await writer(w, b"killed", 1), block(3) * 5)
        assert await trio.to_thread.run_sync(begun.wait, 60)
        call.future = Future()
        call.kill()
        assert isinstance(call.result, InterruptedError)
        goes_on.set()
        assert await trio.to_thread.run_sync(removed.wait, 120)
        assert w.lower.list_staging() == []
        with w.fs.lock:
            assert w.inner.changes.staging_in_use() == set()

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S131")
def test_bytes_that_a_hung_copy_still_reads_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        write_all = filling.write_all
        begun = threading.Event()
        goes_on = threading.Event()

        def slowly(fd: int, data: bytes | memoryview, offset: int) -> int:
            begun.set()
            goes_on.wait(60)
            return write_all(fd, data, offset)

        monkeypatch.setattr(overflow, "write_all", slowly)
        opened = await writer(w, b"killed", 1)
        await w.do(w.fs.write(opened.handle, 0, block(3) * 2))
        call = Call(w, opened, block(3) * 3, 2 * MIB)
        assert await trio.to_thread.run_sync(begun.wait, 60)
        call.future = Future()
        call.kill()
        await w.do(w.fs.unlink(ROOT, b"killed"))
        await w.close(opened)
        await w.drained()
        assert w.tier.statistics().leaving_bytes == w.tier.used_bytes == 2 * MIB
        goes_on.set()
        await until_unused(w)

    run(tmp_path, scenario, budget_bytes=BUDGET)


async def until_unused(w: World) -> None:
    """Somebody else's room, when the last byte is free."""
    with w.fs.lock:
        room = w.tier.reserve(BUDGET)
    with trio.fail_after(60):
        await settled(room)
    assert w.tier.used_bytes == 0
    with w.fs.lock:
        w.tier.release(BUDGET)


@pytest.mark.clause("S131")
def test_an_allocation_that_fails_gives_its_room_back(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened = await writer(w, b"shard", 1)
        await w.do(w.fs.write(opened.handle, 0, block(3) * 3))
        await w.do(w.fs.fsync(opened.handle, datasync=False))
        with pytest.raises(
            OSError, match="No space"
        ):  # there is room for what is allocated, but not for a copy of what was fixed
            await w.do(w.fs.fallocate(opened.handle, ZERO_RANGE, 0, MIB))
        assert w.tier.reserved_bytes == 0

    run(tmp_path, scenario, budget_bytes=BUDGET, when_full="error")


@pytest.mark.clause("S53")
def test_a_hole_can_be_made_where_ram_is_full(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened = await writer(w, b"shard", 1)
        await w.do(w.fs.write(opened.handle, 0, block(3) * 4))
        await w.do(w.fs.fallocate(opened.handle, PUNCH_HOLE, 0, 4 * MIB))
        assert (w.tier.used_bytes, w.tier.reserved_bytes) == (0, 0)

    run(tmp_path, scenario, budget_bytes=BUDGET)


async def vain_write(w: World) -> OpenFile:
    """A synced file is open, and to change it fails, as RAM has no room for a copy of what was
    synced.
    """
    opened = await writer(w, b"shard", 1)
    await w.do(w.fs.write(opened.handle, 0, block(3) * 3))
    await w.do(w.fs.fsync(opened.handle, datasync=False))
    with pytest.raises(OSError, match="No space left"):
        await w.do(w.fs.write(opened.handle, 0, b"no"))
    return opened


async def cut_is_stored(w: World) -> None:
    ino = (await w.do(w.fs.lookup(ROOT, b"shard"))).ino
    await w.do(w.fs.setattr(ino, AttributeChange(size=MIB), None, CALLER))
    assert w.fs.statistics().interrupted_files == 0
    await w.drained()
    assert (w.backing / "shard").read_bytes() == block(3)


@pytest.mark.clause("S560")
def test_a_write_that_failed_and_changed_nothing_leaves_no_half(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened = await vain_write(w)
        with pytest.raises(OSError, match="No space left"):
            await w.do(w.fs.flush(opened.handle))
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        await cut_is_stored(w)

    run(tmp_path, scenario, budget_bytes=BUDGET, when_full="error")


@pytest.mark.clause("S560")
def test_nor_does_it_where_the_worker_dies_before_the_close(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, when_full="error") as w:
            await vain_write(w)
        async with world(tmp_path, budget_bytes=BUDGET, when_full="error") as w:
            await w.drained()
            await cut_is_stored(w)

    trio.run(main)


@pytest.mark.clause("S53")
def test_a_file_of_which_a_write_failed_is_not_published_by_the_next_worker_either(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, when_full="error") as w:
            await full(w)
            closed = await writer(w, b"closed", 1)
            still_open = await writer(w, b"open", 2)
            for opened in (closed, still_open):
                with pytest.raises(OSError, match="No space left"):
                    await w.do(w.fs.write(opened.handle, 0, block(3)))
            with pytest.raises(OSError, match="No space left"):
                await w.do(w.fs.flush(closed.handle))
            await w.do(w.fs.release(closed.handle))
        async with world(tmp_path, budget_bytes=BUDGET, when_full="error") as w:
            await w.drained()
            assert sorted(path.name for path in w.backing.iterdir()) == [".acpfs", "before", "more"]
            assert w.fs.statistics().interrupted_files == 2
            assert await w.write(b"closed", block(4))  # written anew, it is whole
            with w.fs.lock:
                assert w.inner.interrupted.store(b"open") == 1
            await w.drained()
            assert (w.backing / "closed").read_bytes() == block(4)
            assert (w.backing / "open").read_bytes() == b""

    trio.run(main)


@pytest.mark.clause("S53")
def test_a_write_into_a_hole_asks_for_the_huge_pages_that_the_kernel_fills(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        sparse = await writer(w, b"sparse", 1)
        ino = (await w.do(w.fs.lookup(ROOT, b"sparse"))).ino
        await w.do(w.fs.setattr(ino, AttributeChange(size=8 * MIB), sparse.handle, CALLER))
        await full(w)
        call = Call(w, sparse, b"x" * 100, 5 * MIB)
        assert [one.wanted_bytes for one in w.fs.statistics().waiting] == [2 * MIB]
        await w.drained()
        assert await call.done() == 100

    run(tmp_path, scenario, budget_bytes=BUDGET)
