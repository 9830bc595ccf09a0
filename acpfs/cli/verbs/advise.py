"""`acpfs-ctl advise`: how often to save, from what this mount has measured.

The figures are medians of its history; the advice is that of `acpfs-train interval`, from the one
implementation in `acpfs.training.interval`.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.training.interval import SHARE, fault_s
from acpfs.cli.training.units import long_duration, time
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.training import interval, plots
from acpfs.training.interval import Job
from acpfs.training.planner import KEPT_SAVES

NEWEST = 20
"""So many saves count: what a job did a week ago may have been another job."""
SAVE_S_MIN = 0.001
"""A save that is over sooner is no more exact than this."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of the newest saves; None where nothing is known."""

    saves: int
    save_s: float | None = None
    """From first create to last close."""
    drain_s: float | None = None
    """From the last close until persisted."""
    interval_s: float | None = None
    """From the end of a save to the next one of the same directory."""
    bytes: int | None = None


def measured(entries: Sequence[dict[str, Any]]) -> Measured:
    """From a history."""
    saves = [
        entry
        for entry in entries
        if entry["kind"] == "checkpoint" and entry["began_at"] and entry["save_s"] is not None
    ][-NEWEST:]
    if not saves:
        return Measured(0)
    drains = [
        max(0.0, entry["persist_s"] - entry["save_s"])
        for entry in saves
        if entry["persist_s"] is not None
    ]
    gaps = _gaps(saves)
    return Measured(
        saves=len(saves),
        save_s=max(SAVE_S_MIN, median(entry["save_s"] for entry in saves)),
        drain_s=median(drains) if drains else None,
        interval_s=median(gaps) if gaps else None,
        bytes=int(median(entry["bytes"] or 0 for entry in saves)),
    )


def _gaps(saves: Sequence[dict[str, Any]]) -> list[float]:
    """Training between two saves of one directory."""
    by_directory: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in saves:
        by_directory[os.path.dirname(entry["path"])].append(entry)
    gaps = []
    for entries in by_directory.values():
        ordered = sorted(entries, key=lambda entry: entry["began_at"])
        pairs = pairwise(ordered)
        gaps += [
            later["began_at"] - earlier["began_at"] - earlier["save_s"] for earlier, later in pairs
        ]
    return [gap for gap in gaps if gap > 0]


@dataclass(frozen=True, slots=True)
class Advice:
    """What follows from the figures."""

    interval_s: float | None
    """Of training between two saves; None: saving never pays."""
    waste: float
    today_s: float | None
    today_waste: float | None
    gpu_hours_a_day: float | None
    """What the advised interval is worth against today's; None without a number of devices, or of
    today.
    """
    storage_keeps_up: bool
    """A save is persisted before the next one is."""
    interval_min_s: float
    """From there on it does."""
    ram_wanted_bytes: int | None
    ram_budget_bytes: int


def advise(
    job: Job, today_s: float | None, devices: int | None, size: int | None, budget_bytes: int
) -> Advice:
    """See `Advice`. `size`: of a checkpoint on this member."""
    best = interval.best_s(job)
    waste = 0.0 if math.isinf(best) else interval.waste(job, best)
    today_waste = None if today_s is None else interval.waste(job, today_s)
    worth = None if today_waste is None or devices is None else (today_waste - waste) * devices * 24
    return Advice(
        interval_s=None if math.isinf(best) else best,
        waste=waste,
        today_s=today_s,
        today_waste=today_waste,
        gpu_hours_a_day=worth,
        storage_keeps_up=best + job.save_s >= job.drain_s,
        interval_min_s=max(0.0, job.drain_s - job.save_s),
        ram_wanted_bytes=None if not size else KEPT_SAVES * size,
        ram_budget_bytes=budget_bytes,
    )


