"""`acpfs-ctl wait`: return when paths are persisted, or copied, or read back and verified."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION, TIMEOUT_OPTION


@click.command("wait")
@click.argument("paths", type=FILE_NAME, nargs=-1, required=True)
@click.option(
    "--persisted",
    "state",
    flag_value="persisted",
    default=True,
    help="Committed and flushed to stable storage (the default).",
)
@click.option(
    "--verified",
    "state",
    flag_value="verified",
    help="Also read back from the backing directory and compared by checksum.",
)
@click.option(
    "--copied",
    "state",
    flag_value="copied",
    help="Another node has them, too (`copies`), or they are persisted: whichever is first.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Wait until at least N files below PATHS are persisted and none is left.",
)
@TIMEOUT_OPTION
@JSON_OPTION
@click.pass_obj
def command(
    target: Target,
    paths: tuple[str, ...],
    state: str,
    count: int | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Return when PATHS, as they are now, are persisted, once they are closed.

    Exit code 0: they are; 1: refused, different, or interrupted (the writer was lost); 4: not in
    time, as when one is being written.
    """
    if count is not None and state != "persisted":
        raise click.UsageError(
            f"--count waits for files to be persisted; wait for --{state} afterwards"
        )
    record, below = target.with_paths(paths)
    arguments = {
        "paths": below,
        "verified": state == "verified",
        "copied": state == "copied",
        "count": count,
        "timeout_s": timeout_s,
    }
    with show.progress("waiting") as take:
        done = ask(record, "wait", arguments, take, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        counted = f"{show.counted(done['files'], 'file')} of " if count else ""
        names = ", ".join(show.printable(path) for path in paths)
        click.echo(f"{done.get('state', state)}: {counted}{names}")
