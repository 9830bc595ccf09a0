"""`acpfs-ctl retry`: try again what failed, at and below a path."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("retry")
@click.argument("path", type=FILE_NAME, required=False)
@click.option("--all", "everything", is_flag=True, help="In the whole mount.")
@JSON_OPTION
@click.pass_obj
def command(target: Target, path: str | None, everything: bool, as_json: bool) -> int:
    """Try again what failed at and below PATH, now; files whose writer was lost are stored as they
    are.

    Exit code 1: there was nothing.
    """
    if (path is None) != everything:
        # Files whose writer was lost are stored as they are: that is nothing to do by a word left
        # out.
        raise click.UsageError("say what to try again: PATH, or --all for the whole mount")
    record, below = target.with_paths([] if path is None else [path])
    done = ask(record, "retry", {"paths": below or [""]}, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        click.echo(f"tried again: {done['operations']}")
    return int(ExitCode.OK if done["operations"] else ExitCode.FAILED)
