"""A file that outgrows RAM in the passthrough lane: moved out while it is held, whole in the end,
or an error that everybody sees.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from acpfs.backing.filling import write_all
from acpfs.filesystem import hold
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content import outgrown
from acpfs.filesystem.content.body import Body
from acpfs.filesystem.content.outgrown import KEEP_PIECES, PIECE, TornError
from acpfs.filesystem.hold import Held
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import AttributeChange, Lane, OpenFile
from acpfs.filesystem.steps import settled
from acpfs.ram.state import LateError
from acpfs.types import ROOT, Ino
from tests.filesystem.held_call import HeldCall
from tests.filesystem.test_hold import Kernel, run, tick, writer
from tests.filesystem.world import CALLER, World, violations, world

pytestmark = pytest.mark.clause("S61")

MIB = 1 << 20
BATCH = 3


async def until(w: World, condition: Callable[[], bool]) -> None:
    """Look after writers until something has happened; threads announce nothing here."""
    with trio.fail_after(60):
        while not condition():
            tick(w)
            await trio.sleep(0.002)


def patterned(size: int, seed: int = 1) -> bytes:
    """Bytes without a zero, different in every piece."""
    return b"".join(
        bytes([1 + (seed + number) % 255]) * PIECE for number in range(-(-size // PIECE))
    )[:size]


async def outgrow(w: World, kernel: Kernel, opened: OpenFile, ino: Ino, data: bytes) -> None:
    """Write as the kernel would: 16 MiB at a time, and none while the file is held."""
    for start in range(0, len(data), 16 * MIB):
        os.pwrite(opened.backing_fd, data[start : start + 16 * MIB], start)
        tick(w)
        await until(w, lambda: not kernel.is_held(ino))


def test_a_file_larger_than_the_budget(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = patterned(200 * MIB + 12345)
        await outgrow(w, kernel, opened, ino, data)
        assert w.tier.used_bytes <= 64 * MIB
        assert w.fs.statistics().overflowed_files == 1
        assert (await w.do(w.fs.getattr(ino))).size == len(data)
        await w.close(opened)
        assert await w.read(ino, 256 * MIB) == data  # before it is persisted
        await w.drained()
        assert (w.backing / "big").read_bytes() == data
        assert w.lower.list_staging() == []
        assert w.tier.used_bytes == 0

    run(tmp_path, scenario)


def test_several_that_do_not_fit_together(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        names = (b"a", b"b", b"c")
        files = [await writer(w, name) for name in names]
        for start in range(0, 64 * MIB, 8 * MIB):
            for number, (ino, opened) in enumerate(files):
                await until(w, partial(lambda ino: not kernel.is_held(ino), ino))
                os.pwrite(opened.backing_fd, patterned(8 * MIB, seed=start // MIB + number), start)
        for _ino, opened in files:
            await w.close(opened)
        w.engine.hold(False)
        await until(w, lambda: not len(w.log))
        for number, name in enumerate(names):
            expected = b"".join(
                patterned(8 * MIB, seed=start // MIB + number)
                for start in range(0, 64 * MIB, 8 * MIB)
            )
            assert (w.backing / os.fsdecode(name)).read_bytes() == expected

    run(tmp_path, scenario)


def test_its_place_in_the_order_is_that_of_its_close(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        await outgrow(w, kernel, opened, ino, patterned(80 * MIB))
        await w.do(w.fs.flush(opened.handle))
        await w.write(b"tracker", b"1")
        assert [op.name for op in w.log] == [b"big", b"tracker"]
        w.engine.hold(False)
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert (w.backing / "big").stat().st_size == 80 * MIB

    run(tmp_path, scenario)


def test_a_copied_descriptor_that_is_closed_does_not_publish_half_of_it(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, opened = await writer(w, b"big")
        data = patterned(120 * MIB)
        await outgrow(w, kernel, opened, ino, data[: 80 * MIB])
        await w.do(w.fs.flush(opened.handle))
        os.pwrite(opened.backing_fd, data[80 * MIB :], 80 * MIB)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


def test_fsync_in_the_middle_and_rename_make_one_store_of_it(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = patterned(100 * MIB)
        await outgrow(w, kernel, opened, ino, data[: 80 * MIB])
        await w.do(w.fs.fsync(opened.handle, False))
        await w.do(w.fs.rename(ROOT, b"big", ROOT, b"final", 0))
        os.pwrite(opened.backing_fd, data[80 * MIB :], 80 * MIB)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "final").read_bytes() == data
        assert w.lower.list_staging() == []

    run(tmp_path, scenario)


def test_a_piece_that_is_written_again_as_a_whole_is_the_new_one(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = bytearray(patterned(100 * MIB))
        await outgrow(w, kernel, opened, ino, bytes(data))
        data[20 * MIB : 20 * MIB + PIECE] = b"\xfe" * PIECE
        os.pwrite(opened.backing_fd, b"\xfe" * PIECE, 20 * MIB)
        await w.close(opened)
        assert await w.read(ino, 128 * MIB) == bytes(data)
        await w.drained()
        assert (w.backing / "big").read_bytes() == bytes(data)

    run(tmp_path, scenario)


def test_what_cannot_be_told_fails_and_leaves_the_old_version(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        (w.backing / "step-1").write_bytes(b"old")
        ino = (await w.do(w.fs.lookup(ROOT, b"step-1"))).ino
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        assert opened.lane is Lane.PASSTHROUGH
        await outgrow(w, kernel, opened, ino, patterned(100 * MIB))
        os.pwrite(
            opened.backing_fd, b"\xfe" * 100, 20 * MIB + 50
        )  # the rest of the page becomes zeros
        for call in (w.fs.fsync(opened.handle, False), w.fs.flush(opened.handle)):
            with pytest.raises(OSError) as error:
                await w.do(call)
            assert error.value.errno == errno.EIO
        await w.do(w.fs.release(opened.handle))
        assert w.tier.used_bytes == 0
        assert await w.read(ino, MIB) == b"old"
        await w.drained()
        assert (w.backing / "step-1").read_bytes() == b"old"
        again, _attributes = await w.create(b"step-2")
        assert again.lane is Lane.DIRECT
        await w.close(again)

    run(tmp_path, scenario)


@pytest.mark.clause("S480")
def test_a_file_that_somebody_reads_in_passthrough_goes_on_into_the_slack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would read holes, so it is not moved. When the slack is used up, it is held."""
    slack = 256 * MIB

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big", 62 * MIB)

        def over() -> int:
            return max(0, w.tier.used_bytes - 64 * MIB)

        monkeypatch.setattr(w.tier, "space_left_bytes", lambda: slack - over())
        reader = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        assert reader.lane is Lane.PASSTHROUGH
        data = patterned(160 * MIB)
        await outgrow(w, kernel, opened, ino, data)
        assert over() > 64 * MIB
        os.pwrite(opened.backing_fd, patterned(40 * MIB), len(data))
        for _ in range(5):
            tick(w)
        assert kernel.is_held(ino)
        assert [held.reason for held in w.fs.statistics().held] == [hold.READ]
        assert w.fs.statistics().overflowed_files == 0
        assert os.pread(reader.backing_fd, len(data), 0) == data
        await w.close(reader)
        await until(w, lambda: not kernel.is_held(ino))
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S480")
def test_others_do_not_wait_for_the_reader_of_a_file_that_fills_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What little slack is left is for them: their bytes move as soon as there are enough of
    them.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        others = [await writer(w, name) for name in (b"a", b"b", b"idle")]
        ino, opened = await writer(w, b"big", 62 * MIB)
        monkeypatch.setattr(w.tier, "space_left_bytes", lambda: 64 * MIB + 24 * MIB)
        reader = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        assert reader.lane is Lane.PASSTHROUGH
        for number, (other, file) in enumerate(others[:2]):
            await outgrow(w, kernel, file, other, patterned(60 * MIB, seed=number))
        tick(w)
        assert kernel.is_held(ino)
        for _other, file in others:
            await w.close(file)
        await w.drained()
        assert not (w.backing / "idle").read_bytes()
        for number, name in enumerate(("a", "b")):
            assert (w.backing / name).read_bytes() == patterned(60 * MIB, seed=number)
        await w.close(reader)
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S480")
def test_a_held_writer_does_not_wait_for_what_others_were_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may do nothing for hours. Some seconds they are given."""

    monkeypatch.setattr(hold, "PATIENCE_S", math.inf)

    async def scenario(w: World, kernel: Kernel) -> None:
        with w.fs.lock:
            w.inner.expectations.learn(b"idle-1.pt", 24 * MIB)
        idle_ino, idle = await writer(w, b"idle-2.pt")
        ino, opened = await writer(w, b"other")
        os.pwrite(opened.backing_fd, patterned(20 * MIB), 0)
        tick(w)
        tick(w)
        assert kernel.is_held(ino)
        assert w.tier.free_bytes() > 16 * MIB, "promised to the other"
        assert w.fs.statistics().overflowed_files == 0
        monkeypatch.setattr(hold, "PATIENCE_S", 0.0)
        await outgrow(w, kernel, opened, ino, patterned(100 * MIB))
        assert w.inner.table[ino].body.is_outgrown
        assert not kernel.is_held(idle_ino)
        await w.close(idle)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "other").read_bytes() == patterned(100 * MIB)

    run(tmp_path, scenario)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
def test_nobody_opens_it_while_it_is_being_written(tmp_path: Path, flags: int) -> None:
    """An opener could map it: it would see holes, and reading them makes pages of zeros."""

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = patterned(80 * MIB)
        await outgrow(w, kernel, opened, ino, data)
        with pytest.raises(OSError) as error:
            await w.do(w.fs.open(ino, flags, CALLER))
        assert error.value.errno == errno.EBUSY
        await w.do(w.fs.flush(opened.handle))
        async with (
            trio.open_nursery() as nursery
        ):  # closed, and the kernel's RELEASE is on its way: the open waits for it
            w.engine.hold(False)
            nursery.start_soon(w.read, ino)
            await trio.testing.wait_all_tasks_blocked()
            await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


def test_a_restart_finds_it_and_retry_stores_it(tmp_path: Path) -> None:
    data = patterned(100 * MIB)

    async def main() -> None:
        async with world(tmp_path, budget_bytes=64 * MIB, unknown_bytes=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            kernel = Kernel(w)
            ino, opened = await writer(w, b"big")
            await outgrow(w, kernel, opened, ino, data)
        async with world(tmp_path, budget_bytes=64 * MIB) as w:
            found = await w.do(w.fs.lookup(ROOT, b"big"))
            assert await w.read(found.ino, 128 * MIB) == data
            assert w.fs.statistics().interrupted_files == 1
            with w.fs.lock:
                assert w.inner.interrupted.store(b"") == 1
            await w.drained()
            assert (w.backing / "big").read_bytes() == data

    trio.run(main)


def test_a_restart_after_its_close_finishes_it(tmp_path: Path) -> None:
    data = patterned(100 * MIB)

    async def main() -> None:
        async with world(tmp_path, budget_bytes=64 * MIB, unknown_bytes=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            kernel = Kernel(w)
            ino, opened = await writer(w, b"big")
            await outgrow(w, kernel, opened, ino, data)
            await w.do(w.fs.flush(opened.handle))  # and no release: the daemon dies here
        async with world(tmp_path, budget_bytes=64 * MIB) as w:
            await w.drained()
            assert (w.backing / "big").read_bytes() == data

    trio.run(main)


def test_the_rest_of_it_is_copied_by_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who copies beside the one that ends first would go on writing when the file is stored, to a
    descriptor that is closed.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = patterned(80 * MIB)
        await outgrow(w, kernel, opened, ino, data)
        complete = w.inner.outgrown._complete
        begun = threading.Event()
        goes_on = threading.Event()
        copies = []

        def slowly(content: Body, size: int, wanted: int) -> None:
            copies.append(size)
            begun.set()
            goes_on.wait(60)
            complete(content, size, wanted)

        monkeypatch.setattr(w.inner.outgrown, "_complete", slowly)
        await w.do(w.fs.flush(opened.handle))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, w.fs.release(opened.handle))
            assert await trio.to_thread.run_sync(begun.wait, 60)
            again = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            await w.do(w.fs.flush(again.handle))
            release = w.fs.release(again.handle)
            waits_for = w.fs.steps.step(release, None)
            goes_on.set()
            await settled(waits_for)
            with pytest.raises(StopIteration):
                w.fs.steps.step(release, waits_for)
        assert copies == [len(data)]
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


def test_the_rest_of_it_does_not_follow_while_a_piece_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held file is closed in a gap, and held again a moment later: a piece that goes while the
    rest is copied would be read as a hole.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = patterned(80 * MIB)
        move = HeldCall(w.inner.outgrown._move)
        has_data = outgrown._has_data
        moved = threading.Event()
        mover: threading.Thread | None = None

        def go_between(fd: int, piece: int) -> bool:
            """In the thread that copies the rest: the piece goes after it was seen to be there."""
            found = has_data(fd, piece)
            if found and threading.current_thread() is not mover:
                move.go_on.set()
                assert moved.wait(60)
            return found

        def noted(held: Held, *arguments: Any) -> bool:
            nonlocal mover
            mover = threading.current_thread()
            try:
                return bool(move(held, *arguments))
            finally:
                moved.set()

        monkeypatch.setattr(w.inner.outgrown, "_move", noted)
        os.pwrite(opened.backing_fd, data, 0)
        tick(w)
        assert await trio.to_thread.run_sync(move.began.wait, 60)
        monkeypatch.setattr(outgrown, "_has_data", go_between)
        await w.do(w.fs.flush(opened.handle))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, w.fs.release(opened.handle))
            await trio.testing.wait_all_tasks_blocked()
            assert kernel.is_held(ino)  # nobody has looked yet who would end that
            move.go_on.set()
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


def test_a_piece_that_is_written_to_in_a_gap_on_its_way_goes_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold lets a write through now and then; a piece that is read before it and goes after it
    would be the older one.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = bytearray(patterned(80 * MIB))
        move = w.inner.outgrown._move
        written: list[int] = []

        def with_a_gap(held: Held, body: Body, source: int, target: int, piece: int) -> bool:
            def sent(fd: int, content: bytes, offset: int) -> int:
                done = write_all(fd, content, offset)
                if not written:
                    written.append(piece)
                    os.pwrite(opened.backing_fd, b"\xfe" * PIECE, piece * PIECE)
                    held.gaps += 1
                return done

            monkeypatch.setattr(outgrown, "write_all", sent)
            return move(held, body, source, target, piece)

        monkeypatch.setattr(w.inner.outgrown, "_move", with_a_gap)
        await outgrow(w, kernel, opened, ino, bytes(data))
        start = written[0] * PIECE
        data[start : start + PIECE] = b"\xfe" * PIECE
        await w.close(opened)
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


def test_a_piece_stays_for_who_writes_to_it_without_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write by the daemon that has begun would reach a hole, and nobody could tell its page: the
    piece goes when that is done.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        other = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
        data = bytearray(patterned(80 * MIB))
        at = KEEP_PIECES * PIECE
        os.pwrite(opened.backing_fd, data, 0)
        data[at : at + 100] = bytes([255]) * 100
        pwrite = HeldCall(os.pwrite)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", pwrite)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.do, w.fs.write(other.handle, at, bytes(data[at : at + 100])))
                assert await trio.to_thread.run_sync(pwrite.began.wait, 60)
                for _ in range(5):
                    tick(w)
                was_held = kernel.is_held(ino) and not w.inner.table[ino].body.is_outgrown
                pwrite.go_on.set()
        assert was_held
        await until(w, lambda: not kernel.is_held(ino))
        assert w.inner.table[ino].body.is_outgrown
        await w.close(other)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


def test_a_close_does_not_judge_a_piece_that_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that was written again goes once more while its file is closed: what is a hole by
    then was not torn.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = bytearray(patterned(80 * MIB))
        await outgrow(w, kernel, opened, ino, bytes(data))
        at = KEEP_PIECES * PIECE
        data[at : at + PIECE] = bytes([255]) * PIECE
        parts = w.inner.outgrown
        move = HeldCall(parts._move)
        check = parts._check_pieces

        def check_late(body: Body, pieces: list[int]) -> None:
            """By the time that a thread takes it."""
            move.go_on.set()
            while parts._running:
                threading.Event().wait(0.01)
            check(body, pieces)

        monkeypatch.setattr(parts, "_move", move)
        monkeypatch.setattr(parts, "_check_pieces", check_late)
        os.pwrite(opened.backing_fd, data[at : at + PIECE], at)
        os.pwrite(opened.backing_fd, data[-64 * MIB :], 80 * MIB)
        data += data[-64 * MIB :]
        tick(w)
        assert await trio.to_thread.run_sync(move.began.wait, 60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, w.fs.flush(opened.handle))
            await trio.testing.wait_all_tasks_blocked()
            move.go_on.set()
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


def test_who_opened_what_then_failed_is_told_so_and_can_write_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it cannot be told is found when the rest is copied; who opened it meanwhile must not
    wait for a copy that never comes.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        await outgrow(w, kernel, opened, ino, patterned(80 * MIB))
        begun = threading.Event()
        goes_on = threading.Event()

        def torn(body: Body, size: int, wanted: int) -> None:
            begun.set()
            goes_on.wait(60)
            raise TornError(errno.EIO, "overwritten after it had left RAM")

        monkeypatch.setattr(w.inner.outgrown, "_complete", torn)
        await w.do(w.fs.flush(opened.handle))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, w.fs.release(opened.handle))
            assert await trio.to_thread.run_sync(begun.wait, 60)
            again = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            reader = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            goes_on.set()
        with pytest.raises(OSError) as error:
            await w.do(w.fs.read(reader.handle, 20 * MIB, 100))
        assert error.value.errno == errno.EIO
        await w.close(reader)
        for call in (
            w.fs.write(again.handle, 0, b"new"),
            w.fs.setattr(ino, AttributeChange(size=5), again.handle, CALLER),
        ):
            with pytest.raises(OSError) as error:
                await w.do(call)
            assert error.value.errno == errno.EIO
        await w.do(w.fs.setattr(ino, AttributeChange(size=0), again.handle, CALLER))
        await w.do(w.fs.write(again.handle, 0, b"new"))
        assert await w.read(ino, MIB) == b"new"
        with pytest.raises(
            OSError, match="Input/output"
        ):  # the half is parked still, and somebody has to decide about that
            await w.do(w.fs.flush(again.handle))
        await w.do(w.fs.release(again.handle))
        assert violations(w) == []

    run(tmp_path, scenario)


def test_a_piece_whose_going_cannot_be_recorded_stays_and_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state cannot be written at that moment (S202).

    A write gets in before the next try: what it zeroes is not torn.
    """
    zeros = KEEP_PIECES * PIECE + 50
    failed: list[None] = []

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        must_commit = w.state.must_commit

        def late() -> None:
            if failed:
                return must_commit()
            failed.append(None)
            os.pwrite(opened.backing_fd, bytes(100), zeros)
            raise LateError("full")

        monkeypatch.setattr(w.state, "must_commit", late)
        monkeypatch.setattr(outgrown, "RETRY_DELAY_MAX_S", 0.0)
        data = bytearray(patterned(100 * MIB))
        await outgrow(w, kernel, opened, ino, bytes(data))
        data[zeros : zeros + 100] = bytes(100)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)
    assert failed


