"""`acpfs-train`: how often to save, and which losses copies of the training state cover.

Needs neither torch nor a mount.
"""

from __future__ import annotations

from typing import NoReturn

import click

from acpfs import __version__
from acpfs.cli.lazy import LazyGroup, run

COMMANDS = {
    "interval": (
        "acpfs.cli.training.interval",
        "How often to save: the interval that wastes least.",
    ),
    "status": (
        "acpfs.cli.training.status",
        "Where the ranks of a running job are, who is lost, who hangs.",
    ),
    "drill": (
        "acpfs.cli.training.drill",
        "Kill ranks of a job at points by name, and judge what the others left.",
    ),
    "plan": (
        "acpfs.cli.training.plan",
        "What copies of the state cost, and which losses they cover.",
    ),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="acpfs-train")
def command() -> None:
    """Plan how a training job saves and what it survives."""


def main() -> NoReturn:
    """Entry point."""
    run(command, "acpfs-train")


if __name__ == "__main__":
    main()
