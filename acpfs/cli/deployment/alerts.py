"""`acpfs deploy alerts`: rules for Prometheus, each with a link to what to do."""

from __future__ import annotations

import click

from acpfs.cli.deployment.templates import filled
from acpfs.cli.training.units import time


@click.command("alerts")
@click.option(
    "--unpersisted",
    "unpersisted_s",
    type=time,
    default="15m",
    show_default=True,
    help="Alert if something stays unpersisted for longer.",
)
@click.option(
    "--wait",
    "wait_s",
    type=time,
    default="1m",
    show_default=True,
    help="Alert if a writer waits for room in RAM for longer.",
)
@click.option(
    "--runbook",
    default="docs/OPERATIONS.md",
    show_default=True,
    metavar="URL",
    help="Where OPERATIONS of this version can be read.",
)
def command(unpersisted_s: float, wait_s: float, runbook: str) -> None:
    """Print alert rules for Prometheus. Each links to its section of OPERATIONS."""
    click.echo(
        filled(
            "alerts.yaml",
            {"unpersisted_s": f"{unpersisted_s:g}", "wait_s": f"{wait_s:g}", "runbook": runbook},
        ),
        nl=False,
    )
