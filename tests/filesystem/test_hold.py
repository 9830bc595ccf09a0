"""When passthrough writers are held and let go: the test is the kernel, and takes the inode locks.

It writes to the descriptor that an open in the passthrough lane hands out, and calls `tick` where a
transport's thread would.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem import hold
from acpfs.filesystem.expectations import Use
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.ram import shortage
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.clause("S60")

MIB = 1 << 20
BUDGET = 64 * MIB


class Kernel:
    """Double of what takes inode locks: at once, and without a kernel."""

    def __init__(self, w: World) -> None:
        self._w = w
        self.locks: dict[Ino, Future[bool]] = {}
        self.retakes = True
        self.is_there = True
        """Whether anybody takes locks."""
        w.inner.hold.offer(self)

    def take(self, ino: Ino) -> None:
        if not self.is_there:
            return
        until = self._w.inner.hold.taken(ino)
        assert until is not None
        self.locks[ino] = until
        until.add_done_callback(
            lambda done: self.take(ino) if self.retakes and done.result() else None
        )

    def look_soon(self) -> None:
        """The test calls `tick` itself."""

    def is_held(self, ino: Ino) -> bool:
        return ino in self.locks and not self.locks[ino].done()


Scenario = Callable[[World, Kernel], Awaitable[None]]


def run(base: Path, scenario: Scenario, **changes: Any) -> None:
    async def main() -> None:
        async with world(base, budget_bytes=BUDGET, unknown_bytes=0, **changes) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            await scenario(w, Kernel(w))
            await w.drained()

    trio.run(main)


def tick(w: World) -> float:
    with w.fs.lock:
        return w.fs.tick()


async def writer(
    w: World, name: bytes, size: int = 0, pid: int = CALLER.pid
) -> tuple[Ino, OpenFile]:
    """A file open in the passthrough lane, to which the kernel has written `size` bytes."""
    opened, attributes = await w.do(
        w.fs.create(ROOT, name, 0o644, os.O_WRONLY, CALLER._replace(pid=pid))
    )
    assert opened.lane is Lane.PASSTHROUGH
    os.pwrite(opened.backing_fd, bytes([name[-1]]) * size, 0)
    return attributes.ino, opened


async def dirty(w: World, name: bytes, size: int) -> None:
    """A file that is complete, and not persisted as long as the engine is held."""
    w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
    await w.write(name, b"d" * size)
    w.inner.lanes.offer(Lane.DIRECT, passthrough=True)


def test_without_passthrough_writers_nothing_is_looked_at(tmp_path: Path) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        assert tick(w) == math.inf
        _ino, opened = await writer(w, b"a")
        assert tick(w) < 1
        await w.close(opened)
        assert tick(w) == math.inf

    run(tmp_path, scenario)


def test_it_is_looked_the_more_often_the_less_room_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "FILL_BYTES_PER_S", 1e9)

    async def scenario(w: World, _kernel: Kernel) -> None:
        _ino, opened = await writer(w, b"a")
        intervals = [tick(w)]
        for size in (30, 50, 58):
            os.pwrite(opened.backing_fd, b"x" * size * MIB, 0)
            intervals.append(tick(w))
        assert intervals == sorted(intervals, reverse=True)
        assert intervals[-1] < intervals[0] / 4
        await w.close(opened)

    run(tmp_path, scenario)


def test_a_writer_is_held_when_ram_is_full_and_goes_on_when_others_are_persisted(
    tmp_path: Path,
) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 20 * MIB)
        tick(w)
        assert not kernel.is_held(ino)
        os.pwrite(opened.backing_fd, b"x" * 12 * MIB, 20 * MIB)
        tick(w)
        assert kernel.is_held(ino)
        (held,) = w.fs.statistics().held
        assert (held.ino, held.reason, held.resident_bytes) == (ino, "RAM is full", 32 * MIB)
        assert len(w.fs.statistics().waiting) == 1
        await w.drained()
        tick(w)
        assert kernel.locks[ino].result() is False
        assert w.fs.statistics().held == ()
        assert w.tier.reserved_bytes > 0  # its room is kept for it
        await w.close(opened)
        tick(w)
        assert w.tier.reserved_bytes == 0

    run(tmp_path, scenario)


@pytest.mark.clause("S131", "S130")
@pytest.mark.parametrize("budget_bytes", [2 * BUDGET, 3 * BUDGET // 4])
def test_what_a_held_writer_asked_for_is_what_it_gives_back_when_the_budget_changes(
    tmp_path: Path, budget_bytes: int
) -> None:
    """The share of the budget was given back that it is then: each such change moved the reserved
    bytes for good.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 32 * MIB)
        tick(w)
        assert kernel.is_held(ino)
        assert w.tier.waiting() == 1
        with w.fs.lock:
            w.tier.change_budget(budget_bytes)
        await w.drained()
        tick(w)
        assert not kernel.is_held(ino)
        await w.close(opened)
        tick(w)
        assert w.tier.reserved_bytes == 0

    run(tmp_path, scenario)


