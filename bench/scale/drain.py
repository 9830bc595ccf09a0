"""Saves of many nodes over one storage, as fluids: when each node has persisted which save, and
what is dirty meanwhile.

Nodes that drain share the storage's bandwidth equally, none gets more than its link, and all files
together no more metadata operations than are left. Between two events (a node begins, a node is
done) nothing changes, so time leaps from one to the next. A node drains its saves in order; when it
begins, `acpfs.writeback.streams.stagger` says, the very code that runs in a mount. Content counts
as dirty from the close of the last file, and as not persisted until the save's last byte: real
drains begin at the first close, and are earlier by that. Deterministic.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from acpfs.writeback.streams.stagger import Stagger
from bench.scale.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Saved:
    """One save of one node."""

    save: int
    node: int
    size: float
    closed_at: float
    begun_at: float
    persisted_at: float


@dataclass
class Drained:
    """What came of all saves."""

    saved: list[Saved]
    dirty_peak: float
    """Bytes, all nodes together."""
    dirty_mean: float
    """Over the time from the first close to the last save's end, or its interval's."""
    node_dirty_peak: float
    span_s: float

    def of(self, save: int) -> list[Saved]:
        """All nodes' part of one save."""
        return [one for one in self.saved if one.save == save]


@dataclass
class _Node:
    number: int
    stagger: Stagger
    waiting: deque[tuple[int, float, float]] = field(default_factory=deque)
    """Saves that are closed and not begun: number, size, time of the close."""
    current: tuple[int, float, float, float, float] | None = None
    """The same, when it was begun, and where it ends (`v`)."""
    closed_bytes: float = 0.0
    persisted_bytes: float = 0.0


class _Simulation:
    """One run; see above.

    `v`: bytes that every node that drains now has sent since the beginning of time.
    """

    def __init__(self, scenario: Scenario, metadata_rate: float) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.v = 0.0
        self.metadata_bytes_rate = (
            metadata_rate
            * scenario.bytes_per_node
            / (scenario.files_per_node * scenario.operations_per_file)
        )
        self.nodes = [self._node(number) for number in range(scenario.nodes)]
        self.closes: list[tuple[float, int, int, float]] = []
        self.begins: list[tuple[float, int]] = []
        self.ends: list[tuple[float, int]] = []
        self.saved: list[Saved] = []
        self.dirty = 0.0
        self.dirty_peak = 0.0
        self.dirty_time = 0.0
        self.node_dirty_peak = 0.0

    def _node(self, number: int) -> _Node:
        stagger = Stagger(
            self.scenario.stagger_s, lambda: number / self.scenario.nodes, lambda: self.now
        )
        return _Node(number, stagger)

    def rate(self) -> float:
        """Of each node that drains."""
        clients = len(self.ends)
        storage = min(self.scenario.storage_rate(clients), self.metadata_bytes_rate)
        return min(self.scenario.client_rate(), storage / clients)

    def run(self) -> Drained:
        chance = random.Random(self.scenario.seed)
        for save in range(self.scenario.saves):
            for node in self.nodes:
                size = self.scenario.bytes_per_node * (
                    1 + self.scenario.bytes_skew * chance.uniform(-1, 1)
                )
                at = (
                    save * self.scenario.interval_s + chance.random() * self.scenario.close_spread_s
                )
                self.closes.append((at, node.number, save, size))
        heapq.heapify(self.closes)
        while self.closes or self.begins or self.ends:
            self._step()
        span_s = max(self.now, self.scenario.saves * self.scenario.interval_s)
        return Drained(
            self.saved, self.dirty_peak, self.dirty_time / span_s, self.node_dirty_peak, span_s
        )

    def _step(self) -> None:
        end = (
            self.now + max(0.0, self.ends[0][0] - self.v) / self.rate()
            if self.ends
            else float("inf")
        )
        close = self.closes[0][0] if self.closes else float("inf")
        begin = self.begins[0][0] if self.begins else float("inf")
        self._leap(min(end, close, begin))
        if end <= min(close, begin):
            self._done(self.nodes[heapq.heappop(self.ends)[1]])
        elif begin <= close:
            self._begin(self.nodes[heapq.heappop(self.begins)[1]])
        else:
            _at, number, save, size = heapq.heappop(self.closes)
            self._closed(self.nodes[number], save, size)

    def _leap(self, to: float) -> None:
        elapsed = to - self.now
        sent = elapsed * self.rate() if self.ends else 0.0
        self.dirty_time += elapsed * (self.dirty - sent * len(self.ends) / 2)
        self.v += sent
        self.dirty -= sent * len(self.ends)
        self.now = to

    def _closed(self, node: _Node, save: int, size: float) -> None:
        node.stagger.logged(int(size))
        node.waiting.append((save, size, self.now))
        node.closed_bytes += size
        self.dirty += size
        self.dirty_peak = max(self.dirty_peak, self.dirty)
        sent = 0.0 if node.current is None else node.current[1] - max(0.0, node.current[4] - self.v)
        self.node_dirty_peak = max(
            self.node_dirty_peak, node.closed_bytes - node.persisted_bytes - sent
        )
        if node.current is None and len(node.waiting) == 1:
            heapq.heappush(
                self.begins, (self.now + node.stagger.delay_s(pressed=False), node.number)
            )

    def _begin(self, node: _Node) -> None:
        save, size, closed_at = node.waiting.popleft()
        node.current = (save, size, closed_at, self.now, self.v + size)
        heapq.heappush(self.ends, (self.v + size, node.number))

    def _done(self, node: _Node) -> None:
        assert node.current is not None
        save, size, closed_at, begun_at, _ends = node.current
        self.saved.append(Saved(save, node.number, size, closed_at, begun_at, self.now))
        node.persisted_bytes += size
        node.stagger.staged(int(size))
        node.current = None
        if node.waiting:
            self._begin(node)


def drain(scenario: Scenario, metadata_rate: float | None = None) -> Drained:
    """Run it. `metadata_rate`: what is left for files; default: all."""
    return _Simulation(
        scenario, scenario.metadata_rate if metadata_rate is None else metadata_rate
    ).run()
