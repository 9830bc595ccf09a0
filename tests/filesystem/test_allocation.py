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
from acpfs.filesystem.records import AttributeChange
from acpfs.filesystem.steps import settled
from acpfs.ram.tier import fallocate
from tests.filesystem.held_call import HeldCall
from tests.filesystem.world import CALLER, World, run

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