def test_who_reads_while_the_last_of_it_moves_reads_it_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that was on its way to RAM finds the file in its staging file by the time that a
    thread takes it.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        reading = threading.Event()
        sealed = threading.Event()
        parts = w.inner.outgrown
        complete = parts._complete
        seal = parts._sealed
        read = parts._read

        def complete_late(body: Body, size: int, wanted: int) -> None:
            assert reading.wait(60)
            complete(body, size, wanted)

        def seal_and_tell(node: Node, body: Body) -> None:
            seal(node, body)
            sealed.set()

        def read_late(body: Body, offset: int, size: int) -> bytes:
            reading.set()
            assert sealed.wait(60)
            return read(body, offset, size)

        for name, patch in (
            ("_complete", complete_late),
            ("_sealed", seal_and_tell),
            ("_read", read_late),
        ):
            monkeypatch.setattr(parts, name, patch)
        ino, opened = await writer(w, b"big")
        data = patterned(100 * MIB)
        await outgrow(w, kernel, opened, ino, data)
        await w.do(w.fs.flush(opened.handle))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, w.fs.release(opened.handle))
            await until(w, lambda: not w.inner.table[ino].kernel_handles)
            assert await w.read(ino, 128 * MIB) == data

    run(tmp_path, scenario)


def test_deleting_it_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        await outgrow(w, kernel, opened, ino, patterned(80 * MIB))
        await w.do(w.fs.unlink(ROOT, b"big"))
        await w.close(opened)
        w.fs.forget([(ino, 10)])
        await w.drained()
        await until(w, lambda: w.lower.list_staging() == [])
        assert w.tier.used_bytes == 0
        assert w.fs.statistics().nodes == 1

    run(tmp_path, scenario)


