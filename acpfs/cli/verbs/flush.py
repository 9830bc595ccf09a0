"""`acpfs-ctl flush`: return when all that was complete at the call is persisted."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
TIMEOUT_OPTION = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Give up after this long (exit code 4). [default: never]",
)


@click.command("flush")
@click.argument("paths", type=FILE_NAME, nargs=-1)
@TIMEOUT_OPTION
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], timeout_s: float | None, as_json: bool) -> None:
    """Return when all that is complete now is persisted.

    Exit code 0: it is; 1: refused for good, or interrupted; 4: not in time.

    With PATHS also 4 if something below them is being written.
    """
    record, below = target.with_paths(paths)
    with show.progress("flushing") as take:
        done = ask(record, "flush", {"paths": below, "timeout_s": timeout_s}, take, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        operations = show.counted(done["operations"], "operation")
        click.echo(f"persisted: {operations}, {show.size(done['bytes'])}")
        for held in done["guarded"]:
            click.echo(
                f"deletion of {show.printable(held['path'])} is held back: "
                f"{show.printable(held['why'])}",
                err=True,
            )
