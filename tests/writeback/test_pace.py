"""How often records are written, read and listed: pure, with a clock of the test's."""

from __future__ import annotations

import pytest

from acpfs.runtime.given import Runtime
from acpfs.writeback.members.pace import (
    BETWEEN_WRITES,
    BETWEEN_WRITES_MAX,
    HEARTBEAT_S_MAX,
    LIVELY,
    Pace,
)
from tests.rig.runtime import runtime_of

clause = pytest.mark.clause


class Clock:
    now = 1000.0

    @property
    def runtime(self) -> Runtime:
        return runtime_of(lambda: self.now)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@clause("S165")
def test_a_save_is_told_of_as_soon_as_may_be_and_idleness_seldom(clock: Clock) -> None:
    pace = Pace(2.0, clock.runtime)
    pace.writes(7, behind=False)
    assert pace.next_write() == BETWEEN_WRITES, (
        "a worker has begun: others' pointers may wait for it"
    )
    clock.now += LIVELY * 2.0
    pace.writes(7, behind=False)
    idle = [pace.next_write() for _ in range(100)]
    assert BETWEEN_WRITES <= min(idle) < max(idle) <= BETWEEN_WRITES_MAX
    pace.writes(
        8, behind=False
    )  # logged and persisted between two records: its pointer is still to come
    assert pace.next_write() == BETWEEN_WRITES
    clock.now += LIVELY * 2.0
    pace.writes(8, behind=True)
    assert pace.next_write() == BETWEEN_WRITES


@clause("S165")
def test_until_the_next_record_may_be_written(clock: Clock) -> None:
    pace = Pace(2.0, clock.runtime)
    assert pace.until_write_s() == 0
    pace.writes(0, behind=False)
    clock.now += 0.25
    assert pace.until_write_s() == pytest.approx(0.75)
    clock.now += 1.0
    assert pace.until_write_s() == 0


@clause("S160", "S161")
def test_what_is_withheld_for_days_is_looked_at_less_often(clock: Clock) -> None:
    pace = Pace(2.0, clock.runtime)
    assert pace.look_s(pointers=True) < pace.look_s(pointers=False) <= 0.5


@clause("S438")
def test_who_waits_for_many_looks_less_often(clock: Clock) -> None:
    pace = Pace(2.0, clock.runtime)
    few = pace.look_s(pointers=True, records=64)
    many = pace.look_s(pointers=True, records=400)
    assert few == pace.look_s(pointers=True) < many == 0.4
    most = pace.look_s(pointers=True, records=100_000)
    assert most == pace.look_s(pointers=False) == pace.look_s(pointers=False, records=100_000)
    assert BETWEEN_WRITES + most / 2.0 < 1, "S165: within a heartbeat"


@clause("S165")
@pytest.mark.parametrize(
    ("nodes", "heartbeat_s"), [(1, 2.0), (1024, 2.0), (4096, 8.0), (100_000, HEARTBEAT_S_MAX)]
)
def test_heartbeats_are_longer_with_many_nodes(
    clock: Clock, nodes: int, heartbeat_s: float
) -> None:
    pace = Pace(2.0, clock.runtime)
    pace.nodes = nodes
    assert pace.heartbeat_s == heartbeat_s
    assert Pace(60.0, clock.runtime).heartbeat_s == HEARTBEAT_S_MAX


@clause("S165")
def test_all_nodes_together_read_no_more_than_a_few_do(clock: Clock) -> None:
    pace = Pace(2.0, clock.runtime)
    for nodes in (2, 64, 640, 6400):
        pace.nodes = nodes
        reads = sum(pace.reads(16) for _ in range(20_000)) / 20_000 * nodes
        assert reads == pytest.approx(16 * min(nodes, 64), rel=0.15), nodes