@pytest.mark.clause("S16", "S18")
def test_a_writer_whose_fsync_is_durable_is_served_by_the_daemon(tmp_path: Path) -> None:
    """In passthrough its fsync would wait for its own close."""

    async def scenario(w: World, _kernel: Kernel) -> None:
        w.engine.hold(False)
        lanes = {}
        directory = (await w.do(w.fs.mkdir(ROOT, b"safe", 0o755, CALLER))).ino
        await w.do(w.fs.setxattr(directory, b"user.acpfs.fsync", b"durable", 0, 0))
        for parent in (ROOT, directory):
            opened, _attributes = await w.create(b"f", parent)
            lanes[parent] = opened.lane
            await w.close(opened)
        assert lanes == {ROOT: Lane.PASSTHROUGH, directory: Lane.DIRECT}

    run(tmp_path, scenario)


@pytest.mark.clause("S16", "S18")
def test_a_durable_fsync_of_what_outgrew_ram_before_it_was_durable_fails_and_close_stores_it(
    tmp_path: Path,
) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, opened = await writer(w, b"big")
        data = patterned(100 * MIB)
        await outgrow(w, kernel, opened, ino, data)
        await w.do(w.fs.setxattr(ROOT, b"user.acpfs.fsync", b"durable", 0, 0))
        with trio.fail_after(60), pytest.raises(OSError, match="No space"):
            await w.do(w.fs.fsync(opened.handle, False))
        await w.close(opened)
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


