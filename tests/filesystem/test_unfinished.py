"""What is being written is never published: not by a change of workers, not by its age, not because
its writer was killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from acpfs.config import WhenKilled
from acpfs.filesystem import closes
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content.body import LOG_PIECE_BYTES_MAX
from acpfs.filesystem.records import AttributeChange, Lane, OpenFile
from acpfs.types import Ino
from tests.filesystem.world import CALLER, World, world

OLD = b"old and complete"
HALF = b"half of"
REST = b" what is new"


def stored(w: World) -> list[bytes]:
    """Names of the files that the log would store."""
    return [op.name for op in w.log if op.version is not None]


@pytest.mark.clause("S6", "S7", "S12", "S81")
def test_a_change_of_workers_publishes_nothing_that_is_being_written(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, session="s") as w:
            new, attributes = await w.create(b"new")
            ino = await w.write(b"rewritten", OLD)
            await w.drained()
            w.engine.hold(True)
            again = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
            await w.do(w.fs.write(new.handle, 0, HALF))
            await w.do(w.fs.write(again.handle, 0, HALF))
        taken_over = time.monotonic()
        async with world(tmp_path, session="s", max_dirty_age_s=86_400) as w:
            with w.fs.lock:
                assert all(
                    w.inner.table[found].body.modified_since >= taken_over
                    for found in (attributes.ino, ino)
                ), "they begin anew"
                assert w.fs.freeze_old() == 0
            assert stored(w) == []
            for opened in (new, again):
                await w.do(w.fs.write(opened.handle, len(HALF), REST))
                await w.close(opened)
            await w.drained()
            assert (
                (w.backing / "new").read_bytes()
                == (w.backing / "rewritten").read_bytes()
                == HALF + REST
            )

    trio.run(main)


# -- age

WRITER = CALLER._replace(unique=1)
"""The next worker would take another request of the same number for the one that opened the
file.
"""
AGE_S = 1e-9
"""Everything is older."""
LARGE = b"l" * (LOG_PIECE_BYTES_MAX + 1)
Scenario = Callable[[World, Ino], Awaitable[OpenFile]]


async def append_lines(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
    await w.do(w.fs.write(opened.handle, len(OLD), b"line"))
    await w.do(w.fs.write(opened.handle, len(OLD) + 4, b"line"))
    return opened


async def append_by_flag(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_APPEND, WRITER))
    await w.do(w.fs.write(opened.handle, len(OLD), LARGE))
    return opened


async def append_after_a_sync(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, WRITER))
    await w.do(w.fs.write(opened.handle, 0, OLD))
    await w.do(w.fs.fsync(opened.handle, False))
    await w.drained()
    await w.do(w.fs.write(opened.handle, len(OLD), b"line"))
    return opened


async def hand_on_and_append(w: World, ino: Ino) -> OpenFile:
    """As `Popen(stdout=open("log", "a"))`, whose parent closes its copy."""
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
    await w.do(w.fs.write(opened.handle, len(OLD), b"head"))
    await w.do(w.fs.flush(opened.handle))
    await w.do(w.fs.write(opened.handle, len(OLD) + 4, b"line"))
    return opened


async def append_in_passthrough(w: World, ino: Ino) -> OpenFile:
    w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
    opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_APPEND, WRITER))
    assert opened.lane is Lane.PASSTHROUGH
    os.pwrite(opened.backing_fd, b"line", len(OLD))
    return opened


async def rewrite(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, WRITER))
    await w.do(w.fs.write(opened.handle, 0, b"first of many"))
    return opened


async def overwrite(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
    await w.do(w.fs.write(opened.handle, 0, b"OLD"))
    return opened


async def append_and_go_back(w: World, ino: Ino) -> OpenFile:
    opened = await append_lines(w, ino)
    await w.do(w.fs.write(opened.handle, len(OLD), b"L"))
    return opened


async def leave_a_hole(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
    await w.do(w.fs.write(opened.handle, 4096, b"line"))
    return opened


async def append_much(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
    await w.do(w.fs.write(opened.handle, len(OLD), LARGE))
    return opened


async def cut(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
    await w.do(w.fs.setattr(ino, AttributeChange(size=3), opened.handle, WRITER))
    return opened


async def allocate(w: World, ino: Ino) -> OpenFile:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
    await w.do(w.fs.fallocate(opened.handle, 0, 0, 4096))
    return opened


async def hand_on_and_rewrite(w: World, ino: Ino) -> OpenFile:
    opened = await rewrite(w, ino)
    await w.do(w.fs.flush(opened.handle))
    await w.do(w.fs.write(opened.handle, len(b"first of many"), b"line"))
    return opened


async def write_in_passthrough(w: World, ino: Ino) -> OpenFile:
    w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
    assert opened.lane is Lane.PASSTHROUGH
    os.pwrite(opened.backing_fd, b"OLD", 0)
    return opened


LOGS = [
    append_lines,
    append_by_flag,
    append_after_a_sync,
    hand_on_and_append,
    append_in_passthrough,
]
WHOLES = [
    rewrite,
    overwrite,
    append_and_go_back,
    leave_a_hole,
    append_much,
    cut,
    allocate,
    hand_on_and_rewrite,
    write_in_passthrough,
]


def grow_old(base: Path, scenario: Scenario, *, published: bool, session: str = "") -> None:
    """A file that is stored is changed and stays open until it is old: in this worker's life or,
    with a session, in the next one's.
    """

    async def main() -> None:
        async with world(base, session=session, unknown_bytes=1 << 20, max_dirty_age_s=AGE_S) as w:
            ino = await w.write(b"f", OLD)
            await w.drained()
            opened = await scenario(w, ino)
            if not session:
                await look(w, opened)
        if session:
            async with world(base, session=session, max_dirty_age_s=AGE_S) as w:
                await look(w, opened)

    async def look(w: World, opened: OpenFile) -> None:
        assert await w.freeze_old() == published
        await w.drained()
        ino = (await w.do(w.fs.lookup(Ino(1), b"f"))).ino
        shown = await w.read(ino)
        assert shown != OLD
        assert (w.backing / "f").read_bytes() == (shown if published else OLD)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "f").read_bytes() == shown

    trio.run(main)


@pytest.mark.clause("S12")
@pytest.mark.parametrize("scenario", LOGS)
def test_a_log_that_stays_open_is_published_by_its_age(tmp_path: Path, scenario: Scenario) -> None:
    grow_old(tmp_path, scenario, published=True)


@pytest.mark.clause("S180")
@pytest.mark.parametrize("scenario", WHOLES)
def test_what_is_being_rewritten_is_not_published_by_its_age(
    tmp_path: Path, scenario: Scenario
) -> None:
    grow_old(tmp_path, scenario, published=False)


@pytest.mark.clause("S180", "S81")
@pytest.mark.parametrize("scenario", WHOLES)
def test_nor_by_its_age_in_the_life_of_the_next_worker(tmp_path: Path, scenario: Scenario) -> None:
    grow_old(tmp_path, scenario, published=False, session="s")


@pytest.mark.clause("S180")
def test_a_new_file_is_published_by_its_age_if_it_is_a_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, max_dirty_age_s=AGE_S) as w:
            log, _attributes = await w.create(b"log")
            shard, _attributes = await w.create(b"shard")
            await w.do(w.fs.write(log.handle, 0, b"line"))
            await w.do(w.fs.write(shard.handle, 0, LARGE))
            with w.fs.lock:
                assert w.fs.freeze_old() == 1
            assert stored(w) == [b"log"]

    trio.run(main)


@pytest.mark.clause("S180", "S82")
def test_the_end_of_a_mount_beneath_a_writer_publishes_no_half(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            log, _attributes = await w.create(b"log")
            await w.do(w.fs.write(log.handle, 0, b"line"))
            ino = await w.write(b"closed", OLD)
            half = await w.write(b"half", OLD)
            await w.drained()
            w.engine.hold(True)
            closed = await rewrite(w, ino)
            await w.do(w.fs.flush(closed.handle))
            await w.do(w.fs.write(closed.handle, 0, b"the last of a mapping"))
            await rewrite(w, half)
            with w.fs.lock:
                w.fs.freeze_all()
            assert sorted(stored(w)) == [b"closed", b"log"]
        async with world(tmp_path) as w:
            await w.drained()
            assert w.fs.statistics().interrupted_files == 1
            assert (w.backing / "half").read_bytes() == OLD
            assert (w.backing / "closed").read_bytes() == b"the last of a mapping"

    trio.run(main)


# -- writers that are killed

LIVES = 1
ENDS = 2
IS_KILLED = 3


def closing(pid: int) -> Closing:
    return {ENDS: Closing.END, IS_KILLED: Closing.KILL}.get(pid, Closing.CALL)


async def after(w: World) -> bytes:
    """What the backing directory has of the file when all is drained that drains by itself."""
    await w.drained()
    return (w.backing / "f").read_bytes()


async def shown(w: World) -> bytes:
    return await w.read((await w.do(w.fs.lookup(Ino(1), b"f"))).ino)


def kill_a_writer(
    base: Path,
    scenario: Scenario,
    then: Callable[[World, OpenFile], Awaitable[None]],
    session: str = "",
) -> None:
    """The writer of a file that is stored is killed; `then` happens before the kernel lets the open
    file go.
    """

    async def main() -> None:
        async with world(
            base, closing=closing, session=session, unknown_bytes=1 << 20, max_dirty_age_s=0
        ) as w:
            ino = await w.write(b"f", OLD)
            await w.drained()
            opened = await scenario(w, ino)
            await w.do(w.fs.flush(opened.handle, IS_KILLED))
            if not session:
                await then(w, opened)
        if session:
            async with world(base, closing=closing, session=session, max_dirty_age_s=0) as w:
                await then(w, opened)

    trio.run(main)


async def is_interrupted(w: World, opened: OpenFile) -> None:
    await w.do(w.fs.release(opened.handle))
    half = await shown(w)
    assert half != OLD
    assert await after(w) == OLD
    assert w.fs.statistics().interrupted_files == 1
    assert [report.state for report in w.fs.files_report()] == ["interrupted"]
    with w.fs.lock:
        assert w.inner.interrupted.store(b"f") == 1
    assert await after(w) == half
    assert w.fs.statistics().interrupted_files == 0


@pytest.mark.clause("S181")
@pytest.mark.parametrize("scenario", WHOLES)
def test_a_writer_that_is_killed_replaces_nothing(tmp_path: Path, scenario: Scenario) -> None:
    kill_a_writer(tmp_path, scenario, is_interrupted)


@pytest.mark.clause("S181", "S81")
@pytest.mark.parametrize("scenario", [rewrite, write_in_passthrough])
def test_nor_in_the_life_of_the_next_worker(tmp_path: Path, scenario: Scenario) -> None:
    kill_a_writer(tmp_path, scenario, is_interrupted, session="s")


@pytest.mark.clause("S181")
@pytest.mark.parametrize("scenario", LOGS)
def test_a_log_whose_writer_is_killed_is_published(tmp_path: Path, scenario: Scenario) -> None:
    async def then(w: World, opened: OpenFile) -> None:
        await w.do(w.fs.release(opened.handle))
        assert await after(w) == await shown(w) != OLD

    kill_a_writer(tmp_path, scenario, then)


@pytest.mark.clause("S181")
def test_what_a_killed_writer_has_synced_is_published(tmp_path: Path) -> None:
    async def scenario(w: World, ino: Ino) -> OpenFile:
        opened = await rewrite(w, ino)
        await w.do(w.fs.fsync(opened.handle, False))
        return opened

    async def then(w: World, opened: OpenFile) -> None:
        await w.do(w.fs.release(opened.handle))
        assert await after(w) == b"first of many"

    kill_a_writer(tmp_path, scenario, then)


@pytest.mark.clause("S181")
@pytest.mark.parametrize("pid", [LIVES, ENDS])
def test_a_process_that_ends_without_closing_publishes_what_it_wrote(
    tmp_path: Path, pid: int
) -> None:
    async def main() -> None:
        async with world(tmp_path, closing=closing) as w:
            opened = await rewrite(w, await w.write(b"f", OLD))
            await w.close(opened, pid)
            assert await after(w) == b"first of many"

    trio.run(main)


@pytest.mark.clause("S181")
def test_a_setting_publishes_halves(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, closing=closing, when_killed=WhenKilled.PUBLISH) as w:
            opened = await rewrite(w, await w.write(b"f", OLD))
            await w.close(opened, IS_KILLED)
            assert await after(w) == b"first of many"

    trio.run(main)


async def close_a_copy(w: World, opened: OpenFile) -> None:
    await w.do(w.fs.flush(opened.handle, LIVES))


async def sync_a_copy(w: World, opened: OpenFile) -> None:
    await w.do(w.fs.fsync(opened.handle, False))
    await w.do(w.fs.flush(opened.handle, ENDS))


async def write_through_a_copy(w: World, opened: OpenFile) -> None:
    await w.do(w.fs.write(opened.handle, 0, b"F"))
    await w.do(w.fs.flush(opened.handle, ENDS))


@pytest.mark.clause("S181")
@pytest.mark.parametrize("use", [close_a_copy, sync_a_copy, write_through_a_copy])
def test_who_has_a_copy_of_the_descriptor_and_lives_decides(
    tmp_path: Path, use: Callable[[World, OpenFile], Awaitable[None]]
) -> None:
    async def then(w: World, opened: OpenFile) -> None:
        assert await after(w) == OLD
        await use(w, opened)
        await w.do(w.fs.release(opened.handle))
        assert (await after(w)).lower() == b"first of many"

    kill_a_writer(tmp_path, rewrite, then)


@pytest.mark.clause("S181")
def test_a_copy_in_the_hands_of_a_process_that_ends_later_decides_nothing(tmp_path: Path) -> None:
    async def then(w: World, opened: OpenFile) -> None:
        await w.do(w.fs.flush(opened.handle, ENDS))
        await is_interrupted(w, opened)

    kill_a_writer(tmp_path, rewrite, then)


@pytest.mark.clause("S181")
def test_one_that_goes_on_in_passthrough_publishes_it_by_its_close(tmp_path: Path) -> None:
    async def then(w: World, opened: OpenFile) -> None:
        await w.do(w.fs.release(opened.handle))
        ino = (await w.do(w.fs.lookup(Ino(1), b"f"))).ino
        again = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
        assert again.lane is Lane.PASSTHROUGH
        assert await after(w) == OLD
        os.pwrite(again.backing_fd, b"new", 0)
        await w.close(again)
        assert await after(w) == b"new and complete"

    kill_a_writer(tmp_path, write_in_passthrough, then)


@pytest.mark.clause("S181")
@pytest.mark.parametrize("scenario", [rewrite, overwrite, append_much])
def test_discarding_a_half_shows_what_was_complete_before(
    tmp_path: Path, scenario: Scenario
) -> None:
    """Also where that is on its way: it is not yet on the backing directory."""

    async def main() -> None:
        async with world(tmp_path, closing=closing) as w:
            ino = await w.write(b"f", b"older")
            await w.drained()
            w.engine.hold(True)
            await w.write(b"f", OLD)
            await w.close(await scenario(w, ino), IS_KILLED)
            with w.fs.lock:
                assert w.inner.interrupted.discard(b"f") == (1, [])
            assert await shown(w) == OLD
            assert (await w.do(w.fs.getattr(ino))).size == len(OLD)
            assert await after(w) == OLD
            assert await shown(w) == OLD
            await w.write(b"f", b"next")
            assert await after(w) == b"next"

    trio.run(main)


# -- copies of descriptors


@pytest.mark.clause("S14", "S180")
@pytest.mark.parametrize("session", ["", "s"], ids=["", "by the next worker"])
@pytest.mark.parametrize("goes_on", [True, False], ids=["written to", "unused"])
def test_a_copy_that_is_written_to_in_passthrough_is_not_taken_for_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: str, *, goes_on: bool
) -> None:
    """A program writes a file and has a child that closes its copy of the descriptor: nothing tells
    of the writes that follow.
    """
    monkeypatch.setattr(closes, "LAST_CLOSE_WAIT_S", 0.0)

    async def main() -> None:
        async with world(tmp_path, session=session, unknown_bytes=1 << 20, max_dirty_age_s=0) as w:
            ino = await w.write(b"f", OLD)
            await w.drained()
            opened = await write_in_passthrough(w, ino)
            await w.do(w.fs.flush(opened.handle))
            if goes_on:
                os.pwrite(opened.backing_fd, b"new", 0)
            if not session:
                await look(w, opened)
        if session:
            async with world(tmp_path, session=session, max_dirty_age_s=0) as w:
                await look(w, opened)

    async def look(w: World, opened: OpenFile) -> None:
        await w.do(w.fs.settle_closes())
        assert await after(w) == (OLD if goes_on else b"OLD and complete")
        await w.close(opened)
        assert await after(w) == (b"new and complete" if goes_on else b"OLD and complete")

    trio.run(main)


@pytest.mark.clause("S14")
def test_more_copies_that_are_closed_do_not_put_off_the_moment_when_the_first_close_counts(
    tmp_path: Path,
) -> None:
    """Each child that a program starts closes one."""

    async def main() -> None:
        async with world(tmp_path) as w:
            opened, _attributes = await w.create(b"f")
            await w.do(w.fs.write(opened.handle, 0, OLD))
            await w.do(w.fs.flush(opened.handle))
            closed_at = w.inner.handles.handle(opened.handle).closed_at
            await w.do(w.fs.flush(opened.handle))
            assert w.inner.handles.handle(opened.handle).closed_at == closed_at

    trio.run(main)
