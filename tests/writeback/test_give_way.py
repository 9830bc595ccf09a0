"""Large streams and applications on a busy machine: who goes first, and for how long."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from acpfs.runtime.machine import ThisMachine
from acpfs.writeback.streams.give_way import (
    AGE_S_MAX,
    LOOK_AGAIN_S,
    STAND_BACK_S,
    GiveWay,
)
from tests.rig.runtime import runtime_of
from tests.writeback.conftest import Run
from tests.writeback.world import World

MiB = 1 << 20
MANY = 10_000


class Machine:
    """What `GiveWay` asks, settable."""

    def __init__(self) -> None:
        self.writing = True
        self.pressed = False
        self.running = MANY
        self.now = 0.0
        self.give_way = GiveWay(
            lambda: self.writing,
            lambda: self.pressed,
            lambda at: -at,
            replace(runtime_of(lambda: self.now), machine=self),
        )

    def runnable(self) -> int:
        return self.running

    def stands_back(self, age_s: float = 0.0) -> bool:
        return self.give_way.should(-age_s)


def test_stands_back_while_somebody_writes_and_all_processors_are_in_use() -> None:
    assert Machine().stands_back()


@pytest.mark.parametrize(
    ("name", "value"),
    [("writing", False), ("pressed", True), ("running", 1), ("now", STAND_BACK_S + 0.1)],
    ids=lambda value: str(value),
)
def test_goes_ahead(name: str, value: object) -> None:
    """Nobody writes; somebody waits for the drain; a processor is free; the drain's quarter of the
    time.
    """
    machine = Machine()
    setattr(machine, name, value)
    assert not machine.stands_back()


def test_what_is_old_goes_ahead() -> None:
    assert not Machine().stands_back(age_s=AGE_S_MAX + 1)


@pytest.mark.parametrize("step_s", [1e6, -1e6])
def test_a_wall_clock_that_is_set_makes_nothing_old_or_young(
    world: World, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """Found by reading: set back, streams stood back for as long beside whoever writes; set ahead,
    never.
    """
    give_way = world.engine._scheduler._give_way
    give_way._running = lambda: MANY
    give_way._clock = lambda: 0.0
    world.listener.writing = True
    logged_at = world.log.clock.now()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    assert give_way.should(logged_at)
    assert not give_way.should(logged_at - AGE_S_MAX - 1)


def test_runnable_threads_are_counted(tmp_path: Path) -> None:
    assert ThisMachine().runnable() >= 1, "this one at least"
    (tmp_path / "loadavg").write_text("0.20 0.18 0.12 3/80 11206\n")
    assert ThisMachine(tmp_path / "loadavg").runnable() == 3
    assert ThisMachine(tmp_path / "missing").runnable() == 0


def test_a_stream_stands_back_until_the_writer_has_closed(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    scheduler = world.engine._scheduler
    scheduler._give_way = machine.give_way
    pauses: list[float] = []

    class Bell(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            machine.writing = len(pauses) < 3
            return False

    monkeypatch.setattr(scheduler, "_event", Bell)
    data = os.urandom(3 * MiB)
    world.store("f", data)
    run(world.drain)
    assert pauses == [LOOK_AGAIN_S] * 3
    assert world.lower.visible() == {b"f": data}


def test_small_files_are_not_asked(world: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have `courtesy`."""
    machine = Machine()
    world.engine._scheduler._give_way = machine.give_way
    monkeypatch.setattr(
        machine.give_way, "should", lambda _at: pytest.fail("asked for a small file")
    )
    world.store("f", b"small")
    run(world.drain)


def test_nobody_stands_back_from_who_waits_for_the_drain_or_for_room(world: World) -> None:
    assert not world.engine._is_pressed()
    budget = world.tier.budget_bytes
    world.tier.budget_bytes = 100
    world.tier.used_bytes = 80
    assert not world.engine._is_pressed(), "what is clean leaves for whoever writes"
    op = world.store("f", b"x" * 80)
    assert world.engine._is_pressed(), "RAM is short"
    world.tier.budget_bytes = budget
    assert not world.engine._is_pressed()
    world.tier.withheld_bytes = budget - 100
    assert world.engine._is_pressed(), "the machine is short of memory"
    world.tier.withheld_bytes = 0
    world.engine.persisted(op.seq)
    assert world.engine._is_pressed(), "somebody waits"
