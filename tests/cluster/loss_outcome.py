"""What became of nodes that were lost: figures of one or several runs, summed by kind, as JSON and
Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HEAD = (
    "kind",
    "times",
    "told to be copied",
    "of them on the storage",
    "not persisted at the loss",
    "adopted unasked",
    "violations",
    "not known before the loss, s",
    "adoption, s",
    "pointers after it, s",
)


@dataclass
class Outcome:
    """Of all losses of one kind."""

    kind: str
    seeds: list[int]
    times: int = 0
    told: int = 0
    """Checkpoints that were told to be copied, and not deleted, at the moments of the losses."""
    found: int = 0
    """Of these on the storage afterwards."""
    undrained: int = 0
    """Of these not on the storage at the moments of the losses: what would be lost without."""
    alone: int = 0
    """Losses after which the holder adopted without being asked."""
    unknown_s: list[float] = field(default_factory=list)
    """Between the loss and the last moment before which all was copied, as far as is known: what
    others closed later is withheld until somebody says what became of the node.
    """
    adoptions_s: list[float] = field(default_factory=list)
    pointers_s: list[float] = field(default_factory=list)
    steps_s: dict[str, list[float]] = field(default_factory=dict)
    """What is done for one loss → how long each took."""
    violations: list[str] = field(default_factory=list)
    took_s: float = 0.0
    """Of the run with the most."""

    def row(self) -> list[str]:
        """For the table."""
        words = [self.kind, self.times, self.told, self.found, self.undrained, self.alone]
        words.append(len(self.violations))
        times = (self.unknown_s, self.adoptions_s, self.pointers_s)
        return [*map(str, words), *map(spread, times)]

    def add(self, other: Outcome) -> None:
        """Of another run."""
        self.seeds += other.seeds
        self.times += other.times
        self.told += other.told
        self.found += other.found
        self.undrained += other.undrained
        self.alone += other.alone
        self.unknown_s += other.unknown_s
        self.adoptions_s += other.adoptions_s
        self.pointers_s += other.pointers_s
        self.violations += other.violations
        self.took_s = max(self.took_s, other.took_s)
        for step, times in other.steps_s.items():
            self.steps_s.setdefault(step, []).extend(times)


def spread(times: Sequence[float]) -> str:
    """Median, nine tenths, longest."""
    if not times:
        return "–"
    found = sorted(times)
    shares = {"median": 0.5, "90 %": 0.9, "longest": 1.0}
    return ", ".join(
        f"{name} {found[min(len(found) - 1, int(share * len(found)))]:.1f}"
        for name, share in shares.items()
    )


def summed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """One of each kind, in the order in which kinds come first; those that are given stay as they
    are.
    """
    found: dict[str, Outcome] = {}
    for one in outcomes:
        found.setdefault(one.kind, Outcome(one.kind, [])).add(one)
    return list(found.values())


@dataclass(frozen=True)
class Terms:
    """Of all runs in one record."""

    nodes: int
    heartbeat_s: float
    node_timeout_s: float
    kernel: str
    commit: str
    """What was run: outcomes of two commits are not added up."""

    def told(self, seeds: Sequence[int]) -> str:
        """In a sentence."""
        return (
            f"Commit {self.commit}, Linux {self.kernel}, heartbeat {self.heartbeat_s:g} s, member "
            f"time-out {self.node_timeout_s:g} s, seeds {', '.join(map(str, sorted(seeds)))}"
        )


def kept(base: Path, terms: Terms) -> tuple[list[str], list[Outcome]]:
    """Commands and outcomes that are kept there.

    Raises:
        ValueError: they are of other terms, another commit for instance.
    """
    try:
        found = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [], []
    if found.get("terms") != asdict(terms):
        raise ValueError(f"{base} has runs of other terms: {found.get('terms')}")
    return found["commands"], [Outcome(**one) for one in found["runs"]]


def save(base: Path, outcomes: Sequence[Outcome], commands: Sequence[str], terms: Terms) -> None:
    """`base`.json and `base`.md, of outcomes that are summed."""
    found = {
        "commands": list(commands),
        "terms": asdict(terms),
        "runs": [asdict(one) for one in outcomes],
    }
    base.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    times = sum(one.times for one in outcomes)
    wrong = [line for one in outcomes for line in one.violations]
    seeds = sorted({seed for one in outcomes for seed in one.seeds})
    lines = [
        f"# Nodes lost while they save, {terms.nodes} nodes with copies = 1",
        "",
        *(f"    {command}" for command in commands),
        "",
        f"**{times} losses, {len(wrong)} violations**.",
        f"{terms.told(seeds)}.",
        "What is done and checked: docs/CONFORMANCE.md, Several nodes.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
        *(f"| {' | '.join(one.row())} |" for one in outcomes),
        "",
        "Where the time of a loss goes, s:",
        "",
        *_steps(outcomes),
        *(["", "The first violations:", ""] if wrong else []),
        *(f"* {line}" for line in wrong[:5]),
    ]
    base.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _steps(outcomes: Sequence[Outcome]) -> list[str]:
    steps = list(dict.fromkeys(step for one in outcomes for step in one.steps_s))
    return [
        f"| step | {' | '.join(one.kind for one in outcomes)} |",
        "|" + "---|" * (1 + len(outcomes)),
        *(
            f"| {step} | {' | '.join(spread(one.steps_s.get(step, [])) for one in outcomes)} |"
            for step in steps
        ),
    ]
