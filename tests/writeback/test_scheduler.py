"""Whose piece is written next: the oldest file's, as long as it comes on."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing.calls import CallPools
from acpfs.types import Seq
from acpfs.writeback.log.ops import VersionState
from acpfs.writeback.sources.source import Source
from acpfs.writeback.streams import scheduler as scheduler_module
from acpfs.writeback.streams import streams as streams_module
from acpfs.writeback.streams.bandwidth import SLICE_MAX_BYTES
from acpfs.writeback.streams.give_way import LOOK_AGAIN_S, GiveWay
from acpfs.writeback.streams.scheduler import (
    LATE_S,
    SILENT_S,
    SOON_S,
    UNDER_WAY_BYTES,
    Piece,
    PieceWriter,
    Scheduler,
    Wait,
)
from acpfs.writeback.streams.streams import Stream
from tests.rig.runtime import REAL, runtime_of
from tests.sim.scheduler import NoThreads, Timers
from tests.sim.scheduler import Turns as SimulatedTurns
from tests.sim.virtual import MACHINE, START_S
from tests.writeback.memory_lower import MemoryLower
from tests.writeback.world import World

clause = pytest.mark.clause
MIB = 1 << 20
STREAMS = 8
LONG_S = 60.0


class Copy:
    """Counts what those are told who watch the backing directory."""

    def __init__(self) -> None:
        self.abandoned = False
        self.told: list[str] = []

    def pause(self) -> None:
        self.told.append("pause")

    def progress(self) -> None:
        self.told.append("progress")


class Turns:
    """A scheduler, a clock, and writers by age: all want to write."""

    def __init__(self, writers: int, bandwidth: int = 0) -> None:
        self.now = 100.0
        self.is_writing = False
        runtime = runtime_of(lambda: self.now)
        machine = replace(runtime, machine=self)
        give_way = GiveWay(lambda: self.is_writing, lambda: False, lambda _at: 0.0, machine)
        self.scheduler = Scheduler(give_way, bandwidth, STREAMS, runtime)
        self.writers = [
            PieceWriter(Seq(number), 0.0, Copy(), threading.Event()) for number in range(writers)
        ]
        self.scheduler._writers |= {one.copy: one for one in reversed(self.writers)}

    def runnable(self) -> int:
        assert not self.scheduler._lock.locked(), "a read of /proc/loadavg, and all wait for it"
        return 10_000

    def begins(self, number: int) -> None:
        """It is out with a piece."""
        assert self.scheduler._look(self.writers[number]) is None

    def asks(self, number: int) -> Piece | Wait:
        gives_way = self.scheduler._give_way.should(0.0)
        return self.scheduler.next_piece(self.writers[number], self.now, gives_way=gives_way)

    def waits(self, number: int) -> Wait:
        """It has asked in vain, and waits."""
        wait = self.scheduler._look(self.writers[number])
        assert wait is not None
        return wait

    def wrote(self, number: int, seconds: float, count: int = MIB) -> None:
        """Its piece was out for so long."""
        self.now += seconds
        self.scheduler.wrote(self.writers[number], count)
        self.writers[number].since = None

    def may_write(self) -> list[int]:
        """Who would get a piece now."""
        return [
            number for number in range(len(self.writers)) if isinstance(self.asks(number), Piece)
        ]


@clause("S518")
def test_the_oldest_goes_first() -> None:
    turns = Turns(3)
    assert turns.may_write() == [0]
    turns.begins(0)
    assert turns.may_write() == [0], "it comes back for its next piece"
    del turns.scheduler._writers[turns.writers[0].copy]
    assert 1 in turns.may_write()
    assert 2 not in turns.may_write()


@clause("S518")
def test_as_many_as_bring_something() -> None:
    turns = Turns(5)
    turns.scheduler._width.now = 3
    assert turns.may_write() == [0, 1, 2]


@clause("S519")
def test_who_does_not_come_back_is_passed_over() -> None:
    turns = Turns(3)
    turns.begins(0)
    wait = turns.asks(1)
    assert isinstance(wait, Wait)
    assert SILENT_S < wait.seconds < 2 * SILENT_S
    turns.now += wait.seconds
    assert turns.may_write() == [0, 1]
    turns.writers[0].since = turns.now
    assert turns.may_write() == [0], "it is back"


def test_who_waits_is_not_silent() -> None:
    turns = Turns(3)
    turns.now += 1000 * SILENT_S
    assert turns.may_write() == [0]


@clause("S520")
def test_the_limit_is_the_oldest_ones_first() -> None:
    turns = Turns(3, bandwidth=10 * MIB)
    turns.scheduler._width.now = 3
    turns.begins(0)
    turns.wrote(0, 0.0)
    assert turns.may_write() == [], "that was all of it"
    assert turns.waits(0).seconds == pytest.approx(0.1)
    turns.now += 0.1
    assert turns.may_write() == [0], "the younger ones go when it has had its piece"
    turns.begins(0)
    assert turns.may_write() == []
    turns.now += 0.2
    assert turns.may_write() == [0, 1, 2], "it could not use more"


@clause("S520")
def test_what_a_piece_did_not_use_is_there_for_others() -> None:
    turns = Turns(2, bandwidth=10 * MIB)
    turns.begins(0)
    turns.wrote(0, 0.0, count=0)
    assert turns.may_write() == [0]


def test_applications_go_first() -> None:
    turns = Turns(2)
    turns.is_writing = True
    assert turns.may_write() == []
    turns.is_writing = False
    assert turns.may_write() == [0]


def test_the_machine_is_asked_without_the_lock() -> None:
    """`runnable` looks."""
    turns = Turns(1)
    turns.is_writing = True
    assert turns.scheduler._look(turns.writers[0]) == Wait(LOOK_AGAIN_S)


def test_pieces_are_as_large_as_the_limit_allows() -> None:
    assert Turns(1).asks(0) == Piece(UNDER_WAY_BYTES)
    assert Turns(1, bandwidth=10 * MIB).asks(0) == Piece(MIB)


def test_pieces_share_what_may_be_under_way() -> None:
    turns = Turns(8)
    turns.scheduler._width.now = 4
    assert turns.asks(3) == Piece(UNDER_WAY_BYTES // 4)
    turns.scheduler._width.now = STREAMS
    assert turns.asks(7) == Piece(UNDER_WAY_BYTES // STREAMS)


def test_pieces_are_so_large_that_they_are_not_late() -> None:
    turns = Turns(1)
    for _piece in range(2):
        turns.begins(0)
        turns.wrote(0, 8 * LATE_S, count=UNDER_WAY_BYTES)
    assert turns.asks(0) == Piece(UNDER_WAY_BYTES // 8), "as many as take so long"
    for _piece in range(20):
        turns.begins(0)
        turns.wrote(0, 8 * LATE_S)
    assert turns.asks(0) == Piece(SLICE_MAX_BYTES)
    for _piece in range(20):
        turns.begins(0)
        turns.wrote(0, SOON_S / 2, count=1)
    assert turns.asks(0) == Piece(SLICE_MAX_BYTES), "an end of a file says nothing of larger ones"
    for _piece in range(20):
        turns.begins(0)
        turns.wrote(0, SOON_S / 2, count=turns.writers[0].granted_bytes)
    assert turns.asks(0) == Piece(UNDER_WAY_BYTES)


def test_one_hang_makes_no_piece_smaller() -> None:
    """Beside others who write, smaller ones get less, and take as long."""
    turns = Turns(3)
    turns.scheduler._width._rest = 1 << 60
    turns.begins(0)
    turns.now += 2 * SILENT_S
    turns.begins(1)
    turns.wrote(0, 100.0)
    turns.wrote(1, 0.0)
    assert turns.asks(0) == Piece(UNDER_WAY_BYTES)


def test_a_queue_of_others_makes_no_piece_smaller_and_nobody_silent() -> None:
    turns = Turns(2)
    turns.scheduler._width._rest = 1 << 60
    for _piece in range(5):
        turns.begins(0)
        turns.wrote(0, 0.9 * LATE_S, count=UNDER_WAY_BYTES)
    assert turns.asks(0) == Piece(UNDER_WAY_BYTES)
    turns.begins(0)
    turns.now += LATE_S
    assert turns.may_write() == [0]


@clause("S519")
def test_what_is_sent_to_a_storage_that_stands_still_is_little() -> None:
    """All of it is in front of the oldest file when the storage goes on."""
    turns = Turns(3)
    turns.scheduler._width._rest = 1 << 60
    turns.begins(0)
    turns.now += 2 * SILENT_S
    assert turns.asks(1) == Piece(SLICE_MAX_BYTES)
    turns.begins(1)
    turns.wrote(1, SOON_S / 2)
    assert turns.asks(1) == Piece(UNDER_WAY_BYTES), "others answer"


@pytest.mark.parametrize("what", ["ended", "given up", "no limit"])
def test_who_waits_is_told_when_his_turn_comes(what: str) -> None:
    """On real threads; none of them looks again by itself within the test."""
    give_way = GiveWay(lambda: False, lambda: False, lambda _at: 0.0, REAL)
    scheduler = Scheduler(give_way, 1 if what == "no limit" else 0, STREAMS, REAL)
    copy = Copy()
    first = Copy()
    began = threading.Event()

    def write() -> None:
        with scheduler.writing(Seq(2), 0.0, copy):
            began.set()

    paused = threading.Event()
    copy.pause = paused.set  # type: ignore[method-assign]
    thread = threading.Thread(target=write, daemon=True)
    if what == "no limit":
        scheduler._bucket.take_nowait(1 << 30)
        thread.start()
        assert paused.wait(LONG_S)
        scheduler.set_bandwidth(0)
    else:
        with scheduler.writing(Seq(1), 0.0, first) as writer:
            writer.since = REAL.clock.now() + 1e6  # heard for ever
            thread.start()
            assert paused.wait(LONG_S)
            if what == "given up":
                copy.abandoned = True
                scheduler.wake()
                assert began.wait(LONG_S)
    assert began.wait(LONG_S)
    thread.join(LONG_S)
    assert not scheduler._writers


@pytest.mark.parametrize("owed_bytes", [0, 1 << 30])
@pytest.mark.parametrize("what", ["raised", "no limit", "closed", "given up"])
def test_a_small_file_that_lacks_bytes_is_told_when_it_need_not_wait(
    what: str, owed_bytes: int
) -> None:
    """On real threads, at a byte a second; the first one waits, too, until its own have come."""
    give_way = GiveWay(lambda: False, lambda: False, lambda _at: 0.0, REAL)
    scheduler = Scheduler(give_way, 1, STREAMS, REAL)
    scheduler._bucket.take_nowait(owed_bytes)
    copies = [Copy() for _ in range(3)]
    threads = []
    for number, copy in enumerate(copies):
        paused = threading.Event()
        copy.pause = paused.set  # type: ignore[method-assign]
        pay = partial(scheduler.pay_small, Seq(number), copy, 1 << 20)
        threads.append(threading.Thread(target=pay, daemon=True))
        threads[-1].start()
        assert paused.wait(LONG_S)
    if what == "closed":
        scheduler.close()
    elif what == "given up":
        for copy in copies:
            copy.abandoned = True
        scheduler.wake()
    else:
        scheduler.set_bandwidth(0 if what == "no limit" else 1 << 50)
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert not scheduler._small


# -- with a limit, on virtual time


class Limited:
    """Files that are written at a time to a storage that takes as much as the limit allows."""

    def __init__(self, bandwidth: int) -> None:
        MACHINE.moment_s = START_S
        self.timers = Timers()
        self.turns = SimulatedTurns(random.Random(1))
        threads = NoThreads(self.turns, self.timers)
        runtime = replace(runtime_of(MACHINE.now), threads=threads, machine=MACHINE)
        give_way = GiveWay(lambda: False, lambda: False, lambda _at: 0.0, runtime)
        self.scheduler = Scheduler(give_way, bandwidth, STREAMS, runtime)
        self.pause = threads.event
        self.done_at: dict[str, float] = {}
        self.written = 0

    def large(self, name: str, seq: int, size: int) -> None:
        copy = Copy()
        self.scheduler.comes(Seq(seq), 0.0, copy)

        def run() -> None:
            left = size
            with self.scheduler.writing(Seq(seq), 0.0, copy) as writer:
                while left:
                    count = min(left, self.scheduler.await_turn(writer))
                    self._write(count)
                    self.scheduler.wrote(writer, count)
                    left -= count
            self.done_at[name] = MACHINE.moment_s

        self.turns.spawn(name, run)

    def small(self, name: str, seq: int, size: int, files: int) -> None:
        """One after the other, in a thread."""

        def run() -> None:
            for number in range(files):
                self.scheduler.pay_small(Seq(seq + number), Copy(), size)
                self._write(size)
            self.done_at[name] = MACHINE.moment_s

        self.turns.spawn(name, run)

    def _write(self, count: int) -> None:
        self.written += count
        self.pause().wait(0.001)

    def run(self) -> None:
        """Until all are written."""
        while True:
            while self.turns.turn():
                pass
            seconds = self.timers.next_s()
            if seconds == math.inf:
                return
            MACHINE.moment_s += seconds
            self.timers.fire()


@clause("S520")
def test_younger_small_files_take_nothing_that_an_older_large_one_could_use() -> None:
    """It took 10.1 s beside them, of 3: each of them took before it waited."""
    limited = Limited(bandwidth=10 * MIB)
    begun = MACHINE.moment_s
    limited.large("large", 1, 30 * MIB)
    for thread in range(32):
        limited.small(f"small {thread}", 100 + 1000 * thread, MIB // 4, 8)
    limited.run()
    assert limited.done_at["large"] - begun < 3.2
    assert limited.written == 94 * MIB
    assert max(limited.done_at.values()) - begun < 9.6, "nor is anything of the limit lost"


@clause("S520")
def test_a_younger_large_file_takes_nothing_that_older_small_ones_could_use() -> None:
    limited = Limited(bandwidth=10 * MIB)
    begun = MACHINE.moment_s
    limited.large("large", 1000, 30 * MIB)
    for thread in range(32):
        limited.small(f"small {thread}", thread, MIB // 4, 1)
    limited.run()
    small = max(at for name, at in limited.done_at.items() if name != "large")
    assert small - begun < 1.0
    assert limited.done_at["large"] - begun < 4.0


@clause("S520")
def test_small_files_have_what_a_slow_large_one_leaves() -> None:
    """It is out with each piece for longer than the limit would have it wait."""
    limited = Limited(bandwidth=10 * MIB)
    begun = MACHINE.moment_s
    limited.large("large", 1, 10 * MIB)
    copy_write = limited._write
    limited._write = lambda count: (copy_write(count), limited.pause().wait(0.4))[0]  # type: ignore[method-assign]
    limited.small("small", 100, MIB // 4, 8)
    limited.run()
    assert limited.done_at["small"] < limited.done_at["large"]
    assert limited.done_at["large"] - begun < 4.4


@clause("S518")
@pytest.mark.parametrize("kind", ["servers of their own", "one disk"])
def test_the_first_save_finds_out_how_many_may_write(kind: str) -> None:
    """It took as long as four files, or six, before all servers were at work."""
    world = Limited(bandwidth=0)
    begun = MACHINE.moment_s
    free_at = begun
    rate = 100e6

    def write(count: int) -> None:
        nonlocal free_at
        began = max(free_at, MACHINE.moment_s) if kind == "one disk" else MACHINE.moment_s
        free_at = began + count / rate
        world.pause().wait(free_at - MACHINE.moment_s)

    world._write = write  # type: ignore[method-assign]
    for number in range(STREAMS):
        world.large(f"{number}", number, 48 * MIB)
    world.run()
    file_s = 48 * MIB / rate
    last_s = max(world.done_at.values()) - begun
    assert world.done_at["0"] - begun == pytest.approx(file_s), "nobody wrote beside it"
    assert last_s < (2.5 if kind == "servers of their own" else STREAMS + 0.1) * file_s


# -- in the engine, on threads


class Gate:
    """Lets writes to the storage through one by one, and knows whose they are."""

    def __init__(self, lower: MemoryLower) -> None:
        self.lower = lower
        self.order: list[int] = []
        """Sizes of the files that pieces were written to: each file here has its own."""
        self.sizes: dict[int, int] = {}
        self.held: set[int] = set()
        self.changed = threading.Condition()
        write = lower.write

        def held_write(fd: int, data: memoryview, offset: int) -> int:
            with self.changed:
                tag = data[0]
                self.order.append(tag)
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: tag not in self.held, LONG_S)
            return write(fd, data, offset)

        lower.write = held_write  # type: ignore[method-assign]

    def release(self, *tags: int) -> None:
        with self.changed:
            self.held -= set(tags)
            self.changed.notify_all()


def tagged(number: int, size: int) -> bytes:
    return bytes([number]) * size


@pytest.fixture
def on_threads(tmp_path: Path) -> World:
    world = World(tmp_path, calls=CallPools.make(REAL))
    world.engine._scheduler._width._rest = 1 << 60  # nothing is tried: chance decides nothing
    return world


def drained_on_threads(world: World, meanwhile: Callable[[], bool] = lambda: True) -> None:
    """On the real clock; `meanwhile` comes true before anything else is let through."""

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            with trio.fail_after(LONG_S):
                await world.until(meanwhile)
                gate.release(*range(256))
                await world.until(world.engine.drained)
            nursery.cancel_scope.cancel()

    gate: Gate = world.gate  # type: ignore[attr-defined]
    trio.run(scenario)


def staged(world: World) -> set[int]:
    """Numbers of those that are on the storage."""
    with world.lock:
        return {
            number
            for number, op in enumerate(world.log)
            if op.version is not None and op.version.state is VersionState.STAGED
        }


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still makes nobody silent; pieces of 2 MiB."""
    monkeypatch.setattr(scheduler_module, "SILENT_S", 1e6)
    monkeypatch.setattr(scheduler_module, "UNDER_WAY_BYTES", SLICE_MAX_BYTES)


