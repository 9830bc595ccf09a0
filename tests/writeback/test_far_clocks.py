"""One node's gate, and another node whose clock is hours away: its records, one after the other,
say what clocks do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from acpfs.writeback.members.peers import PAST_CACHES_S, RECORDS_AFTER
from tests.writeback.test_cluster import Node

clause = pytest.mark.clause
HOURS_S = 7200.0


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


class Other:
    """The other node: its clock is `ahead_s` away from ours, its wall clock was set by
    `drift_s`.
    """

    def __init__(self, node: Node, ahead_s: float, drift_s: float) -> None:
        self._node = node
        self._ahead_s = ahead_s
        self._drift_s = drift_s
        self._beat = 0
        self.oldest: float | None = None
        """By its clock: when the oldest was closed that is not persisted there."""

    def clock(self) -> float:
        return (
            self._node.log.clock.now() + self._ahead_s + self._beat * 1e-3
        )  # ours does not stand quite still

    def beat(self) -> None:
        self._beat += 1
        now = self.clock()
        done = now if self.oldest is None else self.oldest
        self._node.other(
            beat=self._beat, clock=now, watermark=done, pointers=done, drift_s=self._drift_s
        )

    async def beats(self, count: int) -> None:
        for _ in range(count):
            self._node.now += 1.0
            self.beat()
            await self._node.looked()


@clause("S227")
@pytest.mark.parametrize("what", ["pointer", "removal"])
@pytest.mark.parametrize(
    ("ahead_s", "drift_s"), [(-HOURS_S, 0.0), (0.0, HOURS_S), (0.0, -HOURS_S), (HOURS_S, -HOURS_S)]
)
def test_however_far_a_clock_is_away_pointers_wait_no_hours(
    node: Node, what: str, ahead_s: float, drift_s: float
) -> None:
    async def scenario() -> None:
        other = Other(node, ahead_s, drift_s)
        other.beat()
        await node.cluster.join()
        node.gate.begin()
        waiting = node.close(b"latest") if what == "pointer" else node.remove(b"shard")
        await other.beats(10)
        assert not node.gate.is_open(waiting), "what is read may be old"
        node.now += PAST_CACHES_S
        await other.beats(RECORDS_AFTER + 1)
        assert node.gate.is_open(waiting)

    trio.run(scenario)


@clause("S227")
def test_what_the_other_had_closed_before_is_waited_for(node: Node) -> None:
    async def scenario() -> None:
        other = Other(node, -HOURS_S, HOURS_S)
        other.beat()
        await node.cluster.join()
        node.gate.begin()
        other.oldest = other.clock()
        pointer = node.close(b"latest")
        await other.beats(10)
        node.now += PAST_CACHES_S
        await other.beats(200)
        assert not node.gate.is_open(pointer), "closed before the pointer, and not persisted"
        other.oldest = other.clock()  # that is persisted now; it goes on saving without end
        await other.beats(1)
        assert node.gate.is_open(pointer)

    trio.run(scenario)


@clause("S227")
def test_a_reader_waits_no_hours_either(node: Node) -> None:
    async def scenario() -> None:
        other = Other(node, -HOURS_S, 0.0)
        other.beat()
        await node.cluster.join()
        told: list[list[str]] = []

        def tell(behind: list[str]) -> None:
            told.append(behind)
            node.now += PAST_CACHES_S / 4
            other.beat()

        with trio.fail_after(60):
            await node.cluster.others_persisted(tell)
        assert told[0] == ["b"]

    trio.run(scenario)


@clause("S166")
def test_the_log_says_once_whose_clock_it_is(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        other = Other(node, 0.0, HOURS_S)
        other.beat()
        await node.cluster.join()
        for _ in range(3):
            other.beat()
            await node.cluster.look()

    trio.run(scenario)
    assert sum("wall clocks" in str(record.msg) for record in caplog.records) == 1
