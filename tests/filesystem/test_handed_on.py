"""A descriptor that a process hands on to a child, through which both may write; what a rename and
a kill make of the file then.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from acpfs.filesystem import closes
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.last_close import Copies, Left
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, KnownOpeners, World, take_picture, world

PARENT = CALLER.pid
CHILD = 7
STRANGER = 9
OLD = b"old and complete"
FIRST = b"first half"
SECOND = b" and the second"


@pytest.fixture(autouse=True)
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closes, "LAST_CLOSE_WAIT_S", 0.0)


def run(
    tmp_path: Path,
    openers: KnownOpeners,
    scenario: Callable[[World, OpenFile], Awaitable[None]],
    killed: int = 0,
) -> None:
    """An older version is persisted, and the parent has opened the file to write it anew."""

    def closing(pid: int) -> Closing:
        return Closing.KILL if pid == killed else Closing.CALL

    async def main() -> None:
        async with world(tmp_path, openers=openers, closing=closing, max_dirty_age_s=0) as w:
            await scenario(w, await opened(w))

    trio.run(main)


async def opened(w: World) -> OpenFile:
    w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
    ino = await w.write(b"f", OLD)
    await w.drained()
    return await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER._replace(unique=1)))


async def stored(w: World, name: str) -> bytes:
    """When all closes are known that can be."""
    await w.do(w.fs.settle_closes())
    await w.write(b"behind", b"x")
    await w.drained()
    return (w.backing / name).read_bytes()


@pytest.mark.clause("S474")
def test_a_rename_by_who_opened_a_file_publishes_nothing_while_a_child_writes_it(
    tmp_path: Path,
) -> None:
    """As `Popen(stdout=file)`, whose parent renames the file at once."""

    async def scenario(w: World, file: OpenFile) -> None:
        await w.do(w.fs.write(file.handle, 0, FIRST, CHILD))
        await w.do(w.fs.flush(file.handle, PARENT))
        await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0, PARENT))
        assert await stored(w, "g") == OLD
        await w.do(w.fs.write(file.handle, len(FIRST), SECOND, CHILD))
        await w.close(file, CHILD)
        assert await stored(w, "g") == FIRST + SECOND

    run(tmp_path, OfChild(Left.NONE), scenario)


class OfChild(KnownOpeners):
    """The child has it as long as it lives."""

    def left(self, process: int, ino: Ino) -> Left:
        return Left.SOME if process == CHILD else self.answer


@pytest.mark.clause("S474")
def test_one_by_the_child_that_writes_it_publishes_it(tmp_path: Path) -> None:
    async def scenario(w: World, file: OpenFile) -> None:
        await w.do(w.fs.write(file.handle, 0, FIRST, CHILD))
        await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0, CHILD))
        assert await stored(w, "g") == FIRST
        await w.close(file, CHILD)

    run(tmp_path, KnownOpeners(Left.NONE), scenario)


@pytest.mark.clause("S474", "S477")
@pytest.mark.parametrize("names", ["rename", "link"])
def test_who_names_a_file_of_which_its_writer_closed_a_copy_publishes_nothing(
    tmp_path: Path, names: str
) -> None:
    """It has been closed, and whether that counts is not known yet; but its writer has another
    descriptor.
    """

    async def scenario(w: World, file: OpenFile) -> None:
        await w.do(w.fs.write(file.handle, 0, FIRST, PARENT))
        await w.do(w.fs.flush(file.handle, PARENT))
        if names == "rename":
            await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0, STRANGER))
        else:
            ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
            await w.do(w.fs.link(ino, ROOT, b"g", STRANGER))
        assert await stored(w, "g") == OLD
        await w.do(w.fs.write(file.handle, len(FIRST), SECOND, PARENT))
        await w.close(file, PARENT)
        assert await stored(w, "g") == FIRST + SECOND

    run(tmp_path, KnownOpeners(Left.SOME), scenario)


@pytest.mark.clause("S181", "S489")
def test_a_child_that_is_killed_leaves_a_half_although_its_parent_had_closed_the_file(
    tmp_path: Path,
) -> None:
    async def scenario(w: World, file: OpenFile) -> None:
        await w.do(w.fs.write(file.handle, 0, FIRST, CHILD))
        await w.do(w.fs.flush(file.handle, PARENT))
        await w.close(file, CHILD)
        assert await stored(w, "f") == OLD
        assert w.fs.statistics().interrupted_files == 1

    run(tmp_path, KnownOpeners(Left.GONE), scenario, killed=CHILD)


@pytest.mark.clause("S489")
def test_one_that_has_written_nothing_leaves_none(tmp_path: Path) -> None:
    async def scenario(w: World, file: OpenFile) -> None:
        await w.do(w.fs.write(file.handle, 0, FIRST, PARENT))
        await w.do(w.fs.flush(file.handle, PARENT))
        await w.close(file, CHILD)
        assert await stored(w, "f") == FIRST
        assert w.fs.statistics().interrupted_files == 0

    run(tmp_path, KnownOpeners(Left.GONE), scenario, killed=CHILD)


@pytest.mark.clause("S390")
def test_a_worker_that_dies_while_it_takes_a_close_back_publishes_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record says that the close is in doubt for as long as its log has it."""
    life = tmp_path / "life"
    after = tmp_path / "after"
    life.mkdir()

    async def main() -> None:
        async with world(life, session="s", max_dirty_age_s=0) as w:
            file = await opened(w)
            await w.do(w.fs.write(file.handle, 0, FIRST, PARENT))
            w.engine.hold(True)
            await w.do(w.fs.flush(file.handle, PARENT))
            commit = w.state.commit

            node = w.inner.handles.handle(file.handle).node

            def picture() -> bool:
                # Not of a commit of the steps before, which another thread may be at.
                is_written = w.tier.stat(node.body.tier).st_size == len(FIRST + SECOND)
                if is_written and not after.exists():
                    take_picture(life, after)
                return commit()

            with monkeypatch.context() as patch:
                patch.setattr(w.state, "commit", picture)
                await w.do(w.fs.write(file.handle, len(FIRST), SECOND, PARENT))
            await w.close(file, PARENT)
        async with world(
            after, session="s", openers=KnownOpeners(Left.SOME), max_dirty_age_s=0
        ) as w:
            assert await stored(w, "f") == OLD
            await w.close(file, PARENT)
            assert await stored(w, "f") == FIRST + SECOND

    trio.run(main)


