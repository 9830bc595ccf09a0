"""`acpfs-ctl evict`: let what is clean leave RAM."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION


@click.command("evict")
@click.argument("paths", type=FILE_NAME, nargs=-1, required=True)
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], as_json: bool) -> None:
    """Let the clean content of files at and below PATHS leave RAM, also of retained checkpoints.

    Nothing is lost by it.

    What is not persisted, open, mapped or pinned stays, and is told.
    """
    record, below = target.with_paths(paths)
    done = ask(record, "evict", {"paths": below}, as_json=as_json)
    if as_json:
        show.print_json(done)
        return
    click.echo(f"{show.size(done['bytes'])} came free, {show.counted(done['files'], 'file')}")
    if done["items"]:
        rows = (
            (show.size(f["size"]), f["reason"], show.printable(f["path"])) for f in done["items"]
        )
        show.table(("stayed", "because", "path"), rows, numbers=("stayed",))