@click.command("advise")
@click.option(
    "--save", "save_s", type=time, help="How long a save holds up training. Default: measured."
)
@click.option(
    "--drain",
    "drain_s",
    type=time,
    help="From the end of a save until it is persisted. Default: measured.",
)
@click.option(
    "--today", "today_s", type=time, help="Training between two saves now. Default: measured."
)
@click.option(
    "--restart",
    "restart_s",
    type=time,
    default="5m",
    show_default=True,
    help="From a fault until the first step after it.",
)
@click.option("--mtbf", "fault_s", type=time, help="Mean time between faults of the whole job.")
@click.option("--node-mtbf", type=time, help="Mean time between faults of one node; with --nodes.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes of the job.")
@click.option("--faults", type=click.IntRange(0), help="Faults that were seen in --observed.")
@click.option(
    "--observed", "observed_s", type=time, help="Running time of this job, or of jobs like it."
)
@click.option(
    "--covered",
    type=SHARE,
    default=0.0,
    show_default=True,
    help="Share of faults that cost no step.",
)
@click.option(
    "--node-share",
    type=SHARE,
    default=0.2,
    show_default=True,
    help="Share of the other faults that take a node with its RAM.",
)
@click.option(
    "--gpus",
    "devices",
    type=click.IntRange(1),
    help="Devices of the job, to tell what the advice is worth.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw waste over interval (PNG, SVG, PDF; needs matplotlib).",
)
@JSON_OPTION
def command(
    today_s: float | None,
    devices: int | None,
    plot: Path | None,
    as_json: bool,
    **given: float | None,
) -> None:
    """How often to save: the interval that wastes least, by what this mount has measured.

    Of the time between faults say one of: --mtbf; --node-mtbf with --nodes; --faults with
    --observed.
    """
    fault = fault_s(given)
    target = click.get_current_context().obj
    assert isinstance(target, Target)
    record = target.record()
    figures = measured(ask(record, "history", as_json=as_json)["items"])
    if given["save_s"] is not None:
        figures = replace(figures, save_s=given["save_s"])
    if given["drain_s"] is not None:
        figures = replace(figures, drain_s=given["drain_s"])
    if figures.save_s is None:
        raise click.UsageError(
            "the mount has no save in its history yet, where it is some seconds after it was "
            "persisted: how long does one hold up training? --save 2s"
        )
    try:
        job = Job(
            save_s=figures.save_s,
            restart_s=given["restart_s"] or 0.0,
            fault_s=fault,
            covered=given["covered"] or 0.0,
            node_share=given["node_share"] or 0.0,
            drain_s=figures.drain_s or 0.0,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    budget = ask(record, "status", as_json=as_json)["ram"]["budget_bytes"]
    advice = advise(
        job, figures.interval_s if today_s is None else today_s, devices, figures.bytes, budget
    )
    if as_json:
        show.print_json({"measured": asdict(figures), "job": asdict(job), "advice": asdict(advice)})
    else:
        _print(figures, job, advice)
    if plot is not None:
        marks = [
            ("best", interval.best_s(job)),
            ("Young", interval.young_s(job)),
            ("Daly", interval.daly_s(job)),
        ]
        plots.draw_waste(
            plot, job, [*marks, *([("today", advice.today_s)] if advice.today_s else [])]
        )


def _print(figures: Measured, job: Job, advice: Advice) -> None:
    click.echo(
        f"from {figures.saves} saves: one holds up training for {long_duration(job.save_s)} and "
        "is persisted "
        f"{long_duration(job.drain_s)} later; a fault comes every {long_duration(job.fault_s)}, "
        f"a restart takes {long_duration(job.restart_s)}"
    )
    if advice.interval_s is None:
        click.echo("no fault costs steps: there is no need to save for their sake")
        return
    click.echo(
        f"save every {long_duration(advice.interval_s)} of training: {advice.waste:.2%} of the "
        "time is not training"
    )
    if advice.today_s is not None and advice.today_waste is not None:
        worth = (
            ""
            if advice.gpu_hours_a_day is None
            else f"; the advice is worth {advice.gpu_hours_a_day:.3g} device-hours a day"
        )
        click.echo(
            f"today it is every {long_duration(advice.today_s)}: {advice.today_waste:.2%}{worth}"
        )
    if not advice.storage_keeps_up:
        click.echo(
            f"the storage does not keep up with that: a save takes {long_duration(job.drain_s)} "
            "to be persisted; "
            f"save no more often than every {long_duration(advice.interval_min_s)}, or give it "
            "more `streams` or bandwidth"
        )
    if advice.ram_wanted_bytes is not None:
        enough = (
            "enough"
            if advice.ram_wanted_bytes <= advice.ram_budget_bytes
            else "too little: writers will wait"
        )
        wanted = show.size(advice.ram_wanted_bytes)
        budget = show.size(advice.ram_budget_bytes)
        click.echo(
            f"two checkpoints of this member take {wanted} of RAM; the budget is {budget}: {enough}"
        )
    click.echo(plots.text_waste(job, advice.interval_s))