@pytest.mark.clause("S477")
@pytest.mark.parametrize("copies", [Copies.PROGRAM, Copies.NONE_SEEN], ids=lambda one: one.name)
def test_whoever_has_a_file_may_be_who_wrote_it_when_only_an_earlier_worker_knew_that(
    tmp_path: Path, copies: Copies
) -> None:
    """Who opened it closes it, and another process renames it."""
    is_held = copies is Copies.PROGRAM
    life = tmp_path / "life"
    after = tmp_path / "after"
    life.mkdir()

    async def main() -> None:
        async with world(life, session="s", max_dirty_age_s=0) as w:
            file = await opened(w)
            await w.do(w.fs.write(file.handle, 0, FIRST, CHILD))
            with w.fs.lock:
                take_picture(life, after)
            await w.close(file, CHILD)
        openers = KnownOpeners(Left.NONE, copies)
        async with world(after, session="s", openers=openers, max_dirty_age_s=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            await w.do(w.fs.flush(file.handle, PARENT))
            await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0, STRANGER))
            assert await stored(w, "g") == (OLD if is_held else FIRST)
            await w.do(w.fs.write(file.handle, len(FIRST), SECOND, CHILD))
            await w.close(file, CHILD)
            assert await stored(w, "g") == FIRST + SECOND

    trio.run(main)


@pytest.mark.clause("S474")
def test_who_opened_a_file_is_at_it_for_the_next_worker_too_when_a_child_writes_on(
    tmp_path: Path,
) -> None:
    """What the last worker saw it write is in no version."""
    life = tmp_path / "life"
    after = tmp_path / "after"
    life.mkdir()

    async def main() -> None:
        async with world(life, session="s", max_dirty_age_s=0) as w:
            file = await opened(w)
            await w.do(w.fs.write(file.handle, 0, FIRST, PARENT))
            with w.fs.lock:
                take_picture(life, after)
            await w.close(file, PARENT)
        openers = KnownOpeners(Left.SOME)
        async with world(after, session="s", openers=openers, max_dirty_age_s=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            await w.do(w.fs.write(file.handle, len(FIRST), SECOND, CHILD))
            await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0, CHILD))
            assert await stored(w, "g") == OLD
            await w.close(file, PARENT)
            assert await stored(w, "g") == FIRST + SECOND

    trio.run(main)


@pytest.mark.clause("S181")
def test_a_killed_writer_leaves_a_half_although_somebody_truncates_the_file_meanwhile(
    tmp_path: Path,
) -> None:
    """Its parent closed its copy, so that a version is in doubt, when another process opens the
    file to write it anew.
    """

    async def scenario(w: World, file: OpenFile) -> None:
        await w.do(w.fs.write(file.handle, 0, FIRST, CHILD))
        await w.do(w.fs.flush(file.handle, PARENT))
        ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
        caller = CALLER._replace(pid=STRANGER, unique=2)
        other = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, caller))
        await w.close(file, CHILD)
        assert await stored(w, "f") == OLD
        await w.do(w.fs.write(other.handle, 0, SECOND, STRANGER))
        await w.close(other, STRANGER)
        assert await stored(w, "f") == SECOND

    run(tmp_path, KnownOpeners(Left.GONE), scenario, killed=CHILD)


@pytest.mark.clause("S390", "S468")
@pytest.mark.parametrize("left", [Left.SOME, Left.NONE], ids=lambda one: one.name)
def test_what_another_process_syncs_makes_no_close_count_that_was_of_a_copy(
    tmp_path: Path, left: Left
) -> None:
    """Who opened the file has closed one of two descriptors, and another one opens it to write it
    anew.
    """

    async def scenario(w: World, file: OpenFile) -> None:
        w.engine.hold(True)
        await w.do(w.fs.write(file.handle, 0, FIRST, PARENT))
        await w.do(w.fs.flush(file.handle, PARENT))
        ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
        caller = CALLER._replace(pid=STRANGER, unique=2)
        other = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, caller))
        await w.do(w.fs.write(other.handle, 0, SECOND, STRANGER))
        await w.do(w.fs.fsync(other.handle, datasync=False))
        is_held = left is Left.SOME
        versions = [op.version for op in w.log if op.ino == ino and op.version is not None]
        assert [one.size for one in versions] == [len(FIRST), len(SECOND)][is_held:]
        await w.close(other, STRANGER)
        await w.close(file, PARENT)
        assert await stored(w, "f") == SECOND

    run(tmp_path, KnownOpeners(left), scenario)
