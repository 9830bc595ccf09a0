"""Which close of a descriptor counts where copies of it are open elsewhere; no clock decides."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from acpfs.filesystem import closes
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.last_close import Close, Copies, Left, Openers
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.types import Ino
from tests.filesystem.world import CALLER, KnownOpeners, World, world
from tests.rig.runtime import REAL, runtime_of

OPENER = CALLER.pid
OTHER = 7
WRITER = CALLER._replace(unique=1)
OLD = b"old and complete"
HALF = b"half of"
REST = b" what is new"


@pytest.fixture(autouse=True)
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closes, "LAST_CLOSE_WAIT_S", 0.0)


def run(
    tmp_path: Path, openers: KnownOpeners, scenario: Callable[[World], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with world(tmp_path, openers=openers, max_dirty_age_s=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            await scenario(w)

    trio.run(main)


async def half_written(w: World, pid: int = OPENER) -> tuple[Ino, OpenFile]:
    """An older version is persisted; whoever rewrites the file is in the middle of it."""
    ino = await w.write(b"f", OLD)
    await w.drained()
    opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, WRITER))
    await w.do(w.fs.write(opened.handle, 0, HALF, pid))
    return ino, opened


async def asked(w: World) -> bytes:
    """What is stored under the name when all closes are known that can be, and all is stored that
    can be.
    """
    await w.do(w.fs.settle_closes())
    await w.write(b"behind", b"x")
    await w.drained()
    assert (w.backing / "behind").exists(), "held up"
    return (w.backing / "f").read_bytes()


async def finish(w: World, opened: OpenFile) -> None:
    await w.do(w.fs.write(opened.handle, len(HALF), REST, OPENER))
    await w.close(opened, OPENER)
    await w.drained()
    assert (w.backing / "f").read_bytes() == HALF + REST


@pytest.mark.clause("S14", "S180")
@pytest.mark.parametrize("closer", [0, OPENER, OTHER], ids=["not told", "itself", "a child"])
@pytest.mark.parametrize("left", [Left.SOME, Left.UNKNOWN])
def test_while_who_opened_a_file_may_write_it_no_close_of_a_copy_publishes_it(
    tmp_path: Path, closer: int, left: Left
) -> None:
    async def scenario(w: World) -> None:
        _ino, opened = await half_written(w)
        for _each_subprocess in range(3):
            await w.do(w.fs.flush(opened.handle, closer))
            assert await asked(w) == OLD
        await finish(w, opened)

    run(tmp_path, KnownOpeners(left), scenario)


@pytest.mark.clause("S14")
def test_what_a_child_closes_while_its_parent_writes_holds_up_nothing(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        _ino, opened = await half_written(w)
        await w.do(w.fs.flush(opened.handle, OTHER))
        assert not any(op.tentative for op in w.log)
        await finish(w, opened)

    run(tmp_path, KnownOpeners(Left.SOME), scenario)


@pytest.mark.clause("S14", "S391")
@pytest.mark.parametrize("closer", [0, OPENER], ids=["not told", "itself"])
def test_a_file_whose_writer_has_closed_it_is_stored_while_a_child_keeps_a_copy(
    tmp_path: Path, closer: int
) -> None:
    async def scenario(w: World) -> None:
        _ino, opened = await half_written(w)
        await w.do(w.fs.flush(opened.handle, closer))
        assert await asked(w) == HALF
        await finish(w, opened)

    run(tmp_path, KnownOpeners(Left.NONE), scenario)


@pytest.mark.clause("S391")
@pytest.mark.parametrize("left", [Left.NONE, Left.GONE])
def test_nor_does_it_count_where_somebody_else_wrote(tmp_path: Path, left: Left) -> None:
    """As `Popen(stdout=file)`, whose parent closes its own descriptor while the child is at it."""

    async def scenario(w: World) -> None:
        _ino, opened = await half_written(w, OTHER)
        await w.do(w.fs.flush(opened.handle, OPENER))
        assert await asked(w) == OLD
        await finish(w, opened)

    run(tmp_path, KnownOpeners(left), scenario)


@pytest.mark.clause("S391")
def test_nor_in_passthrough_where_another_program_may_write(tmp_path: Path) -> None:
    async def main() -> None:
        openers = KnownOpeners(Left.NONE, Copies.PROGRAM)
        async with world(tmp_path, openers=openers, unknown_bytes=1 << 20, max_dirty_age_s=0) as w:
            ino = await w.write(b"f", OLD)
            await w.drained()
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, WRITER))
            assert opened.lane is Lane.PASSTHROUGH
            os.pwrite(opened.backing_fd, b"new", 0)
            await w.do(w.fs.flush(opened.handle, OPENER))
            assert await asked(w) == OLD
            await w.close(opened, OTHER)
            await w.drained()
            assert (w.backing / "f").read_bytes() == b"new and complete"

    trio.run(main)


@pytest.mark.clause("S466")
@pytest.mark.parametrize("left", [Left.NONE, Left.GONE])
@pytest.mark.parametrize("lane", [Lane.DIRECT, Lane.PASSTHROUGH])
def test_nor_where_nobody_who_is_seen_has_what_keeps_the_file_open(
    tmp_path: Path, lane: Lane, left: Left
) -> None:
    """It is mapped, or a copy of the descriptor is on its way through a socket: whoever has it goes
    on writing.
    """

    async def main() -> None:
        openers = KnownOpeners(left, Copies.NONE_SEEN)
        async with world(tmp_path, openers=openers, unknown_bytes=1 << 20, max_dirty_age_s=0) as w:
            ino = await w.write(b"f", OLD)
            await w.drained()
            w.inner.lanes.offer(Lane.DIRECT, passthrough=lane is Lane.PASSTHROUGH)
            opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, WRITER))
            assert opened.lane is lane
            if lane is Lane.PASSTHROUGH:
                os.pwrite(opened.backing_fd, HALF, 0)
            else:
                await w.do(w.fs.write(opened.handle, 0, HALF, OPENER))
            await w.do(w.fs.flush(opened.handle, OPENER))
            assert await asked(w) == OLD
            await w.do(w.fs.release(opened.handle))
            await w.drained()
            assert (w.backing / "f").read_bytes() == HALF

    trio.run(main)


@pytest.mark.clause("S391")
@pytest.mark.parametrize("closer", [0, OPENER], ids=["not told", "itself"])
def test_the_end_of_a_writer_counts_if_it_is_known_to_be_its_own_close(
    tmp_path: Path, closer: int
) -> None:
    async def scenario(w: World) -> None:
        _ino, opened = await half_written(w)
        await w.do(w.fs.flush(opened.handle, closer))
        assert await asked(w) == (HALF if closer else OLD)
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert (w.backing / "f").read_bytes() == HALF

    run(tmp_path, KnownOpeners(Left.GONE), scenario)


@pytest.mark.clause("S14")
def test_what_is_not_known_keeps_its_place_until_it_is_its_turn(tmp_path: Path) -> None:
    """RELEASE may be late; so long as something else is next, nothing is lost by waiting for it."""

    async def scenario(w: World) -> None:
        await w.write(b"before", b"x")  # nothing is drained yet
        opened, _attributes = await w.create(b"f")
        await w.do(w.fs.write(opened.handle, 0, HALF, OPENER))
        await w.do(w.fs.flush(opened.handle, OPENER))
        await w.write(b"latest", b"names f")
        await w.do(w.fs.settle_closes())
        assert [op.name for op in w.log] == [b"before", b"f", b"latest"]
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert (w.backing / "f").read_bytes() == HALF

    run(tmp_path, KnownOpeners(Left.UNKNOWN), scenario)


@pytest.mark.clause("S19")
def test_who_waits_for_what_is_complete_does_not_wait_for_a_close_of_which_nothing_is_known(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"before", b"x")
        opened, _attributes = await w.create(b"f")
        await w.do(w.fs.write(opened.handle, 0, HALF, OPENER))
        await w.do(w.fs.flush(opened.handle, OPENER))
        with w.fs.lock:
            known = w.fs.closes_known()
        await w.do(w.fs.settle_closes())
        assert known.done()
        assert [op.name for op in w.log] == [b"before"]
        await w.close(opened, OPENER)

    run(tmp_path, KnownOpeners(Left.UNKNOWN), scenario)


@pytest.mark.clause("S14", "S82")
@pytest.mark.parametrize("left", [Left.SOME, Left.UNKNOWN, Left.GONE])
def test_what_a_copy_closed_before_all_of_acpfs_was_killed_is_a_half_at_the_next_mount(
    tmp_path: Path, left: Left
) -> None:
    async def main() -> None:
        async with world(tmp_path, session="s", openers=KnownOpeners(Left.UNKNOWN)) as w:
            _ino, opened = await half_written(w)
            w.engine.hold(True)
            await w.do(w.fs.flush(opened.handle, OTHER))
        async with world(tmp_path, session="another", openers=KnownOpeners(left)) as w:
            await w.drained()
            assert (w.backing / "f").read_bytes() == OLD
            assert w.fs.statistics().interrupted_files == 1

    trio.run(main)


@pytest.mark.clause("S22")
@pytest.mark.parametrize("left", [Left.NONE, Left.GONE])
def test_what_its_writer_had_closed_by_then_is_complete(tmp_path: Path, left: Left) -> None:
    """The kernel's RELEASE was never read."""

    async def main() -> None:
        async with world(tmp_path, session="s") as w:
            _ino, opened = await half_written(w)
            w.engine.hold(True)
            await w.do(w.fs.flush(opened.handle, OPENER))
        async with world(tmp_path, session="another", openers=KnownOpeners(left)) as w:
            await w.drained()
            assert (w.backing / "f").read_bytes() == HALF
            assert w.fs.statistics().interrupted_files == 0

    trio.run(main)


