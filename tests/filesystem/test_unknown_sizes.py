"""Writers of which nobody knows how much they will write: who of them gets the passthrough lane,
and that RAM is never promised twice.

The test is the kernel: it writes to the descriptors that opens hand out, takes inode locks, late
where it is to, and calls `tick`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.config import WhenFull
from acpfs.filesystem import likely_sizes
from acpfs.filesystem.admission import Net
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.ram.control_groups import LimitedGroup
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

MIB = 1 << 20
BUDGET = 64 * MIB
REACH = BUDGET // 16
ADMITTED = 12
"""(64 - 16 MiB that are left) ÷ 4 MiB."""


class Kernel:
    """Takes inode locks when the test says so."""

    def __init__(self, w: World, net: Net) -> None:
        self._w = w
        self.asked: list[Ino] = []
        self.locks: dict[Ino, Future[bool]] = {}
        w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
        w.inner.hold.offer(self, net)

    def take(self, ino: Ino) -> None:
        self.asked.append(ino)

    def look_soon(self) -> None:
        """The test calls `tick` itself."""

    def tick(self) -> None:
        with self._w.fs.lock:
            self._w.fs.tick()

    def lock(self) -> None:
        """Take all locks that were asked for."""
        asked = self.asked
        self.asked = []
        for ino in asked:
            until = self._w.inner.hold.taken(ino)
            if until is not None:
                self.locks[ino] = until

    def is_stopped(self, ino: Ino) -> bool:
        return ino in self.locks and not self.locks[ino].done()


Scenario = Callable[[World, Kernel], Awaitable[None]]


def run(base: Path, scenario: Scenario, *, net: Net = Net.HOLDS, **changes: Any) -> None:
    base.mkdir(exist_ok=True)

    async def main() -> None:
        async with world(base, budget_bytes=BUDGET, **changes) as w:
            await scenario(w, Kernel(w, net))

    trio.run(main)


async def lane_of(
    w: World, name: bytes, *, flags: int = os.O_WRONLY, size: int = 0, parent: Ino = ROOT
) -> Lane:
    """The lane of the writer of a new file, which writes so much and closes it."""
    opened, _attributes = await w.create(name, parent, flags)
    if opened.lane is Lane.PASSTHROUGH:
        os.pwrite(opened.backing_fd, b"x" * size, 0)
    else:
        await w.do(w.fs.write(opened.handle, 0, b"x" * size))
    await w.close(opened)
    return opened.lane


def reasons(w: World) -> set[str]:
    return {reason for reason, count in w.fs.statistics().lane_choices.items() if count}


# -- who is admitted


@pytest.mark.clause("S247")
def test_the_first_file_of_a_checkpoint_is_admitted_while_ram_is_plentiful(tmp_path: Path) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        assert await lane_of(w, b"model.pt", size=2 * MIB) is Lane.PASSTHROUGH
        step = (await w.do(w.fs.mkdir(ROOT, b"step-100", 0o755, CALLER))).ino
        assert await lane_of(w, b"shard", parent=step, size=2 * MIB) is Lane.PASSTHROUGH
        await w.drained()
        assert (w.backing / "model.pt").read_bytes() == b"x" * 2 * MIB

    run(tmp_path, scenario)


@pytest.mark.clause("S247")
@pytest.mark.parametrize(
    "changes",
    [{"net": Net.NONE}, {"when_full": WhenFull.ERROR}],
    ids=["nobody holds", "full is an error"],
)
def test_where_it_would_not_be_held_the_daemon_s_lane_is_taken(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        assert await lane_of(w, b"model.pt") is Lane.DIRECT
        assert reasons(w) == {"its size is not known from an earlier file"}

    run(tmp_path, scenario, **changes)


@pytest.mark.clause("S247")
@pytest.mark.parametrize(
    ("left", "lane"), [(20 * MIB - 1, Lane.DIRECT), (20 * MIB, Lane.PASSTHROUGH)]
)
def test_ram_is_not_plentiful_when_the_machine_has_little_left(
    tmp_path: Path, left: int, lane: Lane
) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        assert await lane_of(w, b"model.pt") is lane
        assert lane is Lane.PASSTHROUGH or reasons(w) == {
            "its size is not known, and RAM is not plentiful"
        }

    run(tmp_path, scenario, available=lambda: left)


@pytest.mark.clause("S247")
def test_ram_is_not_plentiful_when_little_of_the_budget_is_left(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        await w.write(b"dirty", b"d" * 45 * MIB)
        assert await lane_of(w, b"model.pt") is Lane.DIRECT
        await w.drained()
        kernel.tick()
        assert (
            await lane_of(w, b"optimizer.pt") is Lane.PASSTHROUGH
        )  # what may leave counts as free
        assert w.fs.statistics().content.evicted_files == 0

    run(tmp_path, scenario)


@pytest.mark.clause("S247")
@pytest.mark.parametrize(
    ("limit", "lane"), [(2 * BUDGET - 2, Lane.DIRECT), (2 * BUDGET, Lane.PASSTHROUGH)]
)
def test_a_control_group_with_less_room_than_ram_is_not_to_pay_for_what_nobody_knows(
    tmp_path: Path, limit: int, lane: Lane
) -> None:
    """Half of its limit must be left beside what is written (S243)."""
    group = LimitedGroup(tmp_path / "group", limit)

    async def scenario(w: World, _kernel: Kernel) -> None:
        assert await lane_of(w, b"model.pt") is lane

    run(tmp_path, scenario, limits=lambda _pid: [group])


# -- small files


@pytest.mark.clause("S249")
@pytest.mark.parametrize(
    "name",
    [
        b"data",
        b"trainer_state.json",
        b"config.json",
        b"model.log",
        b"events.out.tfevents.1",
        b"a.c",
    ],
)
def test_a_file_that_nothing_says_is_large_stays_where_the_daemon_sees_it(
    tmp_path: Path, name: bytes
) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        step = (await w.do(w.fs.mkdir(ROOT, b"step-100", 0o755, CALLER))).ino
        assert await lane_of(w, name) is Lane.DIRECT
        if name != b"data":
            assert await lane_of(w, name, parent=step) is Lane.DIRECT

    run(tmp_path, scenario)


@pytest.mark.clause("S249")
def test_a_log_and_a_small_file_that_is_rewritten_stay_too(tmp_path: Path) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        assert await lane_of(w, b"model.pt", flags=os.O_WRONLY | os.O_APPEND) is Lane.DIRECT
        ino = await w.write(b"rng.pt", b"x" * 100)
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        assert opened.lane is Lane.DIRECT
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S249")
def test_a_large_file_that_is_rewritten_says_how_large_it_will_be(tmp_path: Path) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        (w.backing / "dump").write_bytes(b"x" * 2 * MIB)
        ino = (await w.do(w.fs.lookup(ROOT, b"dump"))).ino
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        assert opened.lane is Lane.PASSTHROUGH
        await w.close(opened)

    run(tmp_path, scenario, net=Net.NONE)


@pytest.mark.clause("S249")
def test_files_like_one_that_was_small_count_as_small_until_one_is_large(tmp_path: Path) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        assert await lane_of(w, b"rng_0.pt", size=100) is Lane.PASSTHROUGH
        assert await lane_of(w, b"rng_1.pt", size=MIB) is Lane.DIRECT
        assert await lane_of(w, b"rng_2.pt", size=100) is Lane.PASSTHROUGH  # its size is known now
        names = [b"%c.pt" % letter for letter in b"abcdefghijkl"]
        lanes = [await lane_of(w, name, size=100) for name in names]
        assert lanes == [Lane.PASSTHROUGH] * likely_sizes.SMALL_IN_A_ROW + [Lane.DIRECT] * (
            12 - likely_sizes.SMALL_IN_A_ROW
        )

    run(tmp_path, scenario)


@pytest.mark.clause("S249")
def test_what_is_remembered_of_small_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likely_sizes, "KINDS_MAX", 2)

    async def scenario(w: World, _kernel: Kernel) -> None:
        for name in (b"a.pt", b"b.pth", b"c.bin"):
            assert await lane_of(w, name, size=100) is Lane.PASSTHROUGH
        assert await lane_of(w, b"c.bin.1.bin", size=100) is Lane.PASSTHROUGH
        assert await lane_of(w, b"c.bin.2.bin", size=100) is Lane.DIRECT

    run(tmp_path, scenario)


# -- the hold is the net


async def admit(w: World) -> dict[Ino, OpenFile]:
    """As many writers as are admitted."""
    writers: dict[Ino, OpenFile] = {}
    while True:
        opened, attributes = await w.create(b"model%c.pt" % (ord("a") + len(writers)))
        if opened.lane is not Lane.PASSTHROUGH:
            await w.close(opened)
            return writers
        writers[attributes.ino] = opened


def fill(writers: dict[Ino, OpenFile], kernel: Kernel) -> None:
    """All write in turn, and are looked at, until each of them is to be held."""
    written = dict.fromkeys(writers, 0)
    while len(kernel.asked) < len(writers):
        for ino, opened in writers.items():
            if ino not in kernel.asked:
                written[ino] += os.pwrite(opened.backing_fd, b"x" * (MIB // 4), written[ino])
                kernel.tick()
    for ino, opened in writers.items():
        os.pwrite(
            opened.backing_fd, b"y" * REACH, written[ino]
        )  # the write that was under way: the lock is had when it is done
    kernel.lock()
    kernel.tick()


@pytest.mark.clause("S247")
def test_many_writers_of_unknown_size_are_stopped_before_together_they_exceed_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        monkeypatch.setattr(w.tier, "space_left_bytes", lambda: 64 * MIB)  # no slack to go on in
        writers = await admit(w)
        assert len(writers) == ADMITTED
        fill(writers, kernel)
        assert all(kernel.is_stopped(ino) for ino in writers)
        assert w.tier.used_bytes <= BUDGET
        assert (await w.create(b"late.pt"))[0].lane is Lane.DIRECT

    run(tmp_path, scenario)


@pytest.mark.clause("S244")
def test_no_more_leaves_ahead_of_a_writer_of_unknown_size_than_it_may_write_before_it_is_held(
    tmp_path: Path,
) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        for number in range(40):
            await w.write(b"old%d" % number, b"o" * MIB)
        await w.drained()
        opened, _attributes = await w.create(b"model.pt")
        for position in range(0, 40 * MIB, MIB // 4):
            os.pwrite(opened.backing_fd, b"x" * (MIB // 4), position)
            kernel.tick()
            wanted = max(0, 40 * MIB + position + MIB // 4 - BUDGET)
            assert w.fs.statistics().content.evicted_bytes <= wanted + REACH + 2 * MIB
        assert w.tier.free_bytes() >= REACH
        assert kernel.asked == []
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S247")
def test_a_stopped_writer_keeps_no_room_from_the_others(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        writers = await admit(w)
        await w.write(b"dirty", b"d" * 10 * MIB)
        while not kernel.asked:
            for opened in writers.values():
                os.write(opened.backing_fd, b"x" * (MIB // 4))
            kernel.tick()
        kernel.lock()
        kernel.tick()
        going_on = [ino for ino in writers if not kernel.is_stopped(ino)]
        assert going_on
        assert w.tier.free_bytes() >= 0
        for opened in writers.values():
            await w.close(opened)
        kernel.tick()
        await w.drained()
        assert w.tier.reserved_bytes == 0
        assert await lane_of(w, b"next.safetensors") is Lane.PASSTHROUGH

    run(tmp_path, scenario)


@pytest.mark.clause("S247")
def test_the_next_worker_holds_the_writers_that_it_finds(tmp_path: Path) -> None:
    async def killed() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, session="kernel") as w:
            Kernel(w, Net.HOLDS)
            writers = await admit(w)
            kept.update(
                {ino: (opened, os.dup(opened.backing_fd)) for ino, opened in writers.items()}
            )

    async def next_worker() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, session="kernel") as w:
            kernel = Kernel(w, Net.HOLDS)
            late, _attributes = await w.do(
                w.fs.create(ROOT, b"late.pt", 0o644, os.O_WRONLY, CALLER._replace(unique=1))
            )
            assert late.lane is Lane.DIRECT
            fill(
                {ino: opened._replace(backing_fd=fd) for ino, (opened, fd) in kept.items()}, kernel
            )
            assert w.tier.used_bytes <= BUDGET
            for _opened, fd in kept.values():
                os.close(fd)

    kept: dict[Ino, tuple[OpenFile, int]] = {}
    trio.run(killed)
    assert len(kept) == ADMITTED
    trio.run(next_worker)


@pytest.mark.clause("S247")
def test_an_open_that_fails_leaves_nothing_promised(tmp_path: Path) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        for letter in range(2 * ADMITTED):
            opened, _attributes = await w.create(b"model%c.pt" % (ord("a") + letter))
            assert opened.lane is Lane.PASSTHROUGH
            with w.fs.lock:
                w.fs.refuse_passthrough(opened.handle)  # the kernel would not take it

    run(tmp_path, scenario)
