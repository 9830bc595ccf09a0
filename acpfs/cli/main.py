"""`acpfs`: mount, umount, doctor, salvage, deploy, and what scripts of MindIO need."""

from __future__ import annotations

from typing import NoReturn

import click

from acpfs import __version__
from acpfs.cli.lazy import LazyGroup, run

COMMANDS = {
    "mount": (
        "acpfs.cli.mount",
        "Mount a backing directory; returns when the mount is ready to use.",
    ),
    "umount": ("acpfs.cli.umount", "Drain, then unmount."),
    "with": (
        "acpfs.cli.with_mount",
        "Mount, run a command, and unmount when all is persisted.",
    ),
    "doctor": ("acpfs.cli.doctor", "Look at what this machine offers."),
    "demo": ("acpfs.cli.demo", "See what a mount does, in less than a minute."),
    "mindio-path": (
        "acpfs.cli.mindio_path",
        "Where the packages are that scripts of MindIO import.",
    ),
    "convert": (
        "acpfs.cli.convert",
        "Rewrite a checkpoint in MindIO's format as a plain torch file.",
    ),
    "completion": ("acpfs.cli.completion", "Print what a shell needs to complete these commands."),
    "salvage": ("acpfs.cli.salvage", "Copy files out of a RAM tier that no mount takes any more."),
    "keeper": (
        "acpfs.cli.keeper_command",
        "Hold mounts for the daemon that comes after one was killed with all its processes.",
    ),
    "deploy": ("acpfs.cli.deploy", "Print or write what a cluster needs to run acpfs."),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A mount that is up is looked at and steered with acpfs-ctl.",
)
@click.version_option(__version__, prog_name="acpfs")
def command() -> None:
    """Take checkpoints at memory speed and drain them, in order and with checksums, to a backing
    directory.
    """


def main() -> NoReturn:
    """Entry point."""
    run(command, "acpfs")


if __name__ == "__main__":
    main()