@pytest.mark.clause("S14", "S180", "S210")
def test_the_end_of_a_mount_publishes_no_half_of_which_a_copy_was_closed(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, openers=KnownOpeners(Left.SOME)) as w:
            _ino, opened = await half_written(w)
            await w.do(w.fs.flush(opened.handle))
            with w.fs.lock:
                w.fs.freeze_all()
            await w.drained()
            assert (w.backing / "f").read_bytes() == OLD
        async with world(tmp_path) as w:
            assert w.fs.statistics().interrupted_files == 1

    trio.run(main)


@pytest.mark.clause("S181")
def test_who_is_killed_and_only_had_a_copy_leaves_no_half(tmp_path: Path) -> None:
    """A program that a save started by the way is killed; the save goes on, and has nothing left to
    write.
    """

    async def main() -> None:
        closing = {OTHER: Closing.KILL}
        async with world(
            tmp_path,
            openers=KnownOpeners(Left.SOME),
            closing=lambda pid: closing.get(pid, Closing.CALL),
        ) as w:
            _ino, opened = await half_written(w)
            await w.do(w.fs.flush(opened.handle, OTHER))
            assert w.fs.statistics().interrupted_files == 0
            await w.close(opened, OPENER)
            await w.drained()
            assert (w.backing / "f").read_bytes() == HALF

    trio.run(main)


