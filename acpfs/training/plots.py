"""Waste over interval: as text everywhere, as a picture where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from acpfs.errors import RefusedError
from acpfs.training.interval import Job, waste

POINTS = 200
SPAN = 30.0
"""The plot goes from the best interval divided by this to the best one times it."""
LINES = 9
WIDTH = 48


def text_waste(job: Job, best_s: float) -> str:
    """Bars of the waste at intervals around the best one, each twice the one before."""
    rows = []
    intervals = [best_s * 2.0**power for power in range(-(LINES // 2), LINES // 2 + 1)]
    most = max(waste(job, seconds) for seconds in intervals)
    for seconds in intervals:
        share = waste(job, seconds)
        bar = "█" * max(1, round(WIDTH * share / most))
        rows.append(
            f"{_short(seconds):>9}  {bar} {100 * share:.2f} "
            f"%{'  ← best' if seconds == best_s else ''}"
        )
    return "\n".join(rows)


def draw_waste(path: Path, job: Job, marks: Sequence[tuple[str, float]]) -> None:
    """A picture; the format comes from the name's suffix.

    Raises:
        RefusedError: matplotlib is missing, the format is not known to it, or the file cannot be
            written.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise RefusedError("--plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    best_s = marks[0][1]
    if math.isinf(best_s):
        raise RefusedError("there is nothing to draw: no fault costs steps")
    figure, axes = plt.subplots(figsize=(8, 4.5))
    intervals = [best_s / SPAN * SPAN ** (2 * i / POINTS) for i in range(POINTS + 1)]
    axes.plot(intervals, [100 * waste(job, seconds) for seconds in intervals], color="black")
    for number, (name, seconds) in enumerate(marks):
        if intervals[0] <= seconds <= intervals[-1]:
            axes.plot(
                [seconds],
                [100 * waste(job, seconds)],
                "o",
                color=f"C{number}",
                label=f"{name}: {_short(seconds)}",
            )
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training between two saves")
    axes.set_ylabel("waste, percent of the time")
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be drawn: {error}") from None
    finally:
        plt.close(figure)


def _short(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds < 600
        else f"{seconds / 60:.3g} min"
        if seconds < 36000
        else f"{seconds / 3600:.3g} h"
    )
