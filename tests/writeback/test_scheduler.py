"""Whose piece is written next: the oldest file's, as long as it comes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
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
from acpfs.writeback.streams.give_way import GiveWay
from acpfs.writeback.streams.scheduler import (
    SILENT_S,
    UNDER_WAY_BYTES,
    LargeFile,
    Piece,
    Scheduler,
    Wait,
)
from acpfs.writeback.streams.streams import Stream
from tests.rig.runtime import REAL, runtime_of
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
            LargeFile(Seq(number), 0.0, Copy(), threading.Event()) for number in range(writers)
        ]
        self.scheduler._writers |= {one.copy: one for one in reversed(self.writers)}

    def runnable(self) -> int:
        return 10_000

    def begins(self, number: int) -> None:
        """It is out with a piece."""
        assert isinstance(self.asks(number), Piece)
        self.writers[number].since = self.now

    def asks(self, number: int) -> Piece | Wait:
        return self.scheduler.next_piece(self.writers[number], self.now)

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
    turns = Turns(3, bandwidth=1000)
    turns.scheduler._width.now = 3
    turns.begins(0)
    turns.scheduler.pay(2000)
    assert turns.may_write() == []
    turns.writers[0].since = None
    turns.now += 2.0
    assert turns.may_write() == [0], "the younger ones go when it has had its piece"
    turns.begins(0)
    assert turns.may_write() == [0, 1], "before anybody has paid"


def test_applications_go_first() -> None:
    turns = Turns(2)
    turns.is_writing = True
    assert turns.may_write() == []
    turns.is_writing = False
    assert turns.may_write() == [0]


def test_pieces_are_as_large_as_the_limit_allows() -> None:
    assert Turns(1).asks(0) == Piece(UNDER_WAY_BYTES)
    assert Turns(1, bandwidth=10 * MIB).asks(0) == Piece(MIB)


def test_pieces_share_what_may_be_under_way() -> None:
    turns = Turns(8)
    turns.scheduler._width.now = 4
    assert turns.asks(3) == Piece(UNDER_WAY_BYTES // 4)
    turns.scheduler._width.now = STREAMS
    assert turns.asks(7) == Piece(SLICE_MAX_BYTES)


def test_pieces_are_so_large_that_they_take_less_than_a_silence() -> None:
    turns = Turns(1)
    for _piece in range(20):
        turns.begins(0)
        turns.now += SILENT_S
        turns.scheduler.wrote(turns.writers[0], 1)
        turns.writers[0].since = None
    assert turns.asks(0) == Piece(SLICE_MAX_BYTES)
    for _piece in range(20):
        turns.begins(0)
        turns.now += SILENT_S / 100
        turns.scheduler.wrote(turns.writers[0], 1)
        turns.writers[0].since = None
    assert turns.asks(0) == Piece(UNDER_WAY_BYTES)


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
        scheduler.pay(1 << 30)
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
    gate = world.gate = Gate(world.lower)  # type: ignore[attr-defined]
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
    gate = world.gate = Gate(world.lower)  # type: ignore[attr-defined]
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
    gate = world.gate = Gate(world.lower)  # type: ignore[attr-defined]
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
