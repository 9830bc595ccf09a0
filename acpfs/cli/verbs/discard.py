"""`acpfs-ctl discard`: give up what the backing directory refused for good."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("discard")
@click.argument("path", type=FILE_NAME)
@JSON_OPTION
@click.pass_obj
def command(target: Target, path: str, as_json: bool) -> int:
    """Give up what the backing directory refused for good at and below PATH, and files whose writer
    was lost: with their data.

    Exit code 1: there was nothing, or there are files that somebody has open: they stay, and are
    named.
    """
    record, below = target.with_paths([path])
    done = ask(record, "discard", {"paths": below}, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        click.echo(f"discarded: {done['operations']}")
        for name in done["open"]:
            click.echo(f"open, and left as it is: {name}", err=True)
    return int(ExitCode.OK if done["operations"] and not done["open"] else ExitCode.FAILED)
