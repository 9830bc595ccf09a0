"""A job that saves and has faults, event by event: what the formulas of `acpfs.training.interval`
are compared with.

Its rules are written down from the problem, not from the formulas. All times in seconds.
"""

from __future__ import annotations

import random
from collections import deque

from acpfs.training.interval import Job


class Run:
    """One job: where it is in its work, and which saves it could go back to."""

    def __init__(self, job: Job, interval_s: float) -> None:
        self.job = job
        self.interval_s = interval_s
        self.now = 0.0
        self.saved = 0.0
        """Work that the newest save has."""
        self.since = 0.0
        """Time since that save ended; the first `interval_s` of it is training, the rest saving."""
        self.saves: deque[tuple[float, float]] = deque([(float("-inf"), 0.0)])
        """(when it ended, work it has): as far back as something may not be drained."""

    def train(self, seconds: float) -> None:
        """Go on without a fault."""
        segment = self.interval_s + self.job.save_s
        ended = self.now - self.since
        complete, self.since = divmod(self.since + seconds, segment)
        self.now += seconds
        first = max(
            0, int(complete) - int(self.job.drain_s / segment) - 2
        )  # older ones are drained by now
        for number in range(first, int(complete)):
            self.saves.append(
                (ended + (number + 1) * segment, self.saved + (number + 1) * self.interval_s)
            )
        self.saved += complete * self.interval_s
        while len(self.saves) > 1 and self.saves[1][0] + self.job.drain_s <= self.now:
            self.saves.popleft()

    def lose(self, *, node: bool) -> None:
        """A fault that costs steps; with a node, all that was not drained is gone."""
        if node:
            while len(self.saves) > 1 and self.saves[-1][0] + self.job.drain_s > self.now:
                self.saves.pop()
        self.saved = self.saves[-1][1]
        self.since = 0.0


def simulate(job: Job, interval_s: float, faults: int, seed: int) -> float:
    """Share of the time that was not training."""
    draw = random.Random(seed)
    run = Run(job, interval_s)
    for _ in range(faults):
        until = draw.expovariate(1 / job.fault_s)
        kind = draw.random()
        node = draw.random()
        run.train(until)
        if kind >= job.covered:
            run.lose(node=node < job.node_share)
        down = draw.expovariate(1 / job.fault_s)
        while down < job.restart_s:  # a fault while it restarts: it begins to restart again
            run.now += down
            down = draw.expovariate(1 / job.fault_s)
        run.now += job.restart_s
    return 1 - (run.saved + min(run.since, interval_s)) / run.now
