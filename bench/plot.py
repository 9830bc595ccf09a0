"""Figures over time, drawn by matplotlib where that is installed (extra `bench`); benchmarks go
without a picture where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Part = TypeVar("Part")
Series = list[tuple[float, float]]
"""Seconds, value."""
POINTS_MAX = 600
"""More would make a file of megabytes and no better picture; of each group of points the highest is
kept, or a peak would not be seen.
"""


@dataclass(frozen=True)
class Panel:
    """One picture of several: MiB over seconds."""

    title: str
    filled: dict[str, Series]
    lines: dict[str, Series]
    """Drawn against an axis of their own on the right."""
    levels: dict[str, float]


def thinned(series: Series) -> Series:
    """Few enough points to draw."""
    step = -(-len(series) // POINTS_MAX) if series else 1
    return [
        max(series[at : at + step], key=lambda point: point[1])
        for at in range(0, len(series), step)
    ]


@dataclass(frozen=True)
class Chart:
    """One picture of curves over the number of nodes, both axes logarithmic."""

    title: str
    lines: dict[str, Series]
    levels: dict[str, float]


def plot(panels: list[Panel], file: Path) -> bool:
    """Draw all panels into one file; whether that could be done."""
    return _draw(panels, _panel, file)


def charts(wanted: list[Chart], file: Path) -> bool:
    """Draw all charts into one file; whether that could be done."""
    return _draw(wanted, _chart, file)


def _draw(parts: list[Part], draw: Callable[[Part, Any], None], file: Path) -> bool:
    try:
        import matplotlib as mpl

        mpl.use("svg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    mpl.rcParams["svg.hashsalt"] = "acpfs"  # the same figures make the same file
    columns = min(2, len(parts))
    rows = -(-len(parts) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(7 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for part, axis in zip(parts, axes.flat, strict=False):
        draw(part, axis)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    return True


def _panel(panel: Panel, axis: Any) -> None:
    axis.set_title(panel.title, fontsize=9)
    for name, series in panel.filled.items():
        points = thinned(series)
        axis.plot([x for x, _ in points], [y for _, y in points], label=name, linewidth=1)
    _levels(panel.levels, axis)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel("MiB in RAM")
    beside = axis.twinx()
    beside.set_ylabel("MiB written", color="gray")
    for series in panel.lines.values():
        points = thinned(series)
        beside.plot([x for x, _ in points], [y for _, y in points], color="gray", linewidth=0.6)
    axis.legend(fontsize=7, loc="lower right")


def _chart(chart: Chart, axis: Any) -> None:
    axis.set_title(chart.title, fontsize=9)
    for name, series in chart.lines.items():
        axis.plot(
            [x for x, _ in series], [y for _, y in series], label=name, linewidth=1, marker="."
        )
    _levels(chart.levels, axis)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("nodes")
    axis.legend(fontsize=7, loc="upper left")


def _levels(levels: dict[str, float], axis: Any) -> None:
    for (name, level), style in zip(levels.items(), ("--", ":"), strict=False):
        axis.axhline(level, label=name, linestyle=style, color="black", linewidth=0.8)