def test_clean_files_leave_before_anybody_is_held(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 30 * MIB)
        await w.drained()
        ino, opened = await writer(w, b"a", 50 * MIB)
        tick(w)
        assert not kernel.is_held(ino)
        assert w.fs.statistics().content.evicted_files == 1
        await w.close(opened)

    run(tmp_path, scenario)


def test_what_was_promised_is_not_held_back(tmp_path: Path) -> None:
    """While a file that outgrew its promise is held, another one goes on up to what it was
    promised.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 24 * MIB)
        kept, kept_open = await writer(w, b"keeps its word", MIB)  # promised 16 MiB
        grows, grows_open = await writer(w, b"grows", 21 * MIB)
        tick(w)
        assert (kernel.is_held(kept), kernel.is_held(grows)) == (False, True)
        await w.close(kept_open)
        await w.close(grows_open)

    run(tmp_path, scenario)


def test_held_writers_get_room_in_turn(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 8 * MIB)
        first, first_open = await writer(w, b"first", pid=1)
        second, second_open = await writer(w, b"second", pid=2)
        for opened in (first_open, second_open):
            os.pwrite(opened.backing_fd, b"x" * 27 * MIB, 0)
        tick(w)
        assert (kernel.is_held(first), kernel.is_held(second)) == (True, True)
        await w.drained()  # ten MiB are free then: room for one
        tick(w)
        assert (kernel.is_held(first), kernel.is_held(second)) == (False, True)
        await w.close(first_open)
        await w.drained()
        with trio.fail_after(120):
            while kernel.is_held(
                second
            ):  # a piece of it may be on its way out of RAM, which comes to its end first
                await trio.sleep(0.01)
                tick(w)
        await w.close(second_open)

    run(tmp_path, scenario)


def test_others_get_in_between_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "SLICE_S", 0.0)
    monkeypatch.setattr(hold, "GAP_ROOM_BYTES", 0)

    async def scenario(w: World, kernel: Kernel) -> None:
        kernel.retakes = False
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 32 * MIB)
        tick(w)
        assert kernel.locks[ino].result() is True  # again
        kernel.take(ino)
        assert kernel.is_held(ino)
        monkeypatch.setattr(hold, "GAP_ROOM_BYTES", 1 << 60)
        tick(w)
        assert kernel.is_held(ino)  # not into a tmpfs that is full
        await w.close(opened)

    run(tmp_path, scenario)


def test_whoever_writes_in_between_is_asked_to_let_go_once_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock taker waited before the writer had the lock: it was overtaken, and a second write
    met a full tmpfs.
    """
    monkeypatch.setattr(hold, "SLICE_S", 0.0)
    monkeypatch.setattr(hold, "GAP_ROOM_BYTES", 0)

    async def scenario(w: World, kernel: Kernel) -> None:
        kernel.retakes = False
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 32 * MIB)
        tick(w)
        assert kernel.locks[ino].result() is True
        tick(w)
        assert not kernel.is_held(
            ino
        )  # nobody has written: it would be in the queue before the writer again
        monkeypatch.setattr(hold, "GAP_ROOM_BYTES", 1 << 60)
        os.pwrite(opened.backing_fd, b"x" * MIB, 32 * MIB)
        tick(w)
        assert kernel.is_held(ino)
        await w.close(opened)

    run(tmp_path, scenario)


