"""A file that the kernel wrote to when everything of acpfs ended, as the next mount finds it.

No look at it was made in between.

The test is the kernel: it writes to the descriptor that an open in the passthrough lane hands out.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.kernel_writes import mark_file
from acpfs.filesystem.records import AttributeChange, Lane, OpenFile
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.clause("S22", "S82")

Scenario = Callable[[World, Ino, OpenFile], Awaitable[None]]
OLD = b"o" * 8192
NEW = b"n" * 8192
FUTURE_NS = 4 * 10**18


def lose_writer(
    base: Path, scenario: Scenario, then: Callable[[World, Ino], Awaitable[None]]
) -> None:
    """A persisted file is opened in the passthrough lane; the worker's life ends after `scenario`,
    the next one's begins before `then`.
    """

    async def main() -> None:
        async with world(base, unknown_bytes=1 << 20, max_dirty_age_s=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            ino = await w.write(b"f", OLD)
            await w.drained()
            w.engine.hold(True)
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            assert opened.lane is Lane.PASSTHROUGH
            await scenario(w, ino, opened)
        async with world(base) as w:
            await then(w, (await w.do(w.fs.lookup(ROOT, b"f"))).ino)

    trio.run(main)


async def is_new_and_waits_for_a_decision(w: World, ino: Ino) -> None:
    assert w.fs.statistics().interrupted_files == 1
    assert await w.read(ino) == NEW
    await w.drained()
    assert (w.backing / "f").read_bytes() == OLD
    with w.fs.lock:  # as whoever asks for it does: threads of the drain write rows, too
        assert w.inner.interrupted.store(b"f") == 1
    await w.drained()
    assert (w.backing / "f").read_bytes() == NEW


async def write(w: World, ino: Ino, opened: OpenFile) -> None:
    os.pwrite(opened.backing_fd, NEW, 0)


async def close_once_and_write(w: World, ino: Ino, opened: OpenFile) -> None:
    await w.do(w.fs.flush(opened.handle))
    os.pwrite(opened.backing_fd, NEW, 0)


async def sync_and_write(w: World, ino: Ino, opened: OpenFile) -> None:
    os.pwrite(opened.backing_fd, OLD, 0)
    await w.do(w.fs.fsync(opened.handle, False))
    os.pwrite(opened.backing_fd, NEW, 0)


async def link_and_write(w: World, ino: Ino, opened: OpenFile) -> None:
    os.pwrite(opened.backing_fd, OLD, 0)
    await w.do(w.fs.link(ino, ROOT, b"g"))
    os.pwrite(opened.backing_fd, NEW, 0)


async def set_times_and_write(w: World, ino: Ino, opened: OpenFile) -> None:
    await w.do(w.fs.setattr(ino, AttributeChange(mtime_ns=FUTURE_NS), None, CALLER))
    os.pwrite(opened.backing_fd, NEW, 0)


@pytest.mark.parametrize(
    "scenario", [write, close_once_and_write, sync_and_write, link_and_write, set_times_and_write]
)
def test_a_write_of_the_same_size_is_found(tmp_path: Path, scenario: Scenario) -> None:
    lose_writer(tmp_path, scenario, is_new_and_waits_for_a_decision)


async def nothing(w: World, ino: Ino, opened: OpenFile) -> None:
    pass


async def sync(w: World, ino: Ino, opened: OpenFile) -> None:
    os.pwrite(opened.backing_fd, OLD, 0)
    await w.do(w.fs.fsync(opened.handle, False))


async def close_once(w: World, ino: Ino, opened: OpenFile) -> None:
    os.pwrite(opened.backing_fd, OLD, 0)
    await w.do(w.fs.flush(opened.handle))


async def set_times(w: World, ino: Ino, opened: OpenFile) -> None:
    await w.do(w.fs.setattr(ino, AttributeChange(mtime_ns=FUTURE_NS), None, CALLER))


@pytest.mark.parametrize("scenario", [nothing, sync, close_once, set_times])
def test_a_file_that_was_open_and_holds_nothing_new_is_as_it_was(
    tmp_path: Path, scenario: Scenario
) -> None:
    shown: list[int] = []

    async def first(w: World, ino: Ino, opened: OpenFile) -> None:
        await scenario(w, ino, opened)
        shown.append((await w.do(w.fs.getattr(ino))).mtime_ns)

    async def then(w: World, ino: Ino) -> None:
        assert w.fs.statistics().interrupted_files == 0
        assert (await w.do(w.fs.getattr(ino))).mtime_ns == shown[0]
        await w.drained()
        assert (w.backing / "f").read_bytes() == OLD

    lose_writer(tmp_path, first, then)


def test_a_mark_that_the_worker_did_not_live_to_record_is_no_write(tmp_path: Path) -> None:
    async def mark(w: World, ino: Ino, opened: OpenFile) -> None:
        mark_file(opened.backing_fd)

    async def then(w: World, ino: Ino) -> None:
        assert w.fs.statistics().interrupted_files == 0

    lose_writer(tmp_path, mark, then)


def test_nobody_watches_a_file_that_nobody_writes_to(tmp_path: Path) -> None:
    async def close(w: World, ino: Ino, opened: OpenFile) -> None:
        await w.close(opened)
        with w.fs.lock:
            assert w.state.rows("SELECT * FROM mark") == []

    async def then(w: World, ino: Ino) -> None:
        assert w.fs.statistics().interrupted_files == 0

    lose_writer(tmp_path, close, then)
