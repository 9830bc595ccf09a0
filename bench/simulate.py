"""Scale on paper: N nodes over one backing directory, from 8 to 16,384. Run through tools/simulate.

Reports time to persisted, the pointer's delay, RAM, bytes at risk and the load of acpfs' own
records; `--keep` saves table and curves in bench/results. What the model is, and how far it was
compared with real mounts: docs/SCALE.md and `bench.simulate_check`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable

from acpfs.config import parse_size
from bench.plot import Chart, charts
from bench.record import RESULTS, Report
from bench.scale.drain import drain
from bench.scale.outcome import Outcome, simulate
from bench.scale.scenario import DESIGNS, GB, LANDED, Scenario

NODES = (8, 128, 512, 1024, 2048, 4096, 16384)
SIZES = ("bytes_per_node", "bandwidth", "client_bandwidth")
STAGGERED_S = 600.0
CLIENTS_AT_BEST = 128
LIGHT = 0.25
COLUMNS = [
    "nodes",
    "records",
    "heartbeat",
    "persisted",
    "pointer after that",
    "reads per pointer",
    "dirty per node",
    "at risk (mean)",
    "lost per day",
    "pointers withheld",
    "records op/s",
    "of the server",
]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes", default=",".join(map(str, NODES)), help="how many, several with commas between"
    )
    parser.add_argument(
        "--weak",
        type=float,
        default=0.0,
        help="storage grows with the nodes: so many bytes per second for each",
    )
    parser.add_argument(
        "--keep", action="store_true", help="save table and curves in bench/results"
    )
    for field in dataclasses.fields(Scenario):
        if field.name != "nodes":
            kind = parse_size if field.name in SIZES else type(field.default)
            parser.add_argument(
                "--" + field.name.removesuffix("_s").replace("_", "-"),
                dest=field.name,
                type=kind,
                default=field.default,
            )
    return parser.parse_args()


def scenarios(arguments: argparse.Namespace) -> list[Scenario]:
    """One per number of nodes."""
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Scenario)
        if field.name != "nodes"
    }
    found = []
    for nodes in map(int, arguments.nodes.split(",")):
        bandwidth = arguments.weak * nodes if arguments.weak else given["bandwidth"]
        found.append(Scenario(**{**given, "nodes": nodes, "bandwidth": bandwidth}))
    return found


def report(outcomes: list[Outcome]) -> Report:
    """The table."""
    found = Report(
        "simulate",
        f"Scale on paper: {describe(outcomes[0].scenario)}",
        COLUMNS,
    )
    for one in outcomes:
        found.row(*cells(one))
        found.samples[f"{one.design.name}, {one.scenario.nodes} nodes, pointer delay s"] = [
            one.pointer_delay_s
        ]
    if outcomes[0].scenario.stagger_s:
        found.notes += [
            f"{one.scenario.nodes} nodes, save by save: {by_save(one.scenario)}"
            for one in outcomes
            if one.design == LANDED
        ]
    for design in DESIGNS:
        bound = [one for one in outcomes if one.design == design]
        soon = up_to(bound, lambda one: one.pointer_delay_s <= one.bound_s)
        light = up_to(bound, lambda one: one.own_share <= LIGHT)
        found.notes.append(
            f"{design.name}: pointers within heartbeat + clock bound up to {soon} nodes, "
            f"records below a quarter of the metadata server up to {light}"
        )
    return found


def _shown(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def by_save(scenario: Scenario) -> str:
    """Seconds to persisted, all at once and staggered."""
    lines = []
    for window_s in (0.0, scenario.stagger_s):
        drained = drain(dataclasses.replace(scenario, stagger_s=window_s), scenario.metadata_rate)
        saves = (drained.of(number) for number in range(scenario.saves))
        took = [
            max(one.persisted_at for one in save) - max(one.closed_at for one in save)
            for save in saves
        ]
        lines.append(f"--stagger {window_s:g}: {', '.join(_shown(seconds) for seconds in took)} s")
    return "; ".join(lines)


def up_to(outcomes: list[Outcome], good: Callable[[Outcome], bool]) -> int:
    """The largest number of nodes before the first that is not good."""
    return max((one.scenario.nodes for one in itertools.takewhile(good, outcomes)), default=0)


def describe(scenario: Scenario) -> str:
    """In one line."""
    return (
        f"{scenario.bytes_per_node / GB:g} GB in {scenario.files_per_node} files per node every "
        f"{scenario.interval_s:g} s, "
        f"storage {scenario.bandwidth / GB:g} GB/s, node {scenario.client_bandwidth / GB:g} GB/s, "
        f"metadata {scenario.metadata_rate:g} op/s of {scenario.latency_s * 1000:g} ms"
    )


def cells(one: Outcome) -> list[str]:
    """A row."""
    return [
        str(one.scenario.nodes),
        one.design.name,
        f"{one.heartbeat_s:.3g} s",
        f"{one.persisted_s:.1f} s" + ("" if one.keeps_up else ", falls behind"),
        f"{one.pointer_delay_s:.2f} s",
        f"{one.pointer_reads:.0f}",
        f"{one.ram_per_node / GB:.1f} GB",
        f"{one.at_risk_mean / GB:,.0f} GB",
        f"{one.lost_per_day / GB:.2f} GB",
        f"{one.withheld:.1%}",
        f"{one.load.total:,.0f}",
        f"{one.own_share:.0%}",
    ]


def staggered(base: list[Scenario]) -> dict[str, list[tuple[float, float]]]:
    """Seconds to persisted by number of nodes, with storage that slows down under many clients."""
    series: dict[str, list[tuple[float, float]]] = {}
    for window_s in (0.0, STAGGERED_S):
        name = f"--stagger {window_s:g}" if window_s else "all at once"
        for scenario in base:
            crowded = dataclasses.replace(
                scenario,
                interval_s=3600.0,
                clients_at_best=CLIENTS_AT_BEST,
                stagger_s=window_s,
                saves=8,
            )
            series.setdefault(name, []).append(
                (scenario.nodes, simulate(crowded, LANDED).persisted_s)
            )
    return series


def main() -> int:
    arguments = _arguments()
    base = scenarios(arguments)
    outcomes = [simulate(scenario, design) for scenario in base for design in DESIGNS]
    found = report(outcomes)
    paced = staggered(base)
    for (nodes, without_s), (_nodes, with_s) in zip(*paced.values(), strict=True):
        found.notes.append(
            f"storage that is best with {CLIENTS_AT_BEST} clients, {nodes:g} nodes: persisted "
            f"after {without_s:.1f} s, "
            f"with --stagger {STAGGERED_S:g} after {with_s:.1f} s"
        )
    if arguments.keep and not charts(drawn(outcomes, paced), RESULTS / "simulate.svg"):
        found.notes.append("no plot: matplotlib is not installed (extra `bench`)")
    return found.finish(keep=arguments.keep)


def drawn(outcomes: list[Outcome], paced: dict[str, list[tuple[float, float]]]) -> list[Chart]:
    """Curves over the number of nodes."""
    delays = {}
    loads = {}
    for design in DESIGNS:
        mine = [one for one in outcomes if one.design == design]
        delays[design.name] = [
            (float(one.scenario.nodes), max(one.pointer_delay_s, 0.01)) for one in mine
        ]
        loads[design.name] = [(float(one.scenario.nodes), one.load.total) for one in mine]
    first = [one for one in outcomes if one.design == LANDED]
    scenario = first[0].scenario
    return [
        Chart(
            "pointer, seconds after the slowest node",
            delays,
            {"heartbeat + bound": scenario.heartbeat_s + scenario.clock_bound_s},
        ),
        Chart(
            "acpfs' own records, metadata operations per second",
            loads,
            {"the server's limit": scenario.metadata_rate},
        ),
        Chart("seconds to persisted", paced, {"interval": scenario.interval_s}),
        Chart(
            "GB at risk, all nodes, mean",
            {"at risk": [(float(one.scenario.nodes), one.at_risk_mean / GB) for one in first]},
            {},
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
