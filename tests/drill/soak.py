"""A soak: one mount, mixed load, faults again and again; what acpfs' processes hold is sampled
after each drain and must stay flat.

Flat: the median of the last quarter of the samples is not above that of the second quarter (the
first is warm-up) by more than a slack.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.drill import faults, server
from tests.drill.block import one_cycle
from tests.drill.result import Result
from tests.drill.stand import THREADS_MORE_MAX, WATCHDOG_S, Stand
from tests.drill.workloads import WORKLOADS

SLACKS = {"rss_bytes": 24 << 20, "descriptors": 12, "threads": THREADS_MORE_MAX}
"""Threads: pools grow while the storage hangs, and are small again in the next worker."""
SAMPLES_MIN = 8
FAULTS: dict[str, Callable[[Stand], faults.Outcome]] = {
    "server fails": server.server_fails,
    "server hangs": server.server_hangs,
    "kill application": faults.kill_application,
    "kill worker": faults.kill_worker,
}


@dataclass(frozen=True)
class Sample:
    """What the mount's processes hold together."""

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int


def sample(stand: server.ServerStand) -> Sample:
    """Now, after a drain."""
    rss = 0
    descriptors = 0
    threads = 0
    for pid in stand.processes():
        base = Path(f"/proc/{pid}")
        fields = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines())
        rss += int(fields["RssAnon"].split()[0]) * 1024
        threads += int(fields["Threads"])
        descriptors += len(list((base / "fd").iterdir()))
    return Sample(time.monotonic(), rss, descriptors, threads)


def medians(samples: list[Sample]) -> dict[str, tuple[float, float]]:
    """Of the second and of the last quarter, by what was counted."""
    quarter = len(samples) // 4
    early = samples[quarter : 2 * quarter]
    late = samples[-quarter:]
    return {
        name: (
            statistics.median(getattr(s, name) for s in early),
            statistics.median(getattr(s, name) for s in late),
        )
        for name in SLACKS
    }


def growth(samples: list[Sample]) -> list[str]:
    """What has grown since the warm-up."""
    if len(samples) < SAMPLES_MIN:
        return []
    found = medians(samples).items()
    return [
        f"{name} grew from {early:.0f} to {late:.0f}"
        for name, (early, late) in found
        if late > early + SLACKS[name]
    ]


def soak(
    seed: int, minutes: float, transport: str, tell: Callable[[str], None]
) -> tuple[Result, list[Sample]]:
    """Run it."""
    chooser = random.Random(seed)
    result = Result(seed, soak_minutes=minutes, transport=transport)
    samples = list[Sample]()
    with tempfile.TemporaryDirectory(prefix="drill-") as base:
        stand = server.ServerStand(
            Path(base) / "soak", "rename", transport, seed, watchdog_s=minutes * 60 + WATCHDOG_S
        )
        with stand:
            deadline = time.monotonic() + minutes * 60
            names = [name for name in FAULTS if name != "kill worker" or stand.supervisors()]
            while (time.monotonic() < deadline or not samples) and not result.losses:
                if stand.application is None:
                    stand.workload = chooser.choice(list(WORKLOADS))
                name = chooser.choice(names)
                outcome = one_cycle(stand, FAULTS[name])
                samples.append(sample(stand))
                result.note(name, stand.workload, outcome.losses)
                last = samples[-1]
                tell(
                    f"{name} × {stand.workload}: {last.rss_bytes >> 20} MiB, {last.descriptors} "
                    f"descriptors, {last.threads} threads"
                )
    result.note("soak", transport, growth(samples), times=0)
    if len(samples) >= SAMPLES_MIN:
        result.remarks += [
            f"{name}: {early:.0f} in the second quarter, {late:.0f} in the last"
            for name, (early, late) in medians(samples).items()
        ]
    return result, samples
