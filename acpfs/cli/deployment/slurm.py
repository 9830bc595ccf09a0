"""`acpfs deploy slurm`: Prolog, Epilog and TaskProlog, with the settings that they share."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import click

from acpfs.errors import RefusedError

SCRIPTS = {"Prolog": "prolog.sh", "Epilog": "epilog.sh", "TaskProlog": "task-prolog.sh"}
"""Slurm's parameter → our script."""
SETTINGS = "acpfs.conf"
PLAIN_PATH = re.compile(r"/[\w.@:+/-]+")
"""Goes through a shell, Slurm's configuration and /proc/mounts as it is."""


def plain_path(_context: click.Context, parameter: click.Parameter, value: str) -> str:
    """An absolute path without spaces, quotes and the like."""
    if not PLAIN_PATH.fullmatch(value):
        raise click.BadParameter(
            "needs an absolute path of letters, digits and . _ - @ : + /", param=parameter
        )
    return value


@click.command("slurm")
@click.argument("backing", callback=plain_path)
@click.argument("mountpoint", callback=plain_path)
@click.option(
    "--to",
    "directory",
    required=True,
    metavar="DIR",
    callback=plain_path,
    help="Where to write the files; must be the same on every node, for instance /etc/slurm/acpfs.",
)
@click.option(
    "--options",
    "mount_options",
    default="--ram 25%",
    show_default=True,
    help="Options of `acpfs mount`.",
)
@click.option(
    "--mount-wait",
    default=60,
    show_default=True,
    type=click.IntRange(1),
    metavar="S",
    help="Seconds after which a mount counts as failed.",
)
@click.option(
    "--epilog-wait",
    default=30,
    show_default=True,
    type=click.IntRange(0),
    metavar="S",
    help="Seconds for which the epilog waits until everything is persisted; 0: it does not wait.",
)
@click.option(
    "--required",
    is_flag=True,
    help=(
        "Fail the prolog without acpfs, so that Slurm requeues the job; else jobs save directly "
        "to BACKING."
    ),
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def command(
    backing: str,
    mountpoint: str,
    directory: str,
    mount_options: str,
    mount_wait: int,
    epilog_wait: int,
    required: bool,
    force: bool,
) -> None:
    """Write Slurm's Prolog, Epilog and TaskProlog for BACKING at MOUNTPOINT, and print what
    slurm.conf needs.

    Changes nothing outside of DIR.
    """
    target = Path(directory)
    there = [name for name in (*SCRIPTS.values(), SETTINGS) if (target / name).exists()]
    if there and not force:
        raise RefusedError(f"{target / there[0]} exists already; --force overwrites it")
    target.mkdir(parents=True, exist_ok=True)
    settings = {
        "ACPFS_BACKING": backing,
        "ACPFS_MOUNTPOINT": mountpoint,
        "ACPFS_OPTIONS": mount_options,
        "ACPFS_PATH": str(Path(sys.argv[0]).resolve().parent),
        "ACPFS_MOUNT_WAIT_S": str(mount_wait),
        "ACPFS_EPILOG_WAIT_S": str(epilog_wait),
        "ACPFS_REQUIRED": "yes" if required else "no",
        "ACPFS_LOCK": "/run/acpfs-prolog.lock",
    }
    words = {
        "ACPFS_PATH": "# where acpfs is installed on the nodes\n",
        "ACPFS_OPTIONS": "# options of `acpfs mount`\n",
    }
    lines = (
        f"{words.get(name, '')}{name}={shlex.quote(value)}\n" for name, value in settings.items()
    )
    (target / SETTINGS).write_text(
        f"# Settings of the scripts beside this file; shell syntax.\n{''.join(lines)}",
        encoding="utf-8",
    )
    for name in SCRIPTS.values():
        with (
            (files("acpfs") / "deploy" / "slurm" / name).open("rb") as source,
            (target / name).open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy)
        (target / name).chmod(0o755)
    click.echo("# add to slurm.conf on all nodes, then: scontrol reconfigure")
    for parameter, name in SCRIPTS.items():
        click.echo(f"{parameter}={target / name}")
    click.echo("PrologFlags=Alloc")
