"""`acpfs keeper`: becomes the keeper, and shows what it holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from acpfs.cli import show
from acpfs.control import runtime
from acpfs.errors import MachineError, NotMountedError


@click.command("keeper")
@click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Whose mounts it holds: that of `acpfs mount`.",
)
@click.option(
    "--list", "list_", is_flag=True, help="Print what the keeper that runs holds, as JSON."
)
def command(runtime_dir: Path | None, list_: bool) -> None:
    """Hold the kernel sessions of all mounts of this machine, for the daemon that comes when one is
    killed with all its processes.

    Runs until it is ended, outside whatever the daemons are killed with: another container or
    service. It needs no privilege but to uncover the backing directory at the end of
    `keeper_wait_s`.
    """
    directory = Path(os.path.abspath(runtime_dir or runtime.runtime_dir()))
    if list_:
        from acpfs.supervisor import keeper_client

        held = keeper_client.held(directory / keeper_client.SOCKET)
        if held is None:
            raise NotMountedError(f"no keeper of this user runs for {directory}")
        show.print_json(held)
        return
    try:
        runtime.prepare(directory)
    except OSError as error:
        raise MachineError(
            f"the runtime directory {directory} cannot be made: {error.strerror}"
        ) from error
    os.chdir("/")
    os.execv(  # noqa: S606 - our own interpreter
        sys.executable, [sys.executable, "-m", "acpfs.supervisor.keeper", os.fspath(directory)]
    )
