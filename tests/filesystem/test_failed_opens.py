"""An open that truncates a file counts as its writer, and fails: what others closed meanwhile waits
for it no longer.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from acpfs.filesystem.closing import Closing
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.filesystem.steps import settled, wait
from acpfs.types import ROOT, Ino
from tests.filesystem.held_call import HeldCall
from tests.filesystem.world import CALLER, World, run

MIB = 1 << 20
SYNCED = b"s" * 4 * MIB
WHOLE = SYNCED + b"w" * MIB
"""In larger pieces than those of a log, which is good at any moment."""
OPENER = CALLER._replace(pid=7)
STRANGER = 9
KILLED = 11


def closing(pid: int) -> Closing:
    return Closing.KILL if pid == KILLED else Closing.CALL


def no_room(*_arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_copy(*_arguments: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def no_descriptor(*_arguments: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Truncation:
    """An open with O_TRUNC that stands still before it takes anything: a version's bytes are being
    copied out of its way.
    """

    def __init__(self, w: World, ino: Ino, copy: Callable[..., None]) -> None:
        self._w = w
        self._held = HeldCall(copy)
        w.tier.copy = self._held  # type: ignore[assignment, method-assign]
        self._call = w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, OPENER)
        self._future: Future[Any] = w.fs.steps.step(self._call, None)

    async def has_begun(self) -> None:
        assert await trio.to_thread.run_sync(self._held.began.wait, 60)

    async def fails(self) -> None:
        self._held.go_on.set()
        with trio.fail_after(60):
            await settled(self._future)
            with pytest.raises(OSError, match=r"No space|Input/output error"):
                self._w.fs.steps.step(self._call, self._future)


Scenario = Callable[[World, Ino, OpenFile], Awaitable[None]]


def while_a_writer_is_at_it(base: Path, then: Scenario) -> None:
    """One who only keeps the file open, and a writer that has synced it once and written more."""

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"older")
        await w.drained()
        w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
        keeper = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        assert keeper.lane is Lane.PASSTHROUGH
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        w.engine.hold(True)
        writer = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        assert writer.lane is Lane.DIRECT
        await w.do(w.fs.write(writer.handle, 0, SYNCED))
        await w.do(w.fs.fsync(writer.handle, datasync=False))
        await w.do(w.fs.write(writer.handle, len(SYNCED), WHOLE[len(SYNCED) :]))
        await then(w, ino, writer)
        await w.close(keeper)

    run(base, scenario, closing=closing)


@pytest.mark.clause("S476")
def test_what_was_closed_while_it_waited_is_published_when_it_fails(tmp_path: Path) -> None:
    async def then(w: World, ino: Ino, writer: OpenFile) -> None:
        truncation = Truncation(w, ino, no_copy)
        await truncation.has_begun()
        await w.close(writer)
        await truncation.fails()
        await w.drained()
        assert (w.backing / "f").read_bytes() == WHOLE
        assert w.fs.statistics().interrupted_files == 0

    while_a_writer_is_at_it(tmp_path, then)


@pytest.mark.clause("S193", "S476")
def test_what_it_has_truncated_is_a_half_though_somebody_keeps_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then(w: World, ino: Ino, writer: OpenFile) -> None:
        truncation = Truncation(w, ino, w.tier.copy)
        await truncation.has_begun()
        await w.close(writer)
        with monkeypatch.context() as patch:
            patch.setattr(w.inner.handles.kept, "opened", no_room)
            await truncation.fails()
        await w.drained()
        assert w.fs.statistics().interrupted_files == 1

    while_a_writer_is_at_it(tmp_path, then)
    assert (tmp_path / "backing" / "f").read_bytes() == SYNCED


@pytest.mark.clause("S474", "S476")
def test_who_renames_a_file_that_another_process_is_about_to_truncate_publishes_nothing(
    tmp_path: Path,
) -> None:
    async def then(w: World, ino: Ino, writer: OpenFile) -> None:
        truncation = Truncation(w, ino, no_copy)
        await truncation.has_begun()
        await w.close(writer)
        await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0, STRANGER))
        await w.drained()
        assert (w.backing / "g").read_bytes() == SYNCED
        await truncation.fails()
        await w.drained()
        assert (w.backing / "g").read_bytes() == WHOLE

    while_a_writer_is_at_it(tmp_path, then)


@pytest.mark.clause("S469")
def test_who_syncs_in_vain_and_has_written_nothing_keeps_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"older")
        idle = await w.do(w.fs.open(ino, os.O_WRONLY, OPENER))
        writer = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        with monkeypatch.context() as patch:
            patch.setattr(w.inner.outgrown, "check", no_room)
            with pytest.raises(OSError, match="No space"):
                await w.do(w.fs.fsync(idle.handle, datasync=False))
        await w.do(w.fs.write(writer.handle, 0, b"newer"))
        await w.close(writer)
        await w.drained()
        assert (w.backing / "f").read_bytes() == b"newer"
        await w.close(idle)

    run(tmp_path, scenario)


@pytest.mark.clause("S476")
def test_who_releases_a_file_without_a_descriptor_left_to_mark_it_is_at_it_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f.pt", SYNCED)
        await w.drained()
        writer = await w.do(w.fs.open(ino, os.O_WRONLY, OPENER))
        also = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        assert writer.lane is also.lane is Lane.PASSTHROUGH
        await w.close(also)
        os.pwrite(writer.backing_fd, b"newer", 0)
        with monkeypatch.context() as patch:
            patch.setattr(w.tier, "open", no_descriptor)
            await w.do(w.fs.release(writer.handle))
        await w.drained()
        assert (w.backing / "f.pt").read_bytes()[:5] == b"newer"

    run(tmp_path, scenario, passthrough=True)


class HeldOpens:
    """Opens that truncate a file, and stand still before they get their lanes."""

    def __init__(self, w: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self._w = w
        self._gates: list[Future[bool]] = []
        self._take = w.inner.lane_use.take
        self._calls: list[Any] = []
        self._futures: list[Future[Any]] = []
        self._patch = monkeypatch

    async def begin(self, ino: Ino, pid: int) -> None:
        """Returns when it has truncated the file."""
        with self._patch.context() as patch:
            patch.setattr(self._w.inner.lane_use, "take", self._held)
            caller = CALLER._replace(pid=pid, unique=pid)
            call = self._w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, caller)
            future: Future[Any] = self._w.fs.steps.step(call, None)
            while len(self._gates) == len(self._calls):
                await settled(future)
                future = self._w.fs.steps.step(call, future)
        self._calls.append(call)
        self._futures.append(future)

    async def _held(self, handle: Handle) -> int:
        gate: Future[bool] = Future()
        self._gates.append(gate)
        if not await wait(gate):
            no_descriptor()
        return await self._take(handle)

    async def fails(self, number: int) -> None:
        self._gates[number].set_result(False)
        await settled(self._futures[number])
        with pytest.raises(OSError, match="Too many"):
            self._w.fs.steps.step(self._calls[number], self._futures[number])

    async def succeeds(self, number: int) -> OpenFile:
        self._gates[number].set_result(True)
        await settled(self._futures[number])
        with pytest.raises(StopIteration) as ended:
            self._w.fs.steps.step(self._calls[number], self._futures[number])
        opened: OpenFile = ended.value.value
        return opened


@pytest.mark.clause("S193", "S465")
@pytest.mark.parametrize("first", [0, 1], ids=["in turn", "the other way round"])
def test_two_opens_that_truncate_and_both_fail_publish_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The second one began when the first had taken the bytes."""

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", WHOLE)
        await w.drained()
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        opens = HeldOpens(w, monkeypatch)
        await opens.begin(ino, 7)
        await opens.begin(ino, 8)
        assert w.inner.table[ino].size == 0
        for number in (first, 1 - first):
            await opens.fails(number)
        await w.drained()
        assert (w.backing / "f").read_bytes() == WHOLE
        assert w.fs.statistics().interrupted_files == 1

    run(tmp_path, scenario)


