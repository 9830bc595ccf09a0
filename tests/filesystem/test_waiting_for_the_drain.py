"""Who waits for room in RAM waits for the storage alone: not for itself, another application, a
person or another machine.

One test for each row of the table in docs/internals/room.md, and one with histories drawn at
random.
"""

from __future__ import annotations

import enum
import errno
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.closing import Closing
from acpfs.filesystem.records import AttributeChange, Lane, OpenFile
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.ops import OpKind
from acpfs.writeback.log.stages import Aside
from acpfs.writeback.log.verdicts import Why
from acpfs.writeback.members.gate import Gated
from tests.filesystem.test_hold import BUDGET, Kernel, dirty, run, tick, writer
from tests.filesystem.test_outgrown import MIB, outgrow, patterned
from tests.filesystem.test_slow_backing import until
from tests.filesystem.world import CALLER, World, world
from tests.filesystem.world import run as run_plain

pytestmark = pytest.mark.clause("S430")

SMALL_BUDGET = 8 * MIB
KILLED = 4711
"""Process of a writer that was killed."""

InFront = Callable[[World, Kernel], Awaitable[None]]


async def save(w: World, name: bytes, data: bytes) -> None:
    """Through the daemon, a megabyte at a time: each piece wants room of its own."""
    opened, _attributes = await w.create(name)
    for start in range(0, len(data), MIB):
        await w.do(w.fs.write(opened.handle, start, data[start : start + MIB]))
    await w.close(opened)


async def killed(w: World, kernel: Kernel, *, synced: bool) -> tuple[Ino, bytearray]:
    """A file that outgrew RAM, and whose writer is killed; `synced`: it has its place in the
    order.
    """
    ino, opened, data = await outgrown(w, kernel)
    if synced:
        await w.do(w.fs.fsync(opened.handle, False))
    os.pwrite(opened.backing_fd, b"x", len(data))
    await w.do(w.fs.flush(opened.handle, KILLED))
    await w.do(w.fs.release(opened.handle))
    assert w.inner.table[ino].body.interrupted
    w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
    return ino, bytearray(data + b"x")


