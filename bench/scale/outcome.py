"""One scenario through drain and gate: the figures that somebody who plans a cluster asks for."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bench.scale.drain import Drained, drain
from bench.scale.gate import Gate, Load, load
from bench.scale.scenario import Design, Scenario

HOUR_S = 3600.0
DAY_S = 86_400.0
METADATA_LEFT_MIN = 0.05
"""Of the metadata server, for files, however busy acpfs' own records keep it: it serves all in
turn.
"""


@dataclass(frozen=True)
class Outcome:
    """See above. Of the last save, where it is about one."""

    scenario: Scenario
    design: Design
    persisted_s: float
    """From the last close to the last byte of the slowest node."""
    persisted_mean_s: float
    """Of all nodes."""
    keeps_up: bool
    """A save is persisted before the next one begins."""
    pointer_delay_s: float
    """Beyond the slowest node, worst of all pointers."""
    pointer_reads: float
    """Records read for one pointer."""
    ram_per_node: float
    """Dirty bytes at the worst moment: less, and writers wait."""
    at_risk_peak: float
    at_risk_mean: float
    """Bytes of all nodes together that only RAM has."""
    lost_per_day: float
    """Bytes that node failures take with them on average, if no RAM tier came back."""
    withheld: float
    """Share of saves whose pointer waits for a node that failed before it had persisted."""
    load: Load

    @property
    def heartbeat_s(self) -> float:
        """With so many nodes."""
        return self.design.heartbeat_s(self.scenario.nodes, self.scenario.heartbeat_s)

    @property
    def bound_s(self) -> float:
        """Within which a pointer is to follow the slowest node."""
        return self.heartbeat_s + self.scenario.clock_bound_s

    @property
    def own_share(self) -> float:
        """Of the metadata server's time that acpfs' records take."""
        return self.load.total / self.scenario.metadata_rate


def simulate(scenario: Scenario, design: Design) -> Outcome:
    """Run it."""
    own = load(scenario, design)
    left = max(METADATA_LEFT_MIN * scenario.metadata_rate, scenario.metadata_rate - own.total)
    drained = drain(scenario, left)
    pointers = [
        Gate(scenario, design, scenario.seed * 1000 + number).passes(
            drained.of(number // scenario.pointers_per_save)
        )
        for number in range(scenario.saves * scenario.pointers_per_save)
    ]
    last = drained.of(scenario.saves - 1)
    closed_at = max(one.closed_at for one in last)
    failures_per_s = scenario.nodes / scenario.mtbf_s
    return Outcome(
        scenario,
        design,
        persisted_s=max(one.persisted_at for one in last) - closed_at,
        persisted_mean_s=sum(one.persisted_at - one.closed_at for one in last) / len(last),
        keeps_up=max(one.persisted_at - one.closed_at for one in drained.saved)
        <= scenario.interval_s,
        pointer_delay_s=max(pointer.delay_s for pointer in pointers),
        pointer_reads=sum(pointer.reads for pointer in pointers) / len(pointers),
        ram_per_node=drained.node_dirty_peak,
        at_risk_peak=drained.dirty_peak,
        at_risk_mean=drained.dirty_mean,
        lost_per_day=failures_per_s * DAY_S * drained.dirty_mean / scenario.nodes,
        withheld=withheld(scenario, drained),
        load=own,
    )


def withheld(scenario: Scenario, drained: Drained) -> float:
    """Each part of a save survives with exp(-time that it is dirty / mtbf)."""
    exposed = [0.0] * scenario.saves
    for one in drained.saved:
        exposed[one.save] += one.persisted_at - one.closed_at
    return sum(1 - math.exp(-seconds / scenario.mtbf_s) for seconds in exposed) / scenario.saves


def failures(scenario: Scenario, drained: Drained, seed: int) -> float:
    """Bytes lost in one history of failures, drawn by `seed`; their mean over many is
    `Outcome.lost_per_day`, per time.
    """
    chance = random.Random(seed)
    lost = 0.0
    by_node: dict[int, list[tuple[float, float, float, float]]] = {}
    for one in drained.saved:
        by_node.setdefault(one.node, []).append(
            (one.closed_at, one.begun_at, one.persisted_at, one.size)
        )
    at = chance.expovariate(scenario.nodes / scenario.mtbf_s)
    while at < drained.span_s:
        for closed_at, begun_at, persisted_at, size in by_node[chance.randrange(scenario.nodes)]:
            if closed_at <= at < persisted_at:
                lost += size * min(1.0, (persisted_at - at) / (persisted_at - begun_at))
        at += chance.expovariate(scenario.nodes / scenario.mtbf_s)
    return lost
