"""fallocate of much: behind everybody's back, and nothing of the accounting is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.content import contents
from acpfs.filesystem.records import AttributeChange, Lane
from acpfs.filesystem.steps import settled
from acpfs.ram.tier import fallocate
from tests.filesystem.held_call import HeldCall
from tests.filesystem.world import CALLER, World, run
from tests.rig.syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE

pytestmark = pytest.mark.clause("S224")
PIECE = 1 << 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "ALLOCATE_PIECE_BYTES", PIECE)


def is_free(lock: Any) -> bool:
    """Whether another thread gets it."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=60))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def test_others_get_on_while_pages_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        seen: list[tuple[bool, int]] = []

        def slow(fd: int, mode: int, offset: int, length: int) -> None:
            seen.append((is_free(w.fs.lock), length))
            fallocate(fd, mode, offset, length)

        monkeypatch.setattr(contents, "fallocate", slow)
        opened, attributes = await w.create(b"f")
        await w.do(w.fs.fallocate(opened.handle, 0, 100, 3 * PIECE + 5))
        assert seen == [(True, PIECE)] * 3 + [(True, 5)]
        assert (await w.do(w.fs.getattr(attributes.ino))).size == 3 * PIECE + 105
        tier = w.fs.statistics().tier
        assert tier.used_bytes == 3 * PIECE + 4096
        assert tier.reserved_bytes == 0
        await w.close(opened)
        await w.drained()
        assert (w.backing / "f").stat().st_size == 3 * PIECE + 105

    run(tmp_path, scenario)


def test_a_failure_in_the_middle_gives_back_what_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        def fails_late(fd: int, mode: int, offset: int, length: int) -> None:
            if offset:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fallocate(fd, mode, offset, length)

        monkeypatch.setattr(contents, "fallocate", fails_late)
        opened, _attributes = await w.create(b"f")
        with pytest.raises(OSError) as refused:
            await w.do(w.fs.fallocate(opened.handle, 0, 0, 4 * PIECE))
        assert refused.value.errno == errno.ENOSPC
        tier = w.fs.statistics().tier
        assert (tier.used_bytes, tier.reserved_bytes) == (PIECE, 0)
        await w.close(opened)

    run(tmp_path, scenario)


def test_what_is_truncated_meanwhile_stays_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        held = HeldCall(fallocate)
        monkeypatch.setattr(contents, "fallocate", held)
        ino = await w.write(
            b"f", b"x" * 100
        )  # its version keeps the tier file: truncation makes another one
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, w.fs.fallocate(opened.handle, 0, 0, 8 * PIECE))
            await trio.to_thread.run_sync(held.began.wait)
            await w.do(w.fs.setattr(ino, AttributeChange(size=0), None, CALLER))
            held.go_on.set()
        assert (await w.do(w.fs.getattr(ino))).size == 0
        await w.close(opened)
        await w.drained()
        tier = w.fs.statistics().tier
        assert (tier.used_bytes, tier.reserved_bytes) == (0, 0)
        assert (w.backing / "f").read_bytes() == b""

    run(tmp_path, scenario)


def test_a_killed_caller_leaves_no_thread_at_work_on_a_descriptor_that_may_be_another_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over only when the thread is."""

    async def scenario(w: World) -> None:
        held = HeldCall(fallocate)
        monkeypatch.setattr(contents, "fallocate", held)
        opened, attributes = await w.create(b"f")
        call = w.fs.fallocate(opened.handle, 0, 0, 2 * PIECE)
        done = w.fs.steps.step(call, None)
        assert await trio.to_thread.run_sync(held.began.wait, 60)
        killed: Future[None] = Future()
        killed.cancel()
        try:
            done = w.fs.steps.step(call, killed)
            assert not done.done()
        finally:
            held.go_on.set()
        with contextlib.suppress(StopIteration), trio.fail_after(60):
            while True:
                await settled(done)
                done = w.fs.steps.step(call, done)
        assert (await w.do(w.fs.getattr(attributes.ino))).size == 2 * PIECE
        await w.close(opened)
        await w.drained()
        assert w.fs.statistics().tier.reserved_bytes == 0

    run(tmp_path, scenario)


@pytest.mark.clause("S481")
@pytest.mark.parametrize("when_full", ["wait", "native"])
@pytest.mark.parametrize("keep_size", [False, True])
def test_what_ram_has_no_room_for_is_allocated_on_the_storage(
    tmp_path: Path, when_full: str, *, keep_size: bool
) -> None:
    async def scenario(w: World) -> None:
        opened, attributes = await w.create(b"f")
        await w.do(w.fs.write(opened.handle, 0, b"x" * 100))
        mode = FALLOC_KEEP_SIZE if keep_size else 0
        await w.do(w.fs.fallocate(opened.handle, mode, 50, 12 * PIECE))
        size = 100 if keep_size else 12 * PIECE + 50
        assert (await w.do(w.fs.getattr(attributes.ino))).size == size
        [name] = w.lower.list_staging()
        fd = w.lower.open_staging(name)
        assert os.fstat(fd).st_blocks * 512 >= 12 * PIECE
        w.lower.close(fd)
        await w.do(w.fs.fallocate(opened.handle, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, 0, 10))
        await w.do(w.fs.write(opened.handle, 13 * PIECE, b"end"))
        await w.close(opened)
        await w.drained()
        expected = bytes(10) + b"x" * 90 + bytes(13 * PIECE - 100) + b"end"
        assert (w.backing / "f").read_bytes() == expected
        tier = w.fs.statistics().tier
        assert (tier.used_bytes, tier.reserved_bytes) == (0, 0)

    run(tmp_path, scenario, budget_bytes=8 * PIECE, when_full=when_full)


@pytest.mark.clause("S481")
def test_an_error_is_what_was_asked_for(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened, _attributes = await w.create(b"f")
        with pytest.raises(OSError) as refused:
            await w.do(w.fs.fallocate(opened.handle, 0, 0, 12 * PIECE))
        assert refused.value.errno == errno.ENOSPC
        await w.close(opened)

    run(tmp_path, scenario, budget_bytes=8 * PIECE, when_full="error")


@pytest.mark.clause("S481")
def test_what_the_storage_cannot_is_told_and_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel turns posix_fallocate into writes then."""

    async def scenario(w: World) -> None:
        opened, _attributes = await w.create(b"f")
        await w.do(w.fs.write(opened.handle, 0, b"x" * 100))

        def cannot(*_arguments: int) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr("acpfs.filesystem.content.overflow.fallocate", cannot)
        for mode in (0, 8):
            with pytest.raises(OSError) as refused:
                await w.do(w.fs.fallocate(opened.handle, mode, 0, 12 * PIECE))
            assert refused.value.errno == errno.EOPNOTSUPP
        await w.close(opened)
        await w.drained()
        assert (w.backing / "f").read_bytes() == b"x" * 100

    run(tmp_path, scenario, budget_bytes=8 * PIECE)


@pytest.mark.clause("S481")
def test_what_the_kernel_writes_in_ram_cannot_move(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
        opened, _attributes = await w.create(b"f")
        assert opened.lane is Lane.PASSTHROUGH
        with pytest.raises(OSError) as refused:
            await w.do(w.fs.fallocate(opened.handle, 0, 0, 100 * PIECE))
        assert refused.value.errno == errno.EOPNOTSUPP
        os.pwrite(opened.backing_fd, b"whole", 0)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "f").read_bytes() == b"whole"

    run(tmp_path, scenario, budget_bytes=64 * PIECE, unknown_bytes=0)
