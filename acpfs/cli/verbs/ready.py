"""`acpfs-ctl ready`: an exit code for probes."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("ready")
@JSON_OPTION
@click.pass_obj
def command(target: Target, as_json: bool) -> int:
    """Exit code 0: a worker answers, and the mount serves. 1: it is bypassed, or drains to end; 3: nobody answers."""
    said = ask(target.record(), "ready", as_json=as_json)
    if as_json:
        show.print_json(said)
    else:
        click.echo("ready" if said["ready"] else f"not ready: {said['state']}")
    return int(ExitCode.OK if said["ready"] else ExitCode.FAILED)
