"""`acpfs-ctl release`: carry out deletions of checkpoints that are held back."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("release")
@click.argument("paths", type=FILE_NAME, nargs=-1)
@click.option(
    "--all", "everything", is_flag=True, help="Release everything that this mount holds back."
)
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Carry out held deletions at and below PATHS now, though no newer checkpoint is persisted.

    `status` names what is held.

    Exit code 1: there was nothing.
    """
    if bool(paths) == everything:
        raise click.UsageError("name paths, or --all")
    record, below = target.with_paths(paths)
    done = ask(record, "release", {"paths": below}, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        click.echo(f"released: {show.counted(done['checkpoints'], 'checkpoint')}")
    return int(ExitCode.OK if done["checkpoints"] else ExitCode.FAILED)
