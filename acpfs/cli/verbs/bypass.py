"""`acpfs-ctl bypass`: new opens reach the backing directory itself, under the same path."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION


@click.command("bypass")
@click.option(
    "--reason", default="by an operator", metavar="TEXT", help="Shown in status and in the log."
)
@JSON_OPTION
@click.pass_obj
def command(target: Target, reason: str, as_json: bool) -> None:
    """Take the mount away from over the backing directory: new opens are native, under the same
    path.

    Files that are open go on through acpfs until they are closed. What is not persisted is drained
    on, beside what was changed natively meanwhile and never over it; what is left when the daemon
    ends stays in the RAM tier. `acpfs mount` ends the bypass.
    """
    status = ask(target.record(), "bypass", {"reason": reason}, as_json=as_json)
    if as_json:
        show.print_json(status)
        return
    kept = (
        f"not persisted yet: {show.counted(status['queue_length'], 'operation')} "
        f"({show.size(status['queue_bytes'])})"
    )
    click.echo(
        f"{show.printable(status['mount'])}: bypassed; {kept}; still open through acpfs: "
        f"{show.counted(status['open_files'], 'file')}"
    )
