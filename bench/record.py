"""What a benchmark found: a table, bars that were met or missed, and where it was measured; printed
and saved.

Owns bench/results/NAME.json and NAME.md. Knows nothing of what is measured. Figures are ratios of
things measured side by side in one run wherever that is possible; absolute ones are only worth
something beside their neighbours.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
MB = 1_000_000
GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True)
class Bar:
    """Something the project promised about a figure."""

    promise: str
    found: str
    met: bool


@dataclass
class Report:
    """One run of one benchmark."""

    name: str
    title: str
    columns: list[str]
    notes: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Every single measurement, in the unit that its name ends with."""
    program: str = ""
    """What made it, where that has another name."""

    def row(self, *cells: object) -> None:
        self.rows.append([str(cell) for cell in cells])

    def bar(self, promise: str, found: str, *, met: bool) -> None:
        self.bars.append(Bar(promise, found, met))

    def finish(self, *, keep: bool = True) -> int:
        """Print, save (a quick look is not to be kept); the exit code says whether all bars were
        met.
        """
        where = machine()
        command = f"python -m bench.{self.program or self.name} {' '.join(sys.argv[1:])}".strip()
        self._print(Console(width=140 if not sys.stdout.isatty() else None))
        if not keep:
            return 0 if all(bar.met for bar in self.bars) else 1
        RESULTS.mkdir(exist_ok=True)
        known = {"command": command, "machine": where, **asdict(self)}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(known, indent=1) + "\n")
        (RESULTS / f"{self.name}.md").write_text(self._markdown(command, where))
        return 0 if all(bar.met for bar in self.bars) else 1

    def _print(self, console: Console) -> None:
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False)
        for bar in self.bars:
            console.print(
                f"  [{'green]met   ' if bar.met else 'red]MISSED'}[/] {bar.promise}: {bar.found}",
                highlight=False,
            )

    def _markdown(self, command: str, where: dict[str, object]) -> str:
        lines = [
            f"# {self.title}",
            "",
            f"    {command}",
            "",
            ", ".join(f"{k} {v}" for k, v in where.items()),
            "",
        ]
        lines += ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        lines += ["", *(f"* {note}" for note in self.notes)]
        lines += [
            f"* **{'met' if bar.met else 'missed'}**: {bar.promise}: {bar.found}"
            for bar in self.bars
        ]
        return "\n".join(lines) + "\n"


def machine() -> dict[str, object]:
    """Where and when."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.stdout.strip() or "unknown",
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
    }


def median(samples: list[float]) -> float:
    """The middle one: a single disturbed round on a shared machine must not decide."""
    return statistics.median(samples)


def lower_quartile(samples: list[float]) -> float:
    """A quarter of the samples are not above it: for times that others can only lengthen."""
    return (
        statistics.quantiles(samples, n=4, method="inclusive")[0]
        if len(samples) > 1
        else samples[0]
    )


def spread(samples: list[float], unit: str) -> str:
    """Median and range for a cell."""
    return f"{median(samples):.3g} {unit} ({min(samples):.3g}–{max(samples):.3g})"
