"""`acpfs-ctl unpin`: take pins off."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("unpin")
@click.argument("paths", type=FILE_NAME, nargs=-1, required=True)
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], as_json: bool) -> int:
    """Take off the pins at and below PATHS. Exit code 1: there were none."""
    record, below = target.with_paths(paths)
    done = ask(record, "unpin", {"paths": below}, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        click.echo(f"pins taken off: {done['pins']}")
    return int(ExitCode.OK if done["pins"] else ExitCode.FAILED)
