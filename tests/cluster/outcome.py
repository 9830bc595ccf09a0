"""What became of kills on several nodes: figures of one run for each workload, kept as JSON and
Markdown.
"""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.cluster.observer import Observer

QUANTILES = {"median": 0.5, "90 %": 0.9, "longest": 1.0}


@dataclass
class Outcome:
    """Of one workload."""

    workload: str
    seed: int
    nodes: int
    storage: str
    order: str
    heartbeat_s: float
    clock_bound_s: float
    kills: dict[str, int] = field(default_factory=dict)
    """Of what → how many."""
    saves: int = 0
    failed_saves: int = 0
    looks: int = 0
    violations: list[str] = field(default_factory=list)
    """The first ones."""
    violations_total: int = 0
    end: str = ""
    """What is wrong with the last checkpoint after all was drained; "" when nothing is."""
    delays_s: list[float] = field(default_factory=list)
    """From the last shard of a checkpoint to its pointer, as seen on the backing directory, while
    nobody was killed.
    """
    delays_with_kills_s: list[float] = field(default_factory=list)
    took_s: float = 0.0

    @classmethod
    def of(
        cls, workload: str, seed: int, nodes: int, storage: str, settings: dict[str, object]
    ) -> Outcome:
        """Before a run."""
        order = str(settings.get("cluster_order", "pointers"))
        return cls(
            workload,
            seed,
            nodes,
            storage,
            order,
            float(str(settings["heartbeat"])),
            float(str(settings["clock_bound"])),
        )

    def take(self, observer: Observer, first_calm: int, took_s: float) -> None:
        """What was seen; from checkpoint `first_calm` on nobody was killed."""
        self.looks = observer.looks
        self.violations = observer.violations
        self.violations_total = observer.count
        self.end = observer.end
        calm = {name for name in observer.arrivals if int(name[5:]) >= first_calm}
        self.delays_s = sorted(
            pointer - shards
            for name, (shards, pointer) in observer.arrivals.items()
            if name in calm
        )
        self.delays_with_kills_s = sorted(
            pointer - shards
            for name, (shards, pointer) in observer.arrivals.items()
            if name not in calm
        )
        self.took_s = round(took_s, 1)

    @property
    def killed(self) -> int:
        """How often something was."""
        return sum(self.kills.values())

    @property
    def bound_s(self) -> float:
        """Within which a pointer is to follow the slowest node."""
        return self.heartbeat_s + self.clock_bound_s

    def row(self) -> list[str]:
        """For the table."""
        kills = ", ".join(f"{name} {count}" for name, count in sorted(self.kills.items()))
        delays = f"{spread(self.delays_s)} (bound {self.bound_s:.1f})" if self.delays_s else "–"
        words = [
            self.workload,
            f"{self.killed}: {kills}",
            str(self.saves),
            str(self.failed_saves),
            str(self.looks),
        ]
        return [
            *words,
            str(self.violations_total),
            self.end or "whole",
            delays,
            spread(self.delays_with_kills_s),
            f"{self.took_s:.0f}",
        ]


HEAD = [
    "workload",
    "kills",
    "saves",
    "given up",
    "looks",
    "violations",
    "at the end",
    "delay, s",
    "delay with kills, s",
    "took, s",
]


def spread(delays: Sequence[float]) -> str:
    """Median, nine tenths, longest."""
    if not delays:
        return "–"
    return ", ".join(
        f"{name} {delays[min(len(delays) - 1, int(share * len(delays)))]:.2f}"
        for name, share in QUANTILES.items()
    )


def save(
    base: Path, outcomes: Sequence[Outcome], words: Sequence[str], *, add: bool = False
) -> None:
    """`base`.json and `base`.md; `words`: of the command line.

    `add`: beside the other workloads that are kept there.
    """
    commands = [shlex.join(["tools/cluster-drill", *words])]
    kernel = platform.release().split("-")[0]
    kept = base.with_suffix(".json")
    if add and kept.exists():
        known = json.loads(kept.read_text(encoding="utf-8"))
        new = {outcome.workload for outcome in outcomes}
        outcomes = [
            *(Outcome(**run) for run in known["runs"] if run["workload"] not in new),
            *outcomes,
        ]
        commands = [
            *(command for command in known["commands"] if command not in commands),
            *commands,
        ]
    found = {
        "commands": commands,
        "kernel": kernel,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    base.with_suffix(".md").write_text(markdown(commands, kernel, outcomes), encoding="utf-8")


def markdown(commands: Sequence[str], kernel: str, outcomes: Sequence[Outcome]) -> str:
    """One row per workload."""
    first = outcomes[0]
    kills = sum(outcome.killed for outcome in outcomes)
    wrong = sum(outcome.violations_total for outcome in outcomes)
    terms = (
        f"Seed {first.seed}, Linux {kernel}, heartbeat {first.heartbeat_s:g} s, clock bound "
        f"{first.clock_bound_s:g} s"
    )
    lines = [
        f"# Kills on {first.nodes} nodes over {first.storage}, order {first.order}",
        "",
        *(f"    {command}" for command in commands),
        "",
        f"{terms}: **{kills} kills, {wrong} violations**.",
        "What is done and checked: docs/CONFORMANCE.md, Several nodes.",
        "A delay is from a checkpoint's last shard to its pointer, as the observer sees both.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
        *(f"| {' | '.join(outcome.row())} |" for outcome in outcomes),
        *(["", "The first violations:", ""] if wrong else []),
        *(f"* {line}" for outcome in outcomes for line in outcome.violations[:3]),
    ]
    return "\n".join(lines) + "\n"
