"""`acpfs-train interval`: how often to save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.training.units import long_duration, time
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.training import interval, plots
from acpfs.training.interval import Job

SHARE = click.FloatRange(0, 1)


@click.command("interval")
@click.option(
    "--save",
    "save_s",
    type=time,
    help="How long a save holds up training. Default: from the mount's checkpoints.",
)
@click.option(
    "--drain",
    "drain_s",
    type=time,
    help="From the end of a save until it is persisted. Default: from the mount, else 0.",
)
@click.option(
    "--mount", "mountpoint", help="The mount to ask; may be left out when there is only one."
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
    help="Share of faults that cost no step: the last one is saved by survivors.",
)
@click.option(
    "--node-share",
    type=SHARE,
    default=0.2,
    show_default=True,
    help="Share of the other faults that take a node with its RAM.",
)
@click.option(
    "--step", "step_s", type=time, help="One training step, to count lost steps instead of time."
)
@click.option(
    "--today", "today_s", type=time, help="The interval that is used today, for comparison."
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw waste over interval (PNG, SVG, PDF; needs matplotlib).",
)
@JSON_OPTION
def command(
    plot: Path | None,
    step_s: float | None,
    today_s: float | None,
    as_json: bool,
    mountpoint: str | None,
    **given: float | None,
) -> None:
    """How often to save: the interval at which saving and repeating lost steps together waste
    least.

    Of the time between faults say one of: --mtbf; --node-mtbf with --nodes; --faults with
    --observed (also beside one of the others, which then is what was expected before anything was
    seen).
    """
    job = _job(mountpoint, given)
    rows = list(_rows(job, today_s))
    if as_json:
        show.print_json(
            {
                "job": _as_json(job),
                "intervals": [_json_row(job, name, seconds) for name, seconds in rows],
            }
        )
    else:
        _print(job, rows, step_s)
    if plot is not None:
        plots.draw_waste(plot, job, rows)


def _job(mountpoint: str | None, given: dict[str, float | None]) -> Job:
    save_s = given["save_s"]
    drain_s = given["drain_s"]
    if save_s is None:
        save_s, measured_s = _measured(mountpoint)
        drain_s = measured_s if drain_s is None else drain_s
    try:
        return Job(
            save_s=save_s,
            restart_s=given["restart_s"] or 0.0,
            fault_s=fault_s(given),
            covered=given["covered"] or 0.0,
            node_share=given["node_share"] or 0.0,
            drain_s=drain_s or 0.0,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def fault_s(given: dict[str, float | None]) -> float:
    prior_s = given["fault_s"]
    if given["node_mtbf"] is not None:
        if given["nodes"] is None or prior_s is not None:
            raise click.UsageError("--node-mtbf takes --nodes, and stands in place of --mtbf")
        prior_s = given["node_mtbf"] / given["nodes"]
    if given["observed_s"] is not None:
        return interval.mean_fault_s(given["observed_s"], int(given["faults"] or 0), prior_s or 0.0)
    if given["faults"] is not None:
        raise click.UsageError("--faults takes --observed")
    if prior_s is None:
        raise click.UsageError(
            "how often do faults come? --mtbf, --node-mtbf with --nodes, or --faults with "
            "--observed"
        )
    return prior_s


def _measured(mountpoint: str | None) -> tuple[float, float | None]:
    """Medians of what the mount has seen: seconds of a save, and until it was persisted."""
    record = Target(mountpoint).record()
    found = ask(record, "checkpoints", {"paths": []}, as_json=False)["items"]
    saves = [item["save_s"] for item in found if item["save_s"]]
    drains = [item["persist_s"] for item in found if item["persist_s"] is not None]
    if not saves:
        raise click.UsageError(
            "the mount has seen no save yet: how long does one hold up training? --save 2s"
        )
    return median(saves), median(drains) if drains else None


def _rows(job: Job, today_s: float | None) -> Iterator[tuple[str, float]]:
    yield "best", interval.best_s(job)
    yield "Young", interval.young_s(job)
    yield "Daly", interval.daly_s(job)
    if today_s is not None:
        yield "today", today_s
    yield "MindIO", interval.product_s(job.save_s)


def _print(job: Job, rows: list[tuple[str, float]], step_s: float | None) -> None:
    click.echo(
        f"a save holds up training for {long_duration(job.save_s)} and is persisted "
        f"{long_duration(job.drain_s)} later; "
        f"a fault comes every {long_duration(job.fault_s)}, {job.covered:.0%} of them cost no "
        "step; "
        f"a restart takes {long_duration(job.restart_s)}"
    )
    lost = "lost steps a day" if step_s else "lost a day"
    headings = ["", "save every", "waste", lost, "right for a fault every"]
    if job.covered:
        headings.insert(4, "if none were covered")
    cells = []
    for name, seconds in rows:
        row = [name, long_duration(seconds), *_waste_cells(job, seconds, step_s)]
        if job.covered:
            row.append(_lost(interval.without_cover(job), seconds, step_s))
        row.append(
            ""
            if math.isinf(seconds)
            else long_duration(interval.implied_fault_s(job.save_s, seconds))
        )
        cells.append(row)
    show.table(headings, cells, numbers=headings[1:])
    if math.isfinite(rows[0][1]):
        click.echo(plots.text_waste(job, rows[0][1]))


def _waste_cells(job: Job, seconds: float, step_s: float | None) -> tuple[str, str]:
    if math.isinf(seconds):
        return "0.00 %", _lost(job, 0.0, step_s)
    return f"{100 * interval.waste(job, seconds):.2f} %", _lost(job, seconds, step_s)


def _lost(job: Job, seconds: float, step_s: float | None) -> str:
    lost_s = interval.lost_s_a_day(job, seconds) if math.isfinite(seconds) else math.nan
    if math.isnan(lost_s):
        return "?"
    return f"{lost_s / step_s:.1f}" if step_s else long_duration(lost_s)


def _as_json(job: Job) -> dict[str, float]:
    return {
        name: getattr(job, name)
        for name in ("save_s", "restart_s", "fault_s", "covered", "node_share", "drain_s")
    }


def _json_row(job: Job, name: str, seconds: float) -> dict[str, Any]:
    """JSON has no infinity: null where saving would never pay."""
    if math.isinf(seconds):
        return {
            "name": name,
            "interval_s": None,
            "waste": None,
            "lost_s_a_day": None,
            "implied_fault_s": None,
        }
    return {
        "name": name,
        "interval_s": seconds,
        "waste": interval.waste(job, seconds),
        "lost_s_a_day": interval.lost_s_a_day(job, seconds),
        "implied_fault_s": interval.implied_fault_s(job.save_s, seconds),
    }