async def saves_go_on(w: World, total: int = BUDGET + 16 * MIB) -> None:
    """More than RAM holds, in files of four megabytes, of which each is closed before the next
    one.
    """
    w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
    for number in range(total // (4 * MIB)):
        await save(w, b"part-%d" % number, patterned(4 * MIB, seed=number))


def stored(w: World, total: int = BUDGET + 16 * MIB) -> None:
    for number in range(total // (4 * MIB)):
        assert (w.backing / f"part-{number}").read_bytes() == patterned(4 * MIB, seed=number)


async def outgrown(w: World, kernel: Kernel) -> tuple[Ino, OpenFile, bytes]:
    ino, opened = await writer(w, b"big")
    data = patterned(100 * MIB)
    await outgrow(w, kernel, opened, ino, data)
    assert w.inner.table[ino].body.is_outgrown
    return ino, opened, data


# -- row by row


@pytest.mark.clause("S18", "S61")
@pytest.mark.parametrize("how", ["fsync", "rename"])
def test_an_open_file_that_outgrew_ram_does_not_stop_who_has_to_close_it(
    tmp_path: Path, how: str
) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        _ino, opened, data = await outgrown(w, kernel)
        if how == "fsync":
            await w.do(w.fs.fsync(opened.handle, False))
        else:
            await w.do(w.fs.rename(ROOT, b"big", ROOT, b"final", 0))
        await saves_go_on(w)
        assert not (w.backing / "part-0").exists()
        await w.close(opened)
        await w.drained()
        assert (w.backing / ("big" if how == "fsync" else "final")).read_bytes() == data
        stored(w)

    run(tmp_path, scenario)


@pytest.mark.clause("S181")
def test_one_whose_writer_was_killed_stops_nobody(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        _ino, expected = await killed(w, kernel, synced=True)
        assert w.engine.statistics().queue[0].why == Why.HALF.value
        await saves_go_on(w)
        with w.fs.lock:
            assert w.inner.interrupted.store(b"big") == 1
        await w.drained()
        assert (w.backing / "big").read_bytes() == expected
        stored(w)

    run(tmp_path, scenario, closing=lambda pid: Closing.KILL if pid == KILLED else Closing.CALL)


@pytest.mark.clause("S18", "S181", "S431")
@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("how", ["anew", "over it", "append", "by path"])
def test_who_goes_on_with_what_a_killed_writer_left_waits_for_nobody_to_decide(
    tmp_path: Path, how: str, *, synced: bool
) -> None:
    """A job that is killed in a save, and started again, writes the same file: nobody else will
    finish that.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, expected = await killed(w, kernel, synced=synced)
        if how == "by path":
            await w.do(w.fs.setattr(ino, AttributeChange(size=MIB + 7), None, CALLER))
            del expected[MIB + 7 :]
        else:
            flags = {"anew": os.O_TRUNC, "over it": 0, "append": os.O_APPEND}[how]
            at = len(expected) if how == "append" else 0
            again = await w.do(w.fs.open(ino, os.O_WRONLY | flags, CALLER))
            await w.do(w.fs.write(again.handle, at, b"anew"))
            expected[at : len(expected) if how == "anew" else at + 4] = b"anew"
            assert not (w.backing / "big").exists()
            await w.close(again)
        await w.drained()
        assert (w.backing / "big").read_bytes() == expected
        await until(lambda: not w.lower.list_staging())

    run(tmp_path, scenario, closing=lambda pid: Closing.KILL if pid == KILLED else Closing.CALL)


@pytest.mark.clause("S181", "S431")
def test_a_half_that_somebody_goes_on_with_is_a_half_until_that_is_closed_also_for_the_next_worker(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        closing = lambda pid: Closing.KILL if pid == KILLED else Closing.CALL  # noqa: E731
        async with world(tmp_path, budget_bytes=BUDGET, unknown_bytes=0, closing=closing) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            ino, expected = await killed(w, Kernel(w), synced=True)
            again = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            await w.do(w.fs.write(again.handle, 0, b"anew"))
            expected[:4] = b"anew"
        async with world(tmp_path, budget_bytes=BUDGET, hold=False) as w:
            await w.write(b"behind", b"1")
            assert [op.unsealed for op in w.log] == [True, False]
            assert not (w.backing / "big").exists()
            with w.fs.lock:
                assert w.inner.interrupted.store(b"big") == 1
            await w.drained()
            assert (w.backing / "big").read_bytes() == expected

    trio.run(main)


def test_what_waits_for_other_members_stops_nobody(tmp_path: Path) -> None:
    """As their records do that have not passed it (tests/writeback has those)."""

    async def scenario(w: World) -> None:
        await w.write(b"latest", b"1")
        with w.fs.lock:
            [pointer] = w.log
            pointer.awaits_members = True
        await saves_go_on(w, 12 * MIB)
        with w.fs.lock:
            pointer.awaits_members = False
        await w.drained()
        stored(w, 12 * MIB)

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET)


@pytest.mark.parametrize("aside", [Aside.PARKED, Aside.WITHHELD, Aside.HELD])
def test_what_was_refused_or_is_held_behind_it_stops_nobody(tmp_path: Path, aside: Aside) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"refused", patterned(6 * MIB))
        with w.fs.lock:
            [op] = w.log
            if aside is Aside.HELD:
                op.put(aside)
            else:
                op.last_error = errno.EACCES if aside is Aside.PARKED else errno.EHOSTDOWN
                w.log.park(op)
        await save(w, b"next", patterned(6 * MIB, seed=2))
        w.engine.retry()
        await w.drained()
        assert (w.backing / "refused").read_bytes() == patterned(6 * MIB)
        assert (w.backing / "next").read_bytes() == patterned(6 * MIB, seed=2)

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET)


@pytest.mark.parametrize("passthrough", [False, True])
def test_a_reader_that_keeps_a_file_in_ram_stops_nobody(
    tmp_path: Path, *, passthrough: bool
) -> None:
    async def scenario(w: World) -> None:
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        ino = await w.write(b"read", patterned(6 * MIB))
        w.inner.lanes.offer(Lane.DIRECT, passthrough=passthrough)
        reader = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        assert (reader.lane is Lane.PASSTHROUGH) is passthrough
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        await save(w, b"next", patterned(6 * MIB, seed=2))
        assert await w.read(ino, 8 * MIB) == patterned(6 * MIB)
        await w.close(reader)
        await w.drained()
        assert (w.backing / "next").read_bytes() == patterned(6 * MIB, seed=2)

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET)


def test_a_pin_stops_nobody(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"pinned", patterned(6 * MIB))
        with w.fs.lock:
            w.inner.pins.add(b"pinned")
        await save(w, b"next", patterned(6 * MIB, seed=2))
        await w.drained()
        assert (w.backing / "next").read_bytes() == patterned(6 * MIB, seed=2)

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET)


def test_small_saves_do_not_keep_a_large_one_waiting_for_what_they_cannot_free(
    tmp_path: Path,
) -> None:
    """RAM is what somebody writes and does not close; what drains makes room for small files, and
    never for a large one.
    """

    async def scenario(w: World) -> None:
        held, _attributes = await w.create(b"held")
        await w.do(w.fs.write(held.handle, 0, patterned(6 * MIB)))
        for number in range(10):
            await w.write(b"log-%d" % number, b"x" * 50_000)
        large, _attributes = await w.create(b"large")
        await w.do(w.fs.write(large.handle, 0, patterned(4 * MIB)))
        assert w.fs.statistics().overflowed_files == 1
        await w.close(large)
        await w.close(held)
        await w.drained()
        assert (w.backing / "large").read_bytes() == patterned(4 * MIB)

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET)


def test_a_version_that_the_kernel_goes_on_writing_over_stops_nobody(tmp_path: Path) -> None:
    """Its stream begins anew for as long as its writer does."""

    async def scenario(w: World, _kernel: Kernel) -> None:
        _ino, opened = await writer(w, b"rewritten", 20 * MIB)
        await w.do(w.fs.fsync(opened.handle, False))
        await dirty(w, b"behind", 30 * MIB)
        os.pwrite(opened.backing_fd, b"y" * MIB, 0)
        tick(w)
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        await save(w, b"next", patterned(20 * MIB))
        await w.close(opened)

    run(tmp_path, scenario)


# -- what is waited for


async def waits(
    w: World, name: bytes = b"waits"
) -> tuple[trio.Event, Callable[[], Awaitable[None]]]:
    done = trio.Event()

    async def write() -> None:
        await save(w, name, patterned(6 * MIB, seed=9))
        done.set()

    return done, write


@pytest.mark.clause("S53")
def test_a_storage_that_stands_still_is_waited_for(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"before", patterned(6 * MIB))
        done, write = await waits(w)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await until(lambda: w.tier.waiting() > 0)
            with w.fs.lock:
                w.fs.look_after_waiting()
            assert w.tier.waiting()
            assert not done.is_set()
            assert [one.reason for one in w.fs.statistics().waiting] == ["RAM is full"]
            w.engine.hold(False)
        assert w.fs.statistics().overflowed_files == 0

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET)


@pytest.mark.clause("S53", "S23")
def test_a_storage_that_is_full_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To go on there would be ENOSPC for the writer, which is what `wait` is to keep from it."""

    async def scenario(w: World) -> None:
        create = w.lower.create_staging
        full = [True]

        def creates(name: str) -> int:
            if full[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return create(name)

        monkeypatch.setattr(w.lower, "create_staging", creates)
        await w.write(b"before", patterned(6 * MIB))
        done, write = await waits(w)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await until(lambda: w.tier.waiting() > 0)
            with w.fs.lock:
                w.fs.look_after_waiting()
            assert w.tier.waiting()
            assert not done.is_set()
            await until(lambda: "has no room" in w.fs.statistics().waiting[0].reason)
            full[0] = False
        assert w.fs.statistics().overflowed_files == 0
        await w.drained()

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET, hold=False)


def test_a_close_that_may_not_have_been_the_last_one_is_waited_for_until_that_is_known(
    tmp_path: Path,
) -> None:
    """RELEASE follows a close at once: whoever comes between them is not sent to the storage for
    it.
    """

    async def scenario(w: World) -> None:
        opened, attributes = await w.create(b"closing")
        await w.do(w.fs.write(opened.handle, 0, patterned(6 * MIB)))
        await w.do(w.fs.flush(opened.handle))
        with w.fs.lock:
            assert w.inner.outlook.coming(BUDGET).size >= 6 * MIB
        await w.do(w.fs.write(opened.handle, 0, b"x"))
        with w.fs.lock:
            assert w.inner.outlook.coming(BUDGET).size == 0
        await w.close(opened)
        with w.fs.lock:
            assert w.inner.outlook.coming(BUDGET).size >= 6 * MIB
        assert attributes.ino

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET)


def test_the_bytes_that_come_are_compared_with_those_that_are_wanted_one_by_one(
    tmp_path: Path,
) -> None:
    """Two wait, and what comes is enough for one of them: the other one goes on at the storage."""

    async def scenario(w: World) -> None:
        held, _attributes = await w.create(b"held")
        await w.do(w.fs.write(held.handle, 0, patterned(5 * MIB)))
        await w.write(b"drains", patterned(2 * MIB))
        small, _attributes = await w.create(b"small")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, w.fs.write(small.handle, 0, patterned(2 * MIB)))
            await until(lambda: w.tier.waiting() > 0)
            large, _attributes = await w.create(b"large")
            await w.do(w.fs.write(large.handle, 0, patterned(4 * MIB)))
            assert w.tier.waiting() == 1
            assert w.fs.statistics().overflowed_files == 1
            w.engine.hold(False)
        assert w.fs.statistics().overflowed_files == 1
        for opened in (held, small, large):
            await w.close(opened)
        await w.drained()

    run_plain(tmp_path, scenario, budget_bytes=SMALL_BUDGET)


# -- at random


class History:
    """Files in every state that matters for what comes."""

    def __init__(self, w: World, dice: random.Random) -> None:
        self._w = w
        self._dice = dice
        self._open: list[OpenFile] = []
        self._files: dict[bytes, Ino] = {}

    async def step(self) -> None:
        opens = [self._write_on, self._append, self._read]
        others = [self._sync, self._close, self._rename, self._remove, self._pin, self._mkdir]
        await self._dice.choice([self._save, self._save, self._save, *opens, *others])()

    def _bytes(self) -> bytes:
        return bytes([self._dice.randrange(1, 255)]) * self._dice.choice([1, 5000, 70_000, 300_000])

    def _name(self) -> bytes:
        return b"f%d" % self._dice.randrange(24)

    async def _save(self) -> None:
        name = self._name()
        self._files[name] = await self._w.write(name, self._bytes())

    async def _mkdir(self) -> None:
        with suppress(FileExistsError):
            await self._w.do(
                self._w.fs.mkdir(ROOT, b"d%d" % self._dice.randrange(50), 0o755, CALLER)
            )

    async def _opened(self, flags: int) -> OpenFile | None:
        if not self._files:
            return None
        ino = self._files[self._dice.choice(sorted(self._files))]
        opened = await self._w.do(self._w.fs.open(ino, flags, CALLER))
        self._open.append(opened)
        return opened

    async def _write_on(self) -> None:
        if (opened := await self._opened(os.O_WRONLY)) is not None:
            await self._w.do(self._w.fs.write(opened.handle, 0, self._bytes()))

    async def _append(self) -> None:
        if (opened := await self._opened(os.O_WRONLY | os.O_APPEND)) is not None:
            await self._w.do(self._w.fs.write(opened.handle, 1 << 40, self._bytes()))

    async def _sync(self) -> None:
        if self._open:
            await self._w.do(self._w.fs.fsync(self._dice.choice(self._open).handle, False))

    async def _read(self) -> None:
        await self._opened(os.O_RDONLY)

    async def _rename(self) -> None:
        if self._files:
            old = self._dice.choice(sorted(self._files))
            new = self._name()
            await self._w.do(self._w.fs.rename(ROOT, old, ROOT, new, 0))
            self._files[new] = self._files.pop(old)

    async def _remove(self) -> None:
        if self._files:
            name = self._dice.choice(sorted(self._files))
            await self._w.do(self._w.fs.unlink(ROOT, name))
            del self._files[name]

    async def _pin(self) -> None:
        with self._w.fs.lock:
            self._w.inner.pins.add(self._name())
            self._w.inner.contents.retention.order.refile()

    async def _close(self) -> None:
        if self._open:
            opened = self._open.pop(self._dice.randrange(len(self._open)))
            await self._w.close(opened)


class Stop(enum.Enum):
    """What keeps the drain from its end."""

    NOTHING = "nothing"
    MEMBERS = "other members"
    REFUSED = "the backing directory refused something"


def stop_somewhere(w: World, dice: random.Random) -> Stop:
    """Have something stop the drain, or a part of it."""
    stop = dice.choice(list(Stop))
    ops = list(w.log)
    stores = [op for op in ops if op.kind is OpKind.STORE]
    if stop is Stop.MEMBERS and ops:
        op = dice.choice(ops)
        op.awaits_members = True
        w.engine.gate._gated[op.seq] = Gated(op)
    elif stop is Stop.REFUSED and stores:
        op = dice.choice(stores)
        op.last_error = errno.EACCES
        w.log.park(op)
    return stop


def room(w: World) -> int:
    return w.tier.free_bytes() + w.inner.contents.retention.evictable(1 << 62)


@pytest.mark.parametrize("seed", range(24))
def test_what_is_said_to_come_is_what_comes_when_nobody_does_anything(
    tmp_path: Path, seed: int
) -> None:
    async def main() -> None:
        dice = random.Random(seed)
        async with world(tmp_path) as w:
            history = History(w, dice)
            for _ in range(60):
                await history.step()
            with w.fs.lock:
                stop = stop_somewhere(w, dice)
                before = room(w)
                said = w.inner.outlook.coming(1 << 62).size
            w.engine.hold(False)
            await until(lambda: is_at_rest(w))
            with w.fs.lock:
                assert w.inner.outlook.coming(1 << 62).size == 0
                came = room(w) - before
                if stop is Stop.NOTHING:
                    assert came == said
                elif stop is Stop.MEMBERS:  # more where what nets out to nothing was left out
                    assert came >= said

    trio.run(main)


def is_at_rest(w: World) -> bool:
    """Whether the drain has come to what it cannot do alone."""
    with w.fs.lock:
        line = [op for op in w.log if op.aside is Aside.NONE]
        return not line or w.inner.outlook.stops(line[0])