@pytest.mark.clause("S465", "S514")
@pytest.mark.parametrize("passthrough", [False, True], ids=["direct", "passthrough"])
def test_the_second_of_them_that_succeeds_ends_what_the_first_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, passthrough: bool
) -> None:
    """It found no bytes to take, and writes none."""

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", WHOLE)
        await w.drained()
        w.inner.lanes.offer(Lane.DIRECT, passthrough=passthrough)
        opens = HeldOpens(w, monkeypatch)
        await opens.begin(ino, 7)
        await opens.begin(ino, 8)
        await opens.fails(0)
        await w.close(await opens.succeeds(1))
        await w.drained()
        assert (w.backing / "f").read_bytes() == b""
        assert w.fs.statistics().interrupted_files == 0

    run(tmp_path, scenario)


@pytest.mark.clause("S465", "S476", "S514")
@pytest.mark.parametrize("released", ["before", "after"])
@pytest.mark.parametrize("passthrough", [False, True], ids=["direct", "passthrough"])
def test_what_is_written_and_closed_between_the_cut_and_the_failure_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, passthrough: bool, released: str
) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f", SYNCED)
        await w.drained()
        w.inner.lanes.offer(Lane.DIRECT, passthrough=passthrough)
        writer = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        keeper = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        opens = HeldOpens(w, monkeypatch)
        await opens.begin(ino, OPENER.pid)
        assert w.inner.table[ino].size == 0
        if passthrough:
            assert os.pwrite(writer.backing_fd, WHOLE, 0) == len(WHOLE)
        else:
            await w.do(w.fs.write(writer.handle, 0, WHOLE))
        await w.do(w.fs.flush(writer.handle, CALLER.pid))
        if released == "before":
            await w.do(w.fs.release(writer.handle))
        await opens.fails(0)
        if released == "after":
            await w.do(w.fs.release(writer.handle))
        await w.drained()
        assert (w.backing / "f").read_bytes() == WHOLE
        assert w.fs.statistics().interrupted_files == 0
        await w.close(keeper)

    run(tmp_path, scenario)


