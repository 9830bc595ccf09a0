"""Nodes one after the other: what a delay is, what ends it, and what becomes of one that brings
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from acpfs.writeback.log.ops import VersionState
from acpfs.writeback.streams.stagger import OFF_SHARE, TRY_AGAIN_SAVES, Stagger
from acpfs.writeback.streams.streams import SMALL_BYTES_MAX
from tests.writeback.conftest import Run
from tests.writeback.world import World

LARGE = SMALL_BYTES_MAX + 1


class Saves:
    """A clock, and a drain that takes what the test says."""

    def __init__(self, window_s: float, place: float) -> None:
        self.now = 100.0
        self.stagger = Stagger(window_s, lambda: place, lambda: self.now)

    def save(self, drain_s: Callable[[float], float], size: int = 1000) -> float:
        """`drain_s`: how long from the begin, by the delay. Returns the delay."""
        self.stagger.logged(size)
        delay_s = self.stagger.delay_s(pressed=False)
        self.now += delay_s
        assert self.stagger.delay_s(pressed=False) == pytest.approx(0)
        self.now += drain_s(delay_s)
        self.stagger.staged(size)
        return delay_s


def test_off_by_default() -> None:
    saves = Saves(0.0, 0.9)
    assert [saves.save(lambda _delay_s: 10.0) for _ in range(5)] == [0] * 5


@pytest.mark.clause("S167")
def test_the_first_save_measures_and_the_delay_grows_with_the_place() -> None:
    first = Saves(100.0, 0.0)
    middle = Saves(100.0, 0.5)
    last = Saves(100.0, 0.99)
    assert [one.save(lambda _delay_s: 10.0) for one in (first, middle, last)] == [0, 0, 0]
    delays = [one.save(lambda _delay_s: 1.0) for one in (first, middle, last)]
    assert delays[0] == 0 < delays[1] < delays[2] <= 10


def test_never_more_than_the_window() -> None:
    saves = Saves(3.0, 1.0)
    saves.save(lambda _delay_s: 1000.0)
    assert all(saves.save(lambda _delay_s: 1.0) <= 3.0 for _ in range(10))


@pytest.mark.clause("S167")
def test_what_brings_nothing_ends_and_is_tried_again_much_later() -> None:
    saves = Saves(100.0, 0.9)
    delays = [saves.save(lambda _delay_s: 10.0) for _ in range(TRY_AGAIN_SAVES)]
    assert delays[0] == 0 < delays[1] <= 5
    tried = [delay_s for delay_s in delays if delay_s]
    assert tried == sorted(tried, reverse=True)
    assert len(tried) < math.log2(OFF_SHARE) + 1
    assert any(saves.save(lambda _delay_s: 10.0) for _ in range(len(tried) + 3))


def test_nodes_move_together_until_they_are_in_each_others_way_and_one_step_back() -> None:
    saves = Saves(1000.0, 1.0)
    saves.save(lambda _delay_s: 100.0)
    delays = [saves.save(lambda delay_s: 5.0 if delay_s > 20 else 70.0) for _ in range(12)]
    assert min(delays) < 20 < delays[-1] < 26
    assert len(set(delays[-3:])) == 1


def test_small_saves_are_neither_delayed_by_nor_counted() -> None:
    saves = Saves(100.0, 0.9)
    saves.save(lambda _delay_s: 100.0, size=10_000)
    saves.save(lambda _delay_s: 0.1, size=100)
    assert saves.save(lambda _delay_s: 1.0, size=10_000) == pytest.approx(45)


def test_a_save_that_was_left_out_ends_with_the_last_operation() -> None:
    saves = Saves(100.0, 0.9)
    saves.save(lambda _delay_s: 10.0)
    saves.stagger.logged(1000)
    assert saves.stagger.delay_s(pressed=False) > 0
    saves.stagger.emptied()
    assert saves.stagger.delay_s(pressed=False) == 0


# -- in the engine


async def delayed(world: World, nursery: trio.Nursery) -> None:
    """A save that has measured, and a second one, which waits."""
    world.engine.stagger._clock = trio.current_time
    world.engine.stagger._place = lambda: 0.5
    await nursery.start(world.engine.run)
    world.engine.hold(True)
    world.store("first", b"x" * LARGE)
    await trio.sleep(100)
    world.engine.hold(False)
    await world.until(lambda: not len(world.log))
    assert world.engine.stagger.delays == 0
    world.store("second", b"y" * LARGE)


@pytest.fixture
def staggered(tmp_path: Path) -> World:
    return World(tmp_path, stagger_s=1000.0, ram="1M")


@pytest.mark.clause("S167")
def test_large_files_wait_their_turn_and_small_ones_do_not(staggered: World, run: Run) -> None:
    world = staggered

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            await delayed(world, nursery)
            began = trio.current_time()
            small = world.store("small", b"z")
            assert small.version is not None
            await world.until(
                lambda: small.version is not None and small.version.state is VersionState.STAGED
            )
            assert trio.current_time() - began < 1
            await world.until(lambda: not len(world.log))
            assert 20 < trio.current_time() - began < 30  # half of half of what the first took
            assert world.engine.stagger.delays == 1
            nursery.cancel_scope.cancel()
        assert world.lower.visible() == world.application_view()

    run(scenario)


def somebody_waits(world: World) -> None:
    world.engine.persisted(world.log.last_seq)


def ram_is_short(world: World) -> None:
    world.tier.budget_bytes = LARGE


@pytest.mark.clause("S167")
@pytest.mark.parametrize("happens", [somebody_waits, ram_is_short])
def test_what_ends_the_delay(staggered: World, run: Run, happens: Callable[[World], None]) -> None:
    world = staggered

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            await delayed(world, nursery)
            began = trio.current_time()
            await trio.sleep(1)
            assert len(world.log) == 1
            happens(world)
            await world.until(lambda: not len(world.log))
            assert trio.current_time() - began < 2
            nursery.cancel_scope.cancel()

    run(scenario)
