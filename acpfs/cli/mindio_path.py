"""`acpfs mindio-path`: the directory that PYTHONPATH has to name for scripts of MindIO."""

from __future__ import annotations

import click

from acpfs.compatible import places


@click.command("mindio-path")
def command() -> None:
    """Print the directory with the packages mindio_acp and mindio_ttp: PYTHONPATH=$(acpfs
    mindio-path).
    """
    click.echo(str(places.SITE))