@pytest.mark.clause("S437")
@pytest.mark.parametrize("told_late", [False, True])
def test_a_full_storage_is_not_sent_again_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, told_late: bool
) -> None:
    """`told_late`: by the flush, of what was taken before."""
    written: Counter[int] = Counter()
    room = [2]
    """Batches that the storage takes before each time that it has no room for the next."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(fd: int, data: bytes, offset: int) -> None:
        if not room[0] and not told_late:
            full()
        written[offset // PIECE] += 1
        write_all(fd, data, offset)

    def flush(fd: int) -> None:
        if not room[0]:
            room[0] = 2
            full()
        room[0] -= 1
        fdatasync(fd)

    fdatasync = os.fdatasync

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = patterned(100 * MIB)
        await outgrow(w, kernel, opened, ino, data)
        here = set(range(50)) - {
            piece
            for start, end in w.inner.table[ino].body.here.gaps()
            for piece in range(start // PIECE, end // PIECE)
        }
        assert len(here) > 4 * BATCH
        monkeypatch.setattr(outgrown, "SENT_PIECES", BATCH)
        monkeypatch.setattr(outgrown, "RETRY_DELAY_MIN_S", 0.001)
        monkeypatch.setattr(outgrown, "RETRY_DELAY_MAX_S", 0.001)
        monkeypatch.setattr(outgrown, "write_all", write)
        monkeypatch.setattr("acpfs.filesystem.content.outgrown.os.fdatasync", flush)
        closing = trio.Event()

        async def close() -> None:
            await w.close(opened)
            closing.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close)
            while not closing.is_set():
                room[0] = room[0] or (0 if told_late else 2)
                await trio.sleep(0.002)
        assert set(written) == here
        assert max(written.values()) == (2 if told_late else 1)
        assert sum(written.values()) <= len(here) * (1.5 if told_late else 1)
        monkeypatch.undo()
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


@pytest.mark.clause("S498")
def test_where_each_tenth_write_fails_its_rest_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each batch of pieces one failed, and all of it was sent again, for ever."""
    calls = [0]

    def write(fd: int, data: bytes, offset: int) -> None:
        calls[0] += 1
        if calls[0] % 10 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write_all(fd, data, offset)

    async def scenario(w: World, kernel: Kernel) -> None:
        ino, opened = await writer(w, b"big")
        data = patterned(100 * MIB)
        await outgrow(w, kernel, opened, ino, data)
        monkeypatch.setattr(outgrown, "SENT_PIECES", 12)
        monkeypatch.setattr(outgrown, "RETRY_DELAY_MIN_S", 0.001)
        monkeypatch.setattr(outgrown, "RETRY_DELAY_MAX_S", 0.001)
        monkeypatch.setattr(outgrown, "write_all", write)
        await w.close(opened)
        assert calls[0] > 12
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


