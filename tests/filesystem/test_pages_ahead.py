"""Pages that are taken at the open for a file that is expected: nobody sees them, nobody goes
without because of them, and none stay.

The test is the kernel that writes in the passthrough lane. The RAM tier lies on a tmpfs, which
counts pages and nothing else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import trio

from acpfs.filesystem import pages_ahead
from acpfs.filesystem.content import contents
from acpfs.filesystem.records import AttributeChange, Attributes, Lane, OpenFile
from acpfs.filesystem.steps import settled
from acpfs.ram.control_groups import LimitedGroup, own_limits
from acpfs.ram.tier import fallocate, punch_hole
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

MIB = 1 << 20
FILE = 8 * MIB
PIECE = 128 << 10
KEEP_SIZE = 1

pytestmark = pytest.mark.clause("S272")
Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def run(base: Path, *scenarios: Scenario, session: str = "", **changes: Any) -> None:
    """Each scenario with a worker of its own, one after the other."""

    async def main() -> None:
        for scenario in scenarios:
            async with world(
                base, **{"limits": lambda _pid: own_limits(), "session": session, **changes}
            ) as w:
                w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
                await scenario(w)

    trio.run(main)


def taken(w: World) -> int:
    return w.fs.statistics().tier.used_bytes


def pages(w: World, ino: Ino) -> int:
    """Of one file, without the copies that small versions are."""
    body = w.inner.table[ino].body
    return w.tier.stat(body.tier).st_blocks * 512


def write(opened: OpenFile, size: int, start: int = 0) -> None:
    """In small pieces, as the kernel does it."""
    assert opened.lane is Lane.PASSTHROUGH
    for offset in range(start, start + size, PIECE):
        os.pwrite(opened.backing_fd, b"x" * min(PIECE, start + size - offset), offset)


async def expect(w: World, size: int = FILE) -> None:
    """Teach it how large `model-N.pt` is; nothing of that stays in RAM."""
    with w.fs.lock:  # the engine's first thread is at work on the same state
        w.inner.expectations.learn(b"model-0.pt", size)


async def opened_new(w: World, name: bytes = b"model-1.pt") -> tuple[OpenFile, Attributes]:
    return await w.create(name)


async def closed(w: World, opened: OpenFile) -> None:
    """And stored: until then a small version is a copy of its own."""
    await w.close(opened)
    await w.drained()


async def attributes(w: World, ino: Ino) -> Attributes:
    return await w.do(w.fs.getattr(ino))


def test_a_file_has_its_pages_before_it_is_written_and_nobody_sees_them(base: Path) -> None:
    async def scenario(w: World) -> None:
        await expect(w)
        opened, made = await opened_new(w)
        assert taken(w) == FILE
        assert os.fstat(opened.backing_fd).st_size == 0
        seen = await attributes(w, made.ino)
        assert (seen.size, seen.blocks, seen.mtime_ns) == (0, 0, made.mtime_ns)
        write(opened, 3 * MIB)
        assert ((await attributes(w, made.ino)).size, (await attributes(w, made.ino)).blocks) == (
            3 * MIB,
            4 * MIB // 512,
        )
        assert taken(w) == FILE
        write(opened, FILE - 3 * MIB, 3 * MIB)
        await closed(w, opened)
        assert taken(w) == FILE
        assert (w.backing / "model-1.pt").read_bytes() == b"x" * FILE

    run(base, scenario)


@pytest.mark.parametrize("given_back", [False, True])
@pytest.mark.parametrize("mode", [0, KEEP_SIZE])
def test_what_was_taken_is_not_allocated_again_for_its_user(
    base: Path, monkeypatch: pytest.MonkeyPatch, mode: int, given_back: bool
) -> None:
    """The kernel would fill it with zeros: numpy.save allocates what it is about to write."""

    async def scenario(w: World) -> None:
        await expect(w)
        opened, made = await opened_new(w)
        write(opened, PIECE)
        if given_back:
            punch_hole(opened.backing_fd, 4 * MIB, 2 * MIB)
        asked: list[tuple[int, int]] = []

        def noted(fd: int, mode: int, offset: int, length: int) -> None:
            asked.append((offset, length))
            fallocate(fd, mode, offset, length)

        monkeypatch.setattr(contents, "fallocate", noted)
        await w.do(w.fs.fallocate(opened.handle, mode, 100, FILE))
        assert asked == ([(100, FILE)] if given_back else [(FILE, 100)])
        assert taken(w) >= FILE
        assert (await attributes(w, made.ino)).size == (PIECE if mode else FILE + 100)
        await w.do(w.fs.fallocate(opened.handle, mode, 0, 3 * MIB))
        assert asked[1:] == [(0, 3 * MIB)], "what its user has allocated is the kernel's business"
        await closed(w, opened)
        assert taken(w) >= FILE, "its user has asked for them"
        stored = (w.backing / "model-1.pt").read_bytes()
        assert stored == b"x" * PIECE + bytes(0 if mode else FILE + 100 - PIECE)

    run(base, scenario)


@pytest.mark.parametrize("mode", [0, KEEP_SIZE])
def test_an_allocation_within_what_was_taken_takes_nothing_and_lengthens(
    base: Path, mode: int
) -> None:
    async def scenario(w: World) -> None:
        await expect(w)
        opened, made = await opened_new(w)
        before = taken(w)
        await w.do(w.fs.fallocate(opened.handle, mode, 0, 3 * MIB))
        assert taken(w) == before
        assert (await attributes(w, made.ino)).size == (0 if mode else 3 * MIB)
        await closed(w, opened)
        assert (w.backing / "model-1.pt").stat().st_size == (0 if mode else 3 * MIB)

    run(base, scenario)


def test_what_was_not_needed_goes_at_the_last_close_and_is_not_taken_again(base: Path) -> None:
    async def scenario(w: World) -> None:
        await expect(w)
        opened, made = await opened_new(w)
        write(opened, MIB)
        await w.do(w.fs.setattr(made.ino, AttributeChange(mtime_ns=12345), opened.handle, CALLER))
        await closed(w, opened)
        assert taken(w) <= 2 * MIB
        seen = await attributes(w, made.ino)
        assert (seen.size, seen.mtime_ns) == (MIB, 12345)
        stored = (w.backing / "model-1.pt").stat()
        assert (stored.st_size, stored.st_mtime_ns) == (MIB, 12345)
        before = taken(w)
        again, _made = await opened_new(w, b"model-2.pt")
        assert again.lane is Lane.PASSTHROUGH
        assert taken(w) == before, "the last one like it did not need them"
        await w.close(again)

    run(base, scenario)


def test_holes_stay_holes(base: Path) -> None:
    async def scenario(w: World) -> None:
        await expect(w)
        opened, made = await opened_new(w)
        write(opened, PIECE)
        write(opened, PIECE, 6 * MIB)
        assert os.lseek(opened.backing_fd, 4 * MIB, os.SEEK_DATA) == 6 * MIB
        await closed(w, opened)
        assert taken(w) <= 4 * MIB
        assert (await attributes(w, made.ino)).blocks * 512 == taken(w)
        data = (w.backing / "model-1.pt").read_bytes()
        assert data == b"x" * PIECE + bytes(6 * MIB - PIECE) + b"x" * PIECE

    run(base, scenario)


def test_a_large_file_gets_the_rest_behind_the_open(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody moves its bytes out of RAM meanwhile: a hole behind its writer would become zeros."""
    monkeypatch.setattr(pages_ahead, "PIECE_BYTES", 2 * MIB)
    at_work = list[int]()

    async def scenario(w: World) -> None:
        def noted(*arguments: int) -> None:
            at_work.append(sum(node.body.in_flight for node in w.inner.table))
            fallocate(*arguments)

        monkeypatch.setattr(pages_ahead, "fallocate", noted)
        await expect(w)
        opened, made = await opened_new(w)
        assert taken(w) >= 2 * MIB
        tier_id = w.inner.table[made.ino].body.tier
        with trio.fail_after(60):
            while taken(w) < FILE:  # piece by piece, and between two of them it is our turn
                await settled(w.tier.calls.submit(tier_id, int))
        assert at_work == [0, *[1] * (FILE // (2 * MIB) - 1)]  # the first under the lock
        write(opened, 3 * MIB)
        await closed(w, opened)
        assert taken(w) <= 4 * MIB

    run(base, scenario)


def test_the_rest_is_not_taken_where_somebody_goes_by_the_mtime_or_nobody_writes(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_ahead, "PIECE_BYTES", 2 * MIB)

    async def scenario(w: World) -> None:
        rests: list[tuple[Any, ...]] = []
        submit = w.tier.calls.submit

        def take_later(*words: Any) -> Future[Any]:
            if words[1] == w.inner.ahead._take_piece:
                rests.append(words[1:])
                return Future()
            return submit(*words)

        monkeypatch.setattr(w.tier.calls, "submit", take_later)
        for change in ("times", "closed"):
            with w.fs.lock:
                w.inner.expectations.learn(f"{change}-0.pt".encode(), FILE)
            before = taken(w)
            opened, made = await opened_new(w, f"{change}-1.pt".encode())
            if change == "times":
                await w.do(
                    w.fs.setattr(made.ino, AttributeChange(mtime_ns=12345), opened.handle, CALLER)
                )
            else:
                await w.close(opened)
            while rests:
                rest, *words = rests.pop(0)
                rest(*words)
            assert (await attributes(w, made.ino)).mtime_ns == (
                12345 if change == "times" else made.mtime_ns
            )
            if change == "times":
                await w.close(opened)
            assert taken(w) == before

    run(base, scenario)


def test_no_pages_are_taken_where_ram_is_not_plentiful(base: Path) -> None:
    async def scenario(w: World) -> None:
        await expect(w)
        await w.write(b"dirty", b"d" * 38 * MIB)
        opened, _made = await opened_new(w)
        assert opened.lane is Lane.PASSTHROUGH
        assert taken(w) == 38 * MIB
        await w.close(opened)

    run(base, scenario)


def test_no_pages_are_taken_for_a_writer_that_pays_for_its_own(base: Path) -> None:
    group = base / "group"
    group.mkdir()
    (group / "memory.max").write_text(f"{1 << 40}\n")
    (group / "memory.current").write_text("0\n")

    async def scenario(w: World) -> None:
        await expect(w)
        opened, _made = await opened_new(w)
        assert opened.lane is Lane.PASSTHROUGH
        assert taken(w) == 0
        await w.close(opened)

    run(base, scenario, limits=lambda _pid: [*own_limits(), LimitedGroup(group, 1 << 40)])


def test_what_the_program_itself_allocates_stays(base: Path) -> None:
    async def scenario(w: World) -> None:
        await expect(w)
        opened, made = await opened_new(w)
        await w.do(w.fs.fallocate(opened.handle, KEEP_SIZE, 0, FILE))
        write(opened, MIB)
        assert (await attributes(w, made.ino)).blocks == FILE // 512
        await closed(w, opened)
        assert taken(w) == FILE

    run(base, scenario)


def test_where_small_writes_get_pages_as_large_nothing_is_taken(base: Path) -> None:
    async def scenario(w: World) -> None:
        w.tier.large_pages = False
        await expect(w)
        opened, _made = await opened_new(w)
        assert taken(w) == 0
        await w.close(opened)

    run(base, scenario)


def test_one_that_is_deleted_while_it_is_written_leaves_nothing(base: Path) -> None:
    async def scenario(w: World) -> None:
        await expect(w)
        opened, _made = await opened_new(w)
        write(opened, MIB)
        await w.do(w.fs.unlink(ROOT, b"model-1.pt"))
        await w.close(opened)
        assert taken(w) == 0

    run(base, scenario)


def test_one_that_is_truncated_while_it_is_written(base: Path) -> None:
    async def scenario(w: World) -> None:
        await expect(w)
        opened, made = await opened_new(w)
        write(opened, FILE)
        await w.do(w.fs.setattr(made.ino, AttributeChange(size=0), opened.handle, CALLER))
        assert (await attributes(w, made.ino)).size == 0
        write(opened, MIB)
        await closed(w, opened)
        assert taken(w) <= 2 * MIB
        assert (w.backing / "model-1.pt").read_bytes() == b"x" * MIB

    run(base, scenario)


@pytest.mark.parametrize("written", [0, 3 * MIB])
def test_the_next_worker_gives_back_what_the_killed_one_had_taken(base: Path, written: int) -> None:
    kept: list[tuple[OpenFile, Ino, int]] = []

    async def killed(w: World) -> None:
        await expect(w)
        opened, made = await opened_new(w)
        kept.append((opened, made.ino, os.dup(opened.backing_fd)))
        write(opened, written)

    async def goes_on(w: World) -> None:
        (opened, ino, fd) = kept.pop()
        assert taken(w) == FILE
        seen = await attributes(w, ino)
        assert seen.size == written
        os.pwrite(fd, b"x" * PIECE, written)
        os.close(fd)
        await closed(w, opened)
        assert taken(w) <= written + 2 * MIB
        assert (w.backing / "model-1.pt").read_bytes() == b"x" * (written + PIECE)

    run(base, killed, goes_on, session="one")


def test_after_a_new_mount_nothing_of_them_is_left(base: Path) -> None:
    async def lost(w: World) -> None:
        await expect(w)
        opened, _made = await opened_new(w)
        write(opened, MIB)
        assert taken(w) == FILE

    async def found(w: World) -> None:
        assert taken(w) <= 2 * MIB
        [report] = w.fs.files_report(b"model-1.pt")
        assert report.size == MIB

    run(base, lost, found)


def test_pages_stay_while_a_write_without_the_lock_is_under_way(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = Event()
    goes_on = Event()
    over = Event()
    pwrite = os.pwrite

    def held_write(fd: int, data: bytes, offset: int) -> int:
        under_way.set()
        assert goes_on.wait(60)
        try:
            return pwrite(fd, data, offset)
        finally:
            over.set()

    def just_before(fd: int, offset: int, length: int) -> None:
        if under_way.is_set():
            goes_on.set()
            assert over.wait(60)
        punch_hole(fd, offset, length)

    async def scenario(w: World) -> None:
        rests: list[tuple[Any, ...]] = []

        def give_the_rest_back() -> None:
            while rests:
                rest, *words = rests.pop()
                rest(*words)

        await expect(w)
        opened, made = await opened_new(w)
        write(opened, PIECE)
        other = await w.do(w.fs.open(made.ino, os.O_WRONLY | os.O_SYNC, CALLER))
        assert other.lane is not Lane.PASSTHROUGH
        monkeypatch.setattr(pages_ahead, "PIECE_BYTES", 2 * MIB)
        monkeypatch.setattr(
            w.inner.ahead._threads, "submit", lambda *words: rests.append(words[1:])
        )
        await w.close(opened)
        assert rests
        monkeypatch.undo()
        monkeypatch.setattr(os, "pwrite", held_write)
        monkeypatch.setattr(pages_ahead, "punch_hole", just_before)
        async with trio.open_nursery() as nursery:
            call = w.fs.write(other.handle, 3 * MIB, b"y" * PIECE)
            nursery.start_soon(trio.to_thread.run_sync, partial(w.fs.steps.run, call))
            await trio.to_thread.run_sync(under_way.wait, 60)
            give_the_rest_back()
            goes_on.set()
        monkeypatch.undo()
        await w.do(w.fs.write(other.handle, 6 * MIB, b"y" * PIECE))
        assert pages(w, made.ino) <= 6 * MIB, "given back when the last write was over"
        await closed(w, other)
        data = (w.backing / "model-1.pt").read_bytes()
        assert data[3 * MIB :] == b"y" * PIECE + bytes(3 * MIB - PIECE) + b"y" * PIECE

    run(base, scenario, hold=False)


def test_much_is_given_back_in_pieces(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(w: World) -> None:
        rests: list[tuple[Any, ...]] = []
        await expect(w)
        opened, made = await opened_new(w)
        write(opened, PIECE)
        write(opened, PIECE, 3 * MIB)
        seen = await attributes(w, made.ino)
        monkeypatch.setattr(pages_ahead, "PIECE_BYTES", 2 * MIB)
        monkeypatch.setattr(
            w.inner.ahead._threads, "submit", lambda *words: rests.append(words[1:])
        )
        await w.close(opened)
        assert pages(w, made.ino) == FILE - 2 * MIB
        again = await w.do(w.fs.open(made.ino, os.O_WRONLY, CALLER))
        write(again, PIECE, 7 * MIB)
        rest, *words = rests.pop()
        rest(*words)
        assert pages(w, made.ino) == FILE - 2 * MIB + PIECE, "somebody may be writing there now"
        await w.close(again)
        rest, *words = rests.pop()
        rest(*words)
        assert pages(w, made.ino) <= 4 * MIB + PIECE
        assert (await attributes(w, made.ino)).mtime_ns >= seen.mtime_ns
        await w.drained()
        data = (w.backing / "model-1.pt").read_bytes()
        assert [at for at in range(0, len(data), PIECE) if any(data[at : at + PIECE])] == [
            0,
            3 * MIB,
            7 * MIB,
        ]

    run(base, scenario)
