"""The model of bench.scale beside real mounts: 2, 4 and 8 of them over one limited backing
directory.

Usage: python -m bench.simulate_check [--quick | --stagger]. Compared: seconds to persisted, the
pointer's delay after the slowest node, operations that acpfs' own records cost the backing
directory; with `--stagger` instead, what that does where many clients are in each other's way.
Everything is seen on the backing directory's source, past all mounts: a shard, and then the
pointer, is there under its name, or it is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import places
from bench.record import MB, MIB, Report, median
from bench.scale.drain import drain
from bench.scale.gate import Gate, load
from bench.scale.outcome import simulate
from bench.scale.scenario import LANDED, Scenario
from tests.cluster.stand import Stand
from tests.rig.faultfs import FaultFs

SETTINGS: dict[str, Any] = {
    "heartbeat": 2.0,
    "clock_bound": 0.5,
    "node_timeout": 30,
    "ram": "192M",
    "keep_checkpoints": 0,
}
BANDWIDTH = 32 * MB
SIZE = 24 * MIB
LOOK_S = 0.005
SAVE_TIMEOUT_S = 120.0
IDLE_S = 10.0
CROWD = 4
CROWDED_BANDWIDTH = 48 * MB
POINTER = "latest"
UNCACHED = dataclasses.replace(LANDED, publish_operations=28.0, read_operations=14.0)
"""Counted: the limited file system's client remembers neither names nor attributes, and all
requests count, not only metadata.
"""


@dataclasses.dataclass(frozen=True)
class Seen:
    """One save, in seconds after the last close of a shard."""

    persisted_s: float
    pointer_s: float


def scenario(nodes: int, **changes: object) -> Scenario:
    """What is mounted here, for the model."""
    base = Scenario(
        nodes=nodes,
        bytes_per_node=SIZE,
        files_per_node=1,
        bandwidth=BANDWIDTH,
        client_bandwidth=BANDWIDTH,
        saves=1,
    )
    base = dataclasses.replace(
        base,
        close_spread_s=0.1,
        stream_cost_s=0.05,
        clock_error_s=0.0,
        latency_s=0.003,
        metadata_rate=1e6,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def save(stand: Stand, source: Path, number: int) -> Seen:
    """All nodes write a shard; when all have closed theirs, the first one writes the pointer."""
    content = os.urandom(SIZE)

    def shard(node: int) -> None:
        (stand.nodes[node].path / f"s{number}-{node}").write_bytes(content)

    with ThreadPoolExecutor(len(stand.nodes)) as pool:
        list(pool.map(shard, range(len(stand.nodes))))
    closed = time.monotonic()
    (stand.nodes[0].path / POINTER).write_text(str(number))
    missing = {source / f"s{number}-{node}" for node in range(len(stand.nodes))}
    persisted = 0.0
    pointed = 0.0
    while not (persisted and pointed):
        now = time.monotonic()
        if now - closed > SAVE_TIMEOUT_S:
            raise RuntimeError(f"save {number}: {missing or 'the pointer'} did not come")
        missing = {path for path in missing if not path.exists()}
        persisted = persisted or (0.0 if missing else now)
        pointed = pointed or (now if read(source / POINTER) == str(number) else 0.0)
        time.sleep(LOOK_S)
    for path in source.glob(f"s{number - 1}-*"):
        path.unlink()
    return Seen(persisted - closed, pointed - closed)


def read(path: Path) -> str:
    """Nothing, where it is not there yet."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def calls(limited: FaultFs) -> int:
    """How many there were."""
    return sum(count for name, count in limited.counters().items() if name != "read_bytes")


