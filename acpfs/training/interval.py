"""How often to save: the interval that wastes least, given what a save, a restart and a fault cost.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22, 2006. The expected time of a segment with exponential faults is Daly's; faults that cost no
step, and nodes whose RAM is lost before the drain, are added to it. `tests/training/simulation.py`
checks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

PRODUCT_CURVE = (
    (50, 600),
    (100, 2000),
    (150, 5000),
    (200, 8000),
    (250, 12000),
    (300, 17000),
    (350, 21000),
    (400, 27000),
    (450, 32000),
)
"""(seconds of a save, seconds between saves) as MindIO's documents recommend."""
_NARROW = 200
"""Steps of the golden section: far more than doubles can tell apart."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Job:
    """What decides. All times in seconds."""

    save_s: float
    """How long a save holds up training."""
    restart_s: float
    """From a fault until the first step of the restarted job."""
    fault_s: float
    """Mean time between faults of the whole job."""
    covered: float = 0.0
    """Share of faults that cost no step: survivors leave a checkpoint of the last one, or the rank
    is replaced.
    """
    node_share: float = 0.0
    """Share of the other faults that take a node and its RAM: what was not drained is lost."""
    drain_s: float = 0.0
    """From the end of a save until it is persisted."""

    def __post_init__(self) -> None:
        for name in ("save_s", "fault_s"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be more than 0")
        for name in ("restart_s", "drain_s"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must not be less than 0")
        for name in ("covered", "node_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1")

    @property
    def losing_s(self) -> float:
        """Mean time between faults that cost steps; infinite where all are covered."""
        return math.inf if self.covered == 1 else self.fault_s / (1 - self.covered)


def mean_fault_s(observed_s: float, faults: int, prior_s: float = 0.0) -> float:
    """Mean time between faults from what was observed: the mean of a gamma posterior with one fault
    assumed in `prior_s` before.

    So a job that never had a fault does not get "never". Without `prior_s` the one fault is assumed
    within what was observed.

    Raises:
        ValueError: nothing was observed and nothing is assumed, or a negative number.
    """
    if observed_s < 0 or faults < 0 or prior_s < 0 or observed_s + prior_s <= 0:
        raise ValueError("a mean time between faults takes an observed time, or one to begin with")
    return (observed_s + prior_s) / (faults + 1)


def young_s(job: Job) -> float:
    """Young's first-order interval."""
    return math.sqrt(2 * job.save_s * job.losing_s)


def daly_s(job: Job) -> float:
    """Daly's higher-order interval (his equation 37)."""
    ratio = job.save_s / (2 * job.losing_s)
    if ratio >= 1:
        return job.losing_s
    if ratio == 0:
        return math.inf
    return (
        math.sqrt(2 * job.save_s * job.losing_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
        - job.save_s
    )


def waste(job: Job, interval_s: float) -> float:
    """Share of the time that is not training, when a save begins `interval_s` of training after the
    last one ended: 0 to 1.
    """
    segment = interval_s + job.save_s
    rate = 1 / job.losing_s
    if rate * segment > 700:  # more than a double holds: no segment ever ends
        return 1.0
    expected = (
        segment
        if rate == 0
        else math.expm1(rate * segment) / rate * math.exp(min(700.0, rate * job.restart_s))
    )
    covered = job.covered / job.fault_s * job.restart_s
    undrained = rate * job.node_share * job.drain_s
    return 1 - interval_s / (expected * (1 + covered + undrained))


def best_s(job: Job) -> float:
    """The interval that wastes least; infinite where no fault costs steps.

    Golden section on the logarithm: the waste has one minimum.
    """
    if math.isinf(job.losing_s):
        return math.inf
    low = math.log(min(job.save_s, job.losing_s) / 1e4)
    high = math.log(20 * max(job.save_s, job.losing_s))
    for _ in range(_NARROW):
        left = high - _GOLDEN * (high - low)
        right = low + _GOLDEN * (high - low)
        if waste(job, math.exp(left)) <= waste(job, math.exp(right)):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def lost_s_a_day(job: Job, interval_s: float) -> float:
    """Seconds of training that are repeated per day."""
    faults = 86400 / job.losing_s
    return faults * ((interval_s + job.save_s) / 2 + job.node_share * job.drain_s)


def without_cover(job: Job) -> Job:
    """The same job where every fault costs the steps since the last save."""
    return replace(job, covered=0.0)


def product_s(save_s: float) -> float:
    """The interval that the product's curve has for a save of so many seconds; its first point
    before that, its last line beyond.
    """
    points = PRODUCT_CURVE
    if save_s <= points[0][0]:
        return float(points[0][1])
    index = next((i for i in range(1, len(points) - 1) if save_s <= points[i][0]), len(points) - 1)
    (x0, y0) = points[index - 1]
    (x1, y1) = points[index]
    return y0 + (save_s - x0) * (y1 - y0) / (x1 - x0)


def implied_fault_s(save_s: float, interval_s: float) -> float:
    """The mean time between faults for which Young's interval is this one: what a recommendation
    assumes without saying so.
    """
    return interval_s**2 / (2 * save_s)
