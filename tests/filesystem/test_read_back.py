"""Files that are mapped or read back while they are written, as numpy.memmap does it: those that
are written at once, and closed, have the passthrough lane, with all the room that they may need.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem import lane_use
from acpfs.filesystem.admission import MARGIN, MARGIN_BYTES, Net
from acpfs.filesystem.expectations import Use
from acpfs.filesystem.records import AttributeChange, Lane, OpenFile
from acpfs.ram.waiting import NOBODY
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

MIB = 1 << 20
BUDGET = 256 * MIB
FILE = 4 * MIB
PROMISED = int(FILE * MARGIN) + MARGIN_BYTES


def run(tmp_path: Path, scenario: Callable[[World], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        async with made(tmp_path, **changes) as w:
            await scenario(w)

    trio.run(main)


def made(tmp_path: Path, **changes: Any) -> AbstractAsyncContextManager[World]:
    return world(tmp_path, budget_bytes=BUDGET, max_dirty_age_s=0, **changes)


class Nobody:
    """Double of who holds writers: nobody is to be held here."""

    def take(self, ino: Ino) -> None:
        raise AssertionError(ino)

    def look_soon(self) -> None:
        """The test looks itself."""


def offer(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
    w.inner.hold.offer(Nobody(), Net.HOLDS)
    monkeypatch.setattr(w.tier, "tells_of_mappings", lambda: True)  # as a tmpfs does


def use(w: World) -> Use:
    return w.inner.expectations.use_of(b"step-7/f")


async def saves(w: World, *calls: Callable[[OpenFile], Awaitable[object]]) -> None:
    """One save of `step-1/f` in the daemon's lane: written, read back, and what else it does."""
    w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
    directory = await w.do(w.fs.mkdir(ROOT, b"step-1", 0o755, CALLER))
    opened, _made = await w.do(
        w.fs.create(directory.ino, b"f", 0o644, os.O_RDWR, CALLER._replace(unique=7))
    )
    await w.do(w.fs.write(opened.handle, 0, b"x" * FILE))
    await w.do(w.fs.read(opened.handle, 0, 10))
    for call in calls:
        await call(opened)
    await w.close(opened)
    await w.drained()


@pytest.mark.clause("S533")
def test_what_a_program_does_before_it_closes_the_file_says_what_its_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(w: World) -> Callable[[OpenFile], Awaitable[object]]:
        return lambda opened: w.do(w.fs.fsync(opened.handle, False))

    def write(w: World) -> Callable[[OpenFile], Awaitable[object]]:
        return lambda opened: w.do(w.fs.write(opened.handle, 0, b"more"))

    async def twice(w: World, opened: OpenFile) -> None:
        ino = w.inner.handles.handle(opened.handle).node.ino
        await w.close(await w.do(w.fs.open(ino, os.O_RDWR, CALLER._replace(unique=9))))

    async def is_learnt(name: str, calls: str, found: Use) -> None:
        base = tmp_path / name
        base.mkdir()
        async with made(base) as w:
            known = {"sync": sync(w), "write": write(w), "open": lambda one: twice(w, one)}
            await saves(w, *(known[call] for call in calls.split()))
            assert use(w) is found, name

    async def main() -> None:
        await is_learnt("read back", "", Use.READ_BACK)
        await is_learnt("synced at its end", "write sync", Use.READ_BACK)
        await is_learnt("synced twice at its end", "sync sync", Use.READ_BACK)
        await is_learnt("written on", "sync write", Use.OTHER)
        await is_learnt("opened by another", "open", Use.OTHER)
        monkeypatch.setattr(lane_use, "MAPPING_GOES_ON_S", -1.0)
        await is_learnt("goes on", "", Use.OTHER)

    trio.run(main)


