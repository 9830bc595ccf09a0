"""`acpfs-ctl config`: effective settings."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION


@click.command("config")
@JSON_OPTION
@click.pass_obj
def command(target: Target, as_json: bool) -> None:
    """Effective settings of the mount, in the form of the configuration file."""
    settings = ask(target.record(), "config", as_json=as_json)
    if as_json:
        show.print_json(settings)
        return
    import json

    for name, value in settings.items():
        click.echo(f"# {name} is not set" if value is None else f"{name} = {json.dumps(value)}")