@pytest.mark.clause("S180", "S181")
@pytest.mark.parametrize("broken_off", [False, True])
def test_a_killed_writer_of_it_publishes_no_half(tmp_path: Path, *, broken_off: bool) -> None:
    """`broken_off`: as the transport does with what a dying caller waits for."""
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing" / "big").write_bytes(b"old")

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        await w.do(w.fs.lookup(ROOT, b"big"))
        ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        assert opened.lane is Lane.PASSTHROUGH
        await outgrow(w, kernel, opened, ino, patterned(80 * MIB))
        assert w.inner.table[ino].body.is_outgrown
        call = w.fs.flush(opened.handle, 1)
        done = None
        with contextlib.suppress(StopIteration, InterruptedError), trio.fail_after(60):
            while True:
                done = w.fs.steps.step(call, done)
                if broken_off:
                    done = Future()
                    done.cancel()
                else:
                    await settled(done)
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert (w.backing / "big").read_bytes() == b"old"
        assert w.fs.statistics().interrupted_files == 1

    run(tmp_path, scenario, closing=lambda _pid: Closing.KILL)


# -- somebody else writes to it in the daemon's lane


@pytest.mark.clause("S468", "S478")
@pytest.mark.parametrize("is_removed", [False, True], ids=["another keeps it open", "removed"])
def test_what_was_synced_while_it_was_open_is_sealed_when_nobody_is_at_it(
    tmp_path: Path, is_removed: bool
) -> None:
    """The place in the order is that of the sync; half of what two write would be published in
    it.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, opened = await writer(w, b"big")
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        other = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER._replace(pid=7)))
        keeper = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER._replace(pid=8)))
        assert other.lane is keeper.lane is Lane.DIRECT
        data = bytearray(patterned(100 * MIB))
        await outgrow(w, kernel, opened, ino, bytes(data[: 80 * MIB]))
        await w.do(w.fs.fsync(opened.handle, datasync=False))
        with pytest.raises(OSError, match="busy"):
            await w.do(w.fs.write(other.handle, 0, b"other"))
        await outgrow(w, kernel, opened, ino, bytes(data))
        await w.close(opened)
        await w.write(b"tracker", b"1")
        await w.do(w.fs.write(other.handle, 0, b"other"))
        data[:5] = b"other"
        assert not (w.backing / "big").exists()
        assert not (w.backing / "tracker").exists()
        if is_removed:
            await w.do(w.fs.unlink(ROOT, b"big"))
        await w.close(other)
        if is_removed:
            await w.close(keeper)
        await w.drained()
        assert (w.backing / "tracker").exists()
        assert (w.backing / "big").exists() is not is_removed
        if not is_removed:
            assert (w.backing / "big").read_bytes() == data
            await w.close(keeper)

    run(tmp_path, scenario)