def compare(report: Report, scratch: Path, nodes: int, saves: int, idle_s: float) -> None:
    """Rows of one number of nodes."""
    base = scratch / f"n{nodes}"
    base.mkdir()
    with (
        FaultFs(
            base / "source", base / "limited", bandwidth=BANDWIDTH, watchdog_s=places.WATCHDOG_S
        ) as limited,
        Stand(base, [limited.path] * nodes, watchdog_s=places.WATCHDOG_S, **SETTINGS) as stand,
    ):
        seen = [save(stand, limited.source, number) for number in range(1, saves + 1)]
        time.sleep(SETTLE_S)
        before = calls(limited)
        began = time.monotonic()
        time.sleep(idle_s)
        asked = (calls(limited) - before) / (time.monotonic() - began)
    model = scenario(nodes)
    expected = simulate(model, LANDED)
    delays = [one.pointer_s - one.persisted_s for one in seen]
    row(
        report,
        f"{nodes} nodes: to persisted, s",
        expected.persisted_s,
        [one.persisted_s for one in seen],
    )
    modelled = [Gate(model, LANDED, seed).passes(drain(model).saved).delay_s for seed in range(200)]
    row(report, f"{nodes} nodes: pointer after the slowest node, s", median(modelled), delays)
    row(
        report,
        f"{nodes} nodes: records, operations per second",
        load(model, UNCACHED).total,
        [asked],
    )
    bound_s = model.heartbeat_s + model.clock_bound_s
    report.bar(
        f"{nodes} nodes: pointer within heartbeat + bound",
        f"{max(delays):.2f} of {bound_s:.1f} s",
        met=max(delays) <= bound_s,
    )


SETTLE_S = 5.0


def row(report: Report, name: str, expected: float, found: list[float]) -> None:
    """Model and measurement, side by side."""
    report.row(
        name,
        f"{expected:.2f}",
        f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})",
        f"{median(found) / expected:.2f}",
    )
    report.samples[name] = found


def pace(report: Report, scratch: Path, saves: int) -> None:
    """All at once and one after the other, over storage that is best with one client."""
    found: dict[float, list[float]] = {}
    for window_s in (0.0, 60.0):
        base = scratch / f"paced{window_s:g}"
        base.mkdir()
        with (
            places.served(
                "bench.crowded_storage",
                base / "source",
                base / "crowded",
                str(CROWDED_BANDWIDTH),
                "1",
            ) as crowded,
            Stand(
                base, [crowded] * CROWD, watchdog_s=places.WATCHDOG_S, stagger=window_s, **SETTINGS
            ) as stand,
        ):
            found[window_s] = [
                save(stand, base / "source", number).persisted_s for number in range(1, saves + 1)
            ]
        model = scenario(
            CROWD,
            bandwidth=CROWDED_BANDWIDTH,
            client_bandwidth=CROWDED_BANDWIDTH,
            clients_at_best=1,
            contention=0.7,
        )
        model = dataclasses.replace(model, stagger_s=window_s, saves=saves)
        name = f"--stagger {window_s:g}" if window_s else "all at once"
        row(
            report,
            f"crowded storage, {CROWD} nodes, {name}: to persisted, s",
            simulate(model, LANDED).persisted_s,
            found[window_s][-4:],
        )
        report.samples[f"crowded storage, {name}, every save, s"] = found[window_s]
    with_s = median(found[60.0][-4:])
    without_s = median(found[0.0][-4:])
    report.bar(
        "staggered saves are persisted sooner",
        f"{with_s:.1f} s instead of {without_s:.1f}",
        met=with_s < without_s,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="2 nodes, a minute; nothing is kept")
    parser.add_argument(
        "--stagger",
        action="store_true",
        help="storage that is best with one client, with and without staggering",
    )
    words = parser.parse_args()
    name = "simulate_check_stagger" if words.stagger else "simulate_check"
    report = Report(
        name,
        "The model beside real mounts",
        ["what", "model", "measured", "measured ÷ model"],
        program="simulate_check",
    )
    with places.scratch() as scratch:
        if words.stagger:
            pace(report, scratch, 7)
        else:
            for nodes in (2,) if words.quick else (2, 4, 8):
                compare(
                    report, scratch, nodes, 2 if words.quick else 3, 5.0 if words.quick else IDLE_S
                )
    return report.finish(keep=not words.quick)


if __name__ == "__main__":
    sys.exit(main())