@pytest.mark.clause("S181")
def test_a_copy_that_is_closed_makes_nothing_whole_that_a_killed_writer_left(
    tmp_path: Path,
) -> None:
    """A process that loads data inherited the descriptor; its own exec closes it."""

    async def main() -> None:
        closing = {OPENER: Closing.KILL}
        openers = KnownOpeners(Left.GONE)
        async with world(
            tmp_path, openers=openers, closing=lambda pid: closing.get(pid, Closing.CALL)
        ) as w:
            _ino, opened = await half_written(w)
            await w.do(w.fs.flush(opened.handle, OPENER))
            assert w.fs.statistics().interrupted_files == 1
            await w.close(opened, OTHER)
            await w.drained()
            assert (w.backing / "f").read_bytes() == OLD
            assert w.fs.statistics().interrupted_files == 1

    trio.run(main)


@pytest.mark.clause("S390", "S515")
def test_a_close_in_doubt_is_asked_about_in_time_however_many_workers_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six seconds after it a child still has a copy, and each second another worker came."""
    monkeypatch.setattr(closes, "LAST_CLOSE_WAIT_S", 5.0)
    began = time.monotonic()
    now = [began]
    made = partial(
        world,
        tmp_path,
        session="s",
        max_dirty_age_s=0,
        runtime=runtime_of(lambda: now[0] + time.monotonic() - began),
    )

    async def main() -> None:
        async with made() as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            ino = await w.write(b"f", OLD)
            await w.drained()
            opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, WRITER))
            await w.do(w.fs.write(opened.handle, 0, HALF))
            await w.do(w.fs.flush(opened.handle, OPENER))
        for _worker in range(6):
            now[0] += 1
            async with made() as w:
                pass
        async with made() as w:
            await w.do(w.fs.settle_closes())
            assert not any(op.tentative for op in w.log)
            assert await asked(w) == HALF

    trio.run(main)


@pytest.mark.clause("S390", "S515")
def test_a_close_does_not_lie_in_the_future_of_the_next_worker(tmp_path: Path) -> None:
    """Its time is kept in tenths of a second, and the clock stands between two of them."""
    made = partial(
        world, tmp_path, session="s", max_dirty_age_s=0, runtime=runtime_of(lambda: 1000.07)
    )

    async def main() -> None:
        async with made() as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            _ino, opened = await half_written(w)
            await w.do(w.fs.flush(opened.handle, OPENER))
        async with made() as w:
            assert 999.9 < w.inner.handles.handle(opened.handle).closed_at <= 1000.07
            await w.do(w.fs.settle_closes())
            assert not any(op.tentative for op in w.log)

    trio.run(main)


class Told(Openers):
    """What /proc tells of each process is given by the test."""

    def __init__(self, told: dict[int, Left], proc: Path) -> None:
        super().__init__("", REAL.threads, proc)
        self._told = told
        for process in told:
            (proc / str(process)).mkdir(parents=True)

    def left(self, process: int, ino: Ino) -> Left:
        return self._told[process]


@pytest.mark.clause("S466")
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("sees_writers", [False, True])
def test_a_descriptor_of_which_nobody_can_tell_whose_it_is_explains_no_copy(
    tmp_path: Path, sees_writers: bool, ended: bool
) -> None:
    """It may be of another mount, whose files have the same numbers; what keeps this file open may
    be a mapping, that nobody sees.
    """
    ino = Ino(5)
    close = Close(ino, OPENER, True, False, sees_writers, ended)
    for other, counts in (
        (Left.SOME, sees_writers),
        (Left.PERHAPS, sees_writers and ended),
        (Left.NONE, ended),
    ):
        openers = Told({OPENER: Left.NONE, OTHER: other}, tmp_path / other.value)
        assert openers.counts(close) == counts, other
        assert openers.has_any_but((OPENER,), ino) == (other is not Left.NONE)
