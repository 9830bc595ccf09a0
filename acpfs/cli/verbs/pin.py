"""`acpfs-ctl pin`: keep what lies at and below paths in RAM."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION


@click.command("pin")
@click.argument("paths", type=FILE_NAME, nargs=-1, required=True)
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], as_json: bool) -> None:
    """Keep what lies at and below PATHS in RAM, now and later, also over a restart of the daemon.

    Loads nothing.

    Exit code 5: pins would keep too much of the budget.
    """
    record, below = target.with_paths(paths)
    done = ask(record, "pin", {"paths": below}, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        click.echo(f"pinned; pins keep {show.size(done['pinned_bytes'])} in RAM now")