def writers(world: World) -> int:
    """How many files are on their way, or wait for their turn."""
    return len(world.engine._scheduler._writers)


@clause("S518")
def test_files_that_were_closed_together_are_written_one_after_the_other(
    patient: None, on_threads: World
) -> None:
    del patient
    world = on_threads
    gate = Gate(world.lower)
    world.gate = gate  # type: ignore[attr-defined]
    gate.held = {0}
    for number in range(4):
        world.store(f"f{number}", tagged(number, 4 * SLICE_MAX_BYTES))
    drained_on_threads(world, lambda: gate.order == [0] and writers(world) == 4)
    assert gate.order == [number for number in range(4) for _piece in range(4)]
    assert world.lower.visible() == world.application_view()


@clause("S519")
def test_a_file_that_hangs_stops_none_of_the_others(
    on_threads: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "SILENT_S", 0.05)
    world = on_threads
    gate = Gate(world.lower)
    world.gate = gate  # type: ignore[attr-defined]
    gate.held = {0, 1}
    for number in range(6):
        world.store(f"f{number}", tagged(number, 2 * SLICE_MAX_BYTES + number))
    drained_on_threads(world, lambda: staged(world) == {2, 3, 4, 5})
    assert world.lower.visible() == world.application_view()


def test_a_file_that_waits_for_its_turn_keeps_none_in_ram_open(
    patient: None, on_threads: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room would not be free where the spill directory takes it."""
    del patient
    world = on_threads
    gate = Gate(world.lower)
    world.gate = gate  # type: ignore[attr-defined]
    gate.held = {0}
    for number in range(3):
        world.store(f"f{number}", tagged(number, 2 * SLICE_MAX_BYTES))
    opened: list[int] = []

    def noted(stream: Stream, *arguments: Any) -> Source:
        opened.append(stream.op.seq)
        return Source(stream, *arguments)

    monkeypatch.setattr(streams_module, "Source", noted)
    seen: list[int] = []

    def look() -> bool:
        if gate.order != [0] or writers(world) != 3:
            return False
        seen.append(len(opened))
        return True

    drained_on_threads(world, look)
    assert seen == [1]
