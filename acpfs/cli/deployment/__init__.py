<<<<<<< HEAD
"""`acpfs deploy`: prints or writes what a cluster needs to run acpfs."""

from __future__ import annotations

import click

from acpfs.cli.lazy import LazyGroup

COMMANDS = {
    "slurm": ("acpfs.cli.deployment.slurm", "Write Slurm's Prolog, Epilog and TaskProlog."),
}


@click.group("deploy", cls=LazyGroup, lazy=COMMANDS)
def command() -> None:
    """Print or write what a cluster needs to run acpfs; changes nothing on this machine."""
=======
"""Commands of `acpfs deploy`; the templates that they fill in are data below `acpfs/deploy`."""
>>>>>>> main
