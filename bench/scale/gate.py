"""Pointers that wait for other nodes' records, and what those records cost the metadata server.

Each node publishes its watermark at its beats; whoever has a gated pointer looks every tenth of a
heartbeat, lists, reads the records of those that have not passed and may have written again, a few
at a time, and passes when the last one has. Requests take longer the busier the metadata server is
(one queue, random arrivals), and beats come later where it cannot do them all. Deterministic by
seed.
"""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass

from acpfs.writeback.members.pace import READERS, SHARED_FROM
from bench.scale.drain import Saved
from bench.scale.scenario import ENTRIES_PER_READDIR, Design, Scenario

BUSY_MAX = 0.98
"""A queue is not longer than fifty requests: then clients wait with the next one."""


@dataclass(frozen=True)
class Load:
    """Operations per second on the metadata server, from acpfs' records alone, while nothing is
    gated.
    """

    publishing: float
    reading: float
    listing: float

    @property
    def total(self) -> float:
        return self.publishing + self.reading + self.listing


def load(scenario: Scenario, design: Design) -> Load:
    """What is asked for; a server that cannot do it does less, later."""
    nodes = scenario.nodes
    beats = nodes / design.beat_s(nodes, scenario.heartbeat_s)
    return Load(
        publishing=beats * design.published() * design.publish_operations,
        reading=beats * design.heard_by(nodes) * design.read_operations,
        listing=beats * design.listings(nodes) * listing_operations(nodes) if nodes > 1 else 0.0,
    )


def listing_operations(nodes: int) -> float:
    """One listing: open, pages of names, release."""
    return 2 + max(1.0, nodes / ENTRIES_PER_READDIR)


@dataclass(frozen=True)
class Passed:
    """One pointer."""

    delay_s: float
    """Beyond the moment at which the slowest node had persisted its files."""
    reads: int
    looks: int


class Gate:
    """One save's pointer."""

    def __init__(self, scenario: Scenario, design: Design, seed: int) -> None:
        self._scenario = scenario
        self._design = design
        self._random = random.Random(seed)
        busy = load(scenario, design).total / scenario.metadata_rate
        self._latency_s = scenario.latency_s / (1 - min(busy, BUSY_MAX))
        self._heartbeat_s = design.heartbeat_s(scenario.nodes, scenario.heartbeat_s)
        self._beat_s = design.lively_beat * self._heartbeat_s * max(1.0, busy)

    def _told_at(self, since: float) -> float:
        """When others can read that a node has what it was to have since then: its next beat, and
        in groups its leader's.
        """
        told = since + self._random.random() * self._beat_s + self._latency_s
        if self._design.group and self._scenario.nodes > self._design.group:
            collecting = (
                min(self._design.group, self._scenario.nodes)
                * self._latency_s
                / self._design.readers
            )
            told += (
                self._random.random() * max(self._beat_s, collecting) + collecting + self._latency_s
            )
        return told

    def passes(self, saved: list[Saved]) -> Passed:
        """`saved`: of all nodes; the last one to close writes the pointer then."""
        scenario = self._scenario
        closed = max(saved, key=lambda one: one.closed_at)
        error = scenario.clock_error_s
        told: list[float] = []
        for one in saved:
            if one is closed:
                continue
            behind = self._random.uniform(-error, error)
            told.append(
                self._told_at(
                    max(one.persisted_at, closed.closed_at + scenario.clock_bound_s + behind)
                )
            )
        if not told:
            return Passed(0.0, 0, 0)
        units = _grouped(told, self._design.group) if self._design.group else told
        slowest = max(one.persisted_at for one in saved)
        at, reads, looks = self._look(units, closed.closed_at, slowest)
        return Passed(at - slowest, reads, looks)

    def _look(self, units: list[float], begins: float, slowest: float) -> tuple[float, int, int]:
        """Look until all have passed: when, reads, looks."""
        at = begins
        reads = 0
        looks = 0
        missing = sorted(units)
        each_s = self._latency_s / (
            self._design.readers if self._scenario.nodes > SHARED_FROM else READERS
        )
        listing_s = listing_operations(self._scenario.nodes) * self._latency_s
        due = self._due()
        while True:
            took_s = (
                listing_s
                if self._design.in_names or self._design.lists_to_read or not looks
                else 0.0
            )
            reading = (
                0 if self._design.in_names else round(len(missing) * due) if looks else len(missing)
            )
            reading_s = reading * each_s
            reads += reading
            missing = self._unpassed(missing, at, took_s, reading_s)
            looks += 1
            if not missing:
                return max(at + took_s + reading_s, slowest), reads, looks
            at += max(self._design.look * self._heartbeat_s, took_s + reading_s)

    def _due(self) -> float:
        """Of the records that were read, those that may be others at the next look: by clocks that
        may be ahead by the bound.
        """
        if not self._design.leaves_out:
            return 1.0
        return min(
            1.0,
            (self._design.look * self._heartbeat_s + self._scenario.clock_bound_s) / self._beat_s,
        )

    def _unpassed(
        self, told: list[float], at: float, listing_s: float, reading_s: float
    ) -> list[float]:
        """Of records that are read one after the other, in no order that is known."""
        if not reading_s:
            return told[bisect.bisect_right(told, at) :]
        began = at + listing_s
        first = bisect.bisect_right(told, began)
        last = bisect.bisect_right(told, began + reading_s)
        return [
            one for one in told[first:last] if one > began + self._random.random() * reading_s
        ] + told[last:]


def _grouped(told: list[float], size: int) -> list[float]:
    """A group has passed when its last node has."""
    return [max(told[start : start + size]) for start in range(0, len(told), size)]
