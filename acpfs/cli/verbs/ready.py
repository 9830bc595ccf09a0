"""`acpfs-ctl ready`: an exit code for probes."""

from __future__ import annotations

import os

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("ready")
@click.option(
    "--here", is_flag=True, help="Also require that the supervisor runs in this container."
)
@JSON_OPTION
@click.pass_obj
def command(target: Target, here: bool, as_json: bool) -> int:
    """Exit code 0: a worker answers, and the mount serves.

    1: it is bypassed, or drains to end; 3: nobody answers.
    """
    record = target.record()
    said = ask(record, "ready", as_json=as_json)
    if here and not _is_here(record.pid):
        said |= {"ready": False, "state": "served from another container"}
    if as_json:
        show.print_json(said)
    else:
        click.echo("ready" if said["ready"] else f"not ready: {said['state']}")
    return int(ExitCode.OK if said["ready"] else ExitCode.FAILED)


def _is_here(pid: int) -> bool:
    """Whether a process has the mount name space of this one, which containers never share."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return False
