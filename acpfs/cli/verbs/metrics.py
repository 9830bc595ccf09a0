"""`acpfs-ctl metrics`: Prometheus metrics as text."""

from __future__ import annotations

import click

from acpfs.cli.target import Target, ask


@click.command("metrics")
@click.pass_obj
def command(target: Target) -> None:
    """Prometheus metrics as text; for a scraper there are metrics_port and metrics_file."""
    click.echo(ask(target.record(), "metrics")["text"], nl=False)
