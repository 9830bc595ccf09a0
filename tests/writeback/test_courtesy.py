"""Applications first: what a burst of requests makes the drain do, and not do."""

from __future__ import annotations

import math

import trio

from acpfs.writeback.log.ops import VersionState
from acpfs.writeback.streams.courtesy import BURST_S, LAG_S_MAX, PERIOD_S, QUIET_S, Courtesy
from acpfs.writeback.streams.streams import SMALL_BYTES_MAX
from tests.writeback.conftest import Run
from tests.writeback.world import World

FILES = 300


class Burst:
    """A clock, and how long ago the last request was."""

    def __init__(self) -> None:
        self.now = 100.0
        self.idle_s = 0.0
        self.awaited = False
        self.courtesy = Courtesy(lambda: self.idle_s, lambda: self.awaited, lambda: self.now)

    def share_of_the_drain(self, start_s: float, seconds: float) -> float:
        """Part of a time, from the beginning of the burst, in which the drain may go ahead."""
        free = 0
        for step in range(1000):
            self.now = 100.0 + start_s + seconds * step / 1000
            free += not self.courtesy.delay_s()
        return free / 1000


def test_no_request_for_a_while_ends_the_burst() -> None:
    burst = Burst()
    assert 0 < burst.courtesy.delay_s() <= QUIET_S
    burst.idle_s = QUIET_S
    assert burst.courtesy.delay_s() == 0


def test_shares_of_a_burst() -> None:
    burst = Burst()
    assert burst.share_of_the_drain(0, BURST_S) == 0
    assert 0.2 < burst.share_of_the_drain(BURST_S + PERIOD_S, 4 * PERIOD_S) < 0.3
    assert burst.share_of_the_drain(LAG_S_MAX + 0.01, 10) == 1


def test_somebody_who_waits_ends_it() -> None:
    burst = Burst()
    burst.awaited = True
    assert burst.courtesy.delay_s() == 0


class Steps(trio.abc.Instrument):
    """How often tasks of the engine ran."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += "_forever" in task.name


def test_the_engine_does_nothing_per_operation_while_a_burst_is_on(world: World, run: Run) -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            world.listener.idle = 0.0
            world.store("first", b"x")
            await nursery.start(world.engine.run)
            await trio.testing.wait_all_tasks_blocked()
            steps = Steps()
            trio.lowlevel.add_instrument(steps)
            for number in range(FILES):
                world.store(f"f{number}", b"x")
                await trio.lowlevel.checkpoint()
            trio.lowlevel.remove_instrument(steps)
            assert steps.count < 20
            assert not world.lower.list_staging()
            world.listener.idle = math.inf
            await world.until(lambda: not len(world.log))
            nursery.cancel_scope.cancel()
        assert world.lower.visible() == world.application_view()

    run(scenario)


def test_large_files_and_awaited_ones_do_not_stand_back(world: World, run: Run) -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            world.listener.idle = 0.0
            small = world.store("small", b"x")
            await nursery.start(world.engine.run)
            await trio.testing.wait_all_tasks_blocked()
            large = world.store("large", b"x" * (SMALL_BYTES_MAX + 1))
            await trio.testing.wait_all_tasks_blocked()
            assert large.version is not None
            assert small.version is not None
            assert (large.version.state, small.version.state) == (
                VersionState.STAGED,
                VersionState.COMPLETE,
            )
            done = world.engine.persisted(small.seq)
            await trio.testing.wait_all_tasks_blocked()
            assert done.done()
            nursery.cancel_scope.cancel()

    run(scenario)