@pytest.mark.clause("S193", "S514")
def test_what_the_kernel_wrote_to_an_empty_file_just_before_the_cut_is_known_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked at before that, and had nothing: what its writer closed was published empty."""

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"")
        await w.drained()
        with w.fs.lock, w.state.step():
            w.inner.expectations.learn(b"f", len(WHOLE))
        writer = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        assert writer.lane is Lane.PASSTHROUGH
        under_way = HeldCall(int)  # the write has the lock of the file's inode
        w.tier.calls.submit(w.inner.table[ino].body.tier, under_way)
        opens = HeldOpens(w, monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opens.begin, ino, OPENER.pid)
            await trio.testing.wait_all_tasks_blocked()
            os.pwrite(writer.backing_fd, WHOLE, 0)
            under_way.go_on.set()
        assert os.fstat(writer.backing_fd).st_size == 0
        await opens.fails(0)
        await w.close(writer, CALLER.pid)
        await w.drained()
        assert w.fs.statistics().interrupted_files == 1

    run(tmp_path, scenario, passthrough=True)


@pytest.mark.clause("S181", "S193", "S514")
def test_one_that_fails_before_it_takes_anything_ends_nobodys_half(tmp_path: Path) -> None:
    """Who wrote to the file is killed while it waits."""

    async def then(w: World, ino: Ino, writer: OpenFile) -> None:
        truncation = Truncation(w, ino, no_copy)
        await truncation.has_begun()
        await w.close(writer, KILLED)
        await truncation.fails()
        await w.drained()
        assert w.fs.statistics().interrupted_files == 1

    while_a_writer_is_at_it(tmp_path, then)
    assert (tmp_path / "backing" / "f").read_bytes() == SYNCED


@pytest.mark.clause("S193", "S464", "S514")
@pytest.mark.parametrize("how", ["retry", "another one syncs"])
def test_whose_half_was_ended_ends_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A copy of the descriptor through which a process wrote that was killed is synced when an open
    has failed that had truncated the file.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"older")
        await w.drained()
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        copied = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(copied.handle, 0, WHOLE))
        await w.do(w.fs.flush(copied.handle, KILLED))
        assert w.fs.statistics().interrupted_files == 1
        if how == "retry":
            with w.fs.lock:
                assert w.inner.interrupted.store(b"f") == 1
        else:
            other = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER._replace(pid=STRANGER)))
            await w.do(w.fs.write(other.handle, 0, b"s"))
            await w.do(w.fs.fsync(other.handle, datasync=False))
            await w.close(other)
        await w.drained()
        assert (w.backing / "f").read_bytes() == WHOLE
        opens = HeldOpens(w, monkeypatch)
        await opens.begin(ino, OPENER.pid)
        await opens.fails(0)
        await w.do(w.fs.fsync(copied.handle, datasync=False))
        await w.close(copied, CALLER.pid)
        await w.drained()
        assert (w.backing / "f").read_bytes() == WHOLE
        assert w.fs.statistics().interrupted_files == 1

    run(tmp_path, scenario, closing=closing)