def test_a_lock_that_was_lost_is_taken_again(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 32 * MIB)
        tick(w)
        first = kernel.locks[ino]
        w.inner.hold.lost(ino, first)
        tick(w)
        assert kernel.locks[ino] is not first
        assert kernel.is_held(ino)
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S436")
def test_while_nobody_holds_who_was_held_the_tmpfs_takes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a writer that was never lost to its holder nothing is lent: a large write ends at the
    limit, and its rest waits.
    """
    lent: list[int] = []

    async def scenario(w: World, kernel: Kernel) -> None:
        monkeypatch.setattr(w.tier, "lend_slack", lambda: lent.append(w.tier.used_bytes))
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 32 * MIB)
        tick(w)
        tick(w)
        assert kernel.is_held(ino)
        assert not lent
        until = kernel.locks[ino]
        kernel.is_there = False
        with w.fs.lock:
            w.inner.hold.lost(ino, until)
        for _ in range(3):
            before = len(lent)
            os.pwrite(opened.backing_fd, b"x" * MIB, 32 * MIB)
            tick(w)
            assert len(lent) == before + 1
        kernel.is_there = True
        kernel.take(ino)
        tick(w)
        lent.clear()
        tick(w)
        assert not lent
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S436")
def test_who_was_to_be_held_when_the_holder_was_lost_is_lent_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[int] = []

    async def scenario(w: World, kernel: Kernel) -> None:
        monkeypatch.setattr(w.tier, "lend_slack", lambda: lent.append(w.tier.used_bytes))
        kernel.is_there = False
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 32 * MIB)
        with w.fs.lock:
            w.fs.holder_lost()
        assert lent, "nobody would hold it"
        lent.clear()
        tick(w)
        assert lent
        kernel.is_there = True
        kernel.take(ino)
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S436")
def test_writers_are_held_where_nobody_can_look_how_much_memory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortage, "LOOK_INTERVAL_S", 0.0)
    has_descriptors = True

    def available() -> int:
        if not has_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return 1 << 62

    async def scenario(w: World, kernel: Kernel) -> None:
        nonlocal has_descriptors
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 32 * MIB)
        has_descriptors = False
        tick(w)
        tick(w)
        assert kernel.is_held(ino)
        has_descriptors = True
        await w.close(opened)

    run(tmp_path, scenario, available=available)


def test_memory_that_others_use_holds_writers_in_both_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortage, "LOOK_INTERVAL_S", 0.0)
    machine = {"available": 1 << 40}

    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 10 * MIB)
        ino, opened = await writer(w, b"a", 20 * MIB)
        tick(w)
        assert not kernel.is_held(ino)
        machine["available"] = MIB
        tick(w)
        assert kernel.is_held(ino)
        assert w.fs.statistics().held[0].reason == "the machine is short of memory"
        assert w.tier.free_bytes() <= MIB
        machine["available"] = 1 << 40
        tick(w)
        tick(w)
        assert not kernel.is_held(ino)
        await w.close(opened)

    run(tmp_path, scenario, available=lambda: machine["available"])


def test_a_budget_that_is_lowered_holds_writers(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 10 * MIB)
        ino, opened = await writer(w, b"a", 20 * MIB)
        tick(w)
        assert not kernel.is_held(ino)
        w.tier.budget_bytes = 30 * MIB
        tick(w)
        assert kernel.is_held(ino)
        w.tier.budget_bytes = BUDGET
        with w.fs.lock:
            w.tier.room_changed()
        tick(w)
        assert not kernel.is_held(ino)
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S53")
def test_with_the_policy_error_nothing_is_refused_of_which_close_has_said_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be mapped still, as far as acpfs sees: so it counts as changed until its RELEASE."""

    async def scenario(w: World, _kernel: Kernel) -> None:
        with w.fs.lock, w.state.step():
            w.inner.expectations.learn(b"a", 8 * MIB)
            w.inner.expectations.learn_use(b"a", Use.ONLY_WRITTEN)
        await dirty(w, b"before", 24 * MIB)
        opened, attributes = await w.create(b"a", flags=os.O_RDWR)
        assert opened.lane is Lane.PASSTHROUGH
        monkeypatch.setattr(w.tier, "tells_of_mappings", lambda: False)
        os.pwrite(opened.backing_fd, b"a" * (38 * MIB), 0)
        await w.do(w.fs.flush(opened.handle))
        tick(w)
        assert w.inner.table[attributes.ino].body.modified
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert (w.backing / "a").read_bytes() == b"a" * (38 * MIB)

    run(tmp_path, scenario, when_full="error")


def test_with_the_policy_error_the_file_is_not_published(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        await dirty(w, b"before", 30 * MIB)
        ino, opened = await writer(w, b"a", 32 * MIB)
        tick(w)
        assert not kernel.is_held(ino)
        with pytest.raises(OSError) as error:
            await w.do(w.fs.flush(opened.handle))
        assert error.value.errno == errno.ENOSPC
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert not (w.backing / "a").exists()

    run(tmp_path, scenario, when_full="error")
