"""`acpfs-ctl doctor`: is the mount's own state as it must be?"""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("doctor")
@JSON_OPTION
@click.pass_obj
def command(target: Target, as_json: bool) -> int:
    """Look whether what the mount knows of files, names and their bytes in RAM agrees.

    `acpfs doctor` looks at the machine.

    The mount goes on meanwhile. Exit code 0: it does; 1: it does not, which is a fault of acpfs, or
    somebody changed its RAM tier.
    """
    faults = ask(target.record(), "doctor", {}, as_json=as_json)["items"]
    if as_json:
        show.print_json(faults)
    elif faults:
        show.table(
            ("path", "fault"),
            ((show.printable(fault["path"]) or "/", fault["fault"]) for fault in faults),
        )
        click.echo(
            "each of these is a fault of acpfs, unless somebody changed its RAM tier: please "
            "report it, with the log"
        )
    else:
        click.echo("all is as it must be")
    return int(ExitCode.FAILED if faults else ExitCode.OK)
