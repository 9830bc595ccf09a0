"""`acpfs-ctl urgent`: files that must not wait when RAM is full."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.training import units
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("urgent")
@click.argument("path", type=FILE_NAME)
@click.option(
    "--for",
    "for_s",
    type=units.time,
    default="1h",
    show_default=True,
    help="How long; at most one hour.",
)
@click.option("--off", is_flag=True, help="End it now.")
@JSON_OPTION
@click.pass_obj
def command(target: Target, path: str, for_s: float, off: bool, as_json: bool) -> int:
    """Let the file PATH, or those below the directory PATH, take the last part of RAM, which the
    setting `reserve` keeps for them.

    For what must not wait for the storage when RAM is full: the last checkpoint of a job that loses
    a rank, before its processes are killed. Such a file waits for nobody else's, as long as it fits
    into the reserve; without a reserve it only goes first. Files that are open already take part,
    and so does what is moved there. For its owner and root.

    Exit code 1: there is nothing, it is not yours, or (with --off) it was not urgent; 5: it is no
    directory and no file, for longer than an hour, or too many paths are urgent.
    """
    record, below = target.with_paths([path])
    done = ask(
        record,
        "urgent",
        {"paths": below, **({"off": True} if off else {"for_s": for_s})},
        as_json=as_json,
    )
    if as_json:
        show.print_json(done)
    elif done["changed"]:
        click.echo("not urgent any more" if off else f"urgent for {show.duration(for_s)}")
    else:
        click.echo("it was not urgent")
    return int(ExitCode.OK if done["changed"] else ExitCode.FAILED)