async def taught(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with w.fs.lock, w.state.step():
        w.inner.expectations.learn(b"f-1", FILE)
        w.inner.expectations.learn_use(b"f-1", Use.READ_BACK)
    offer(w, monkeypatch)


async def opened_new(w: World, number: int = 2) -> OpenFile:
    opened, _made = await w.create(f"f-{number}".encode(), flags=os.O_RDWR)
    return opened


@pytest.mark.clause("S533")
def test_its_room_is_nobody_elses_before_it_is_stored_and_free_after_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        await taught(w, monkeypatch)
        before = w.tier.free_bytes()
        opened = await opened_new(w)
        assert opened.lane is Lane.PASSTHROUGH
        assert w.tier.free_bytes() == before - PROMISED
        with w.fs.lock:
            assert not w.tier.take_free(before - PROMISED + 1, NOBODY)
        os.pwrite(opened.backing_fd, b"x" * FILE, 0)
        with w.fs.lock:
            w.inner.hold.tick()
        assert w.tier.free_bytes() == before - PROMISED, "what is written is not counted twice"
        await w.close(opened)
        await w.drained()
        with w.fs.lock:
            w.inner.hold.tick()
            assert w.tier.reserved_bytes == 0
        assert (w.backing / "f-2").read_bytes() == b"x" * FILE

    run(tmp_path, scenario)


@pytest.mark.clause("S533")
def test_all_of_them_take_half_of_ram_at_most_and_the_others_go_through_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        await taught(w, monkeypatch)
        many = [await opened_new(w, number) for number in range(2, 12)]
        lanes = [one.lane for one in many]
        fit = BUDGET // 2 // PROMISED
        assert lanes == [Lane.PASSTHROUGH] * fit + [Lane.DIRECT] * (len(many) - fit)
        for one in many:
            await w.close(one)
        with w.fs.lock:
            w.inner.hold.tick()
            assert w.tier.reserved_bytes == 0
            w.inner.expectations.learn(b"f-1", BUDGET // 8)
        large = await opened_new(w, 50)
        assert large.lane is Lane.DIRECT
        await w.close(large)

    run(tmp_path, scenario)


@pytest.mark.clause("S533")
def test_where_it_becomes_longer_than_expected_its_length_is_refused_and_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        await taught(w, monkeypatch)
        opened = await opened_new(w)
        ino = w.inner.handles.handle(opened.handle).node.ino

        async def lengthen(size: int) -> None:
            await w.do(w.fs.setattr(ino, AttributeChange(size=size), opened.handle, CALLER))

        free = w.tier.free_bytes()
        await lengthen(PROMISED)
        assert w.tier.free_bytes() == free
        await lengthen(PROMISED + MIB)
        assert w.tier.free_bytes() == free - MIB
        with pytest.raises(OSError) as error:
            await lengthen(BUDGET + MIB)
        assert error.value.errno == errno.ENOSPC
        assert w.tier.free_bytes() == free - MIB
        await w.close(opened)
        again = await opened_new(w, 3)
        assert again.lane is Lane.DIRECT, "where it can wait and overflow"
        await w.close(again)

    run(tmp_path, scenario)


@pytest.mark.clause("S533")
def test_pages_that_it_allocates_come_out_of_its_own_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        await taught(w, monkeypatch)
        opened = await opened_new(w)
        with w.fs.lock:
            rest = w.tier.free_bytes()
            assert w.tier.take_free(rest, NOBODY)
        await w.do(w.fs.fallocate(opened.handle, 0, 0, FILE))
        with w.fs.lock:
            w.inner.hold.tick()
            assert w.tier.free_bytes() == 0
            w.tier.release(rest)
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S533", "S390")
def test_the_next_worker_keeps_room_for_what_may_still_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with made(tmp_path, session="s") as w:
            await taught(w, monkeypatch)
            opened = await opened_new(w)
            ino = w.inner.handles.handle(opened.handle).node.ino
            await w.do(w.fs.setattr(ino, AttributeChange(size=FILE), opened.handle, CALLER))
            descriptor = os.dup(opened.backing_fd)  # the kernel's, which outlives the worker
        async with made(tmp_path, session="s") as w:
            offer(w, monkeypatch)
            assert w.tier.reserved_bytes == FILE
            os.pwrite(descriptor, b"y" * FILE, 0)
            os.close(descriptor)
            await w.close(opened)
            await w.drained()
            with w.fs.lock:
                w.inner.hold.tick()
                assert w.tier.reserved_bytes == 0
            assert (w.backing / "f-2").read_bytes() == b"y" * FILE

    trio.run(main)


@pytest.mark.clause("S533")
def test_what_fails_to_open_keeps_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(w: World) -> None:
        await taught(w, monkeypatch)

        def fails(_body: object) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patch:
            patch.setattr(w.inner.contents, "opened", fails)
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                await opened_new(w)
        assert w.tier.reserved_bytes == 0

    run(tmp_path, scenario)


async def lengthen(w: World, opened: OpenFile, size: int) -> None:
    ino = w.inner.handles.handle(opened.handle).node.ino
    await w.do(w.fs.setattr(ino, AttributeChange(size=size), opened.handle, CALLER))


@pytest.mark.clause("S533", "S390")
def test_the_next_worker_reserves_room_when_the_file_gets_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell that before: it was open, and empty."""

    async def main() -> None:
        async with made(tmp_path, session="s") as w:
            await taught(w, monkeypatch)
            opened = await opened_new(w)
        async with made(tmp_path, session="s") as w:
            offer(w, monkeypatch)
            assert w.tier.reserved_bytes == 0
            await lengthen(w, opened, FILE)
            assert w.tier.reserved_bytes == FILE
            await w.close(opened)

    trio.run(main)


@pytest.mark.clause("S533")
def test_what_is_cut_off_and_lengthened_again_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        await taught(w, monkeypatch)
        opened = await opened_new(w)
        os.pwrite(opened.backing_fd, b"x" * PROMISED, 0)
        with w.fs.lock:
            w.inner.hold.tick()
        assert w.tier.reserved_bytes == 0
        await lengthen(w, opened, 0)
        await lengthen(w, opened, PROMISED)
        assert w.tier.reserved_bytes == PROMISED
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S533")
def test_pages_that_are_there_already_take_nothing_of_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        await taught(w, monkeypatch)
        opened = await opened_new(w)
        os.pwrite(opened.backing_fd, b"x" * FILE, 0)
        for _ in range(3):
            await w.do(w.fs.fallocate(opened.handle, 0, 0, FILE))
            assert w.tier.reserved_bytes == PROMISED - FILE
        await w.close(opened)

    run(tmp_path, scenario)
