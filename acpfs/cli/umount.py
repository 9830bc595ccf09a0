"""`acpfs umount`: drain with a progress bar, unmount, wait for the daemon's end; also clears away
what a dead daemon left.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import ask
from acpfs.control import registry
from acpfs.control.registry import MountRecord
from acpfs.control.runtime import places_to_look
from acpfs.descriptors import readable
from acpfs.errors import AcpfsError, NotMountedError

DAEMON_ENDS_WAIT_S = 30.0


def umount(mountpoint: str, timeout_s: float | None, *, leave: bool) -> None:
    """Drain and unmount.

    Raises:
        DeadlineError: not drained in time; the mount stays.
        RefusedError: the mount is in use; it stays.
        NotMountedError: there is no acpfs.
    """
    name = registry.normalised(mountpoint)
    record = next((known for known in registry.records() if known.mountpoint == name), None)
    if record is None or not record.alive:
        _clear_away(name, record)
        return
    with show.progress("draining") as take:
        result = ask(record, "unmount", {"timeout_s": timeout_s, "leave": leave}, take)
    _wait_for_end(record)
    if result.get("problem"):
        click.echo(
            f"{show.printable(result['problem'])}; what was persisted lies where the backing "
            "directory was opened",
            err=True,
        )
    for held in result["guarded"]:
        click.echo(
            f"{show.printable(held['name'])} is deleted, but no newer checkpoint is persisted: "
            "it stays on the backing directory,"
            " and the next mount decides",
            err=True,
        )
    if result["left"]:
        show.left_over(result)
        click.echo(
            f"{name}: unmounted; {result['left_operations']} operations stay in the RAM tier for "
            "the next mount",
            err=True,
        )


def _clear_away(name: str, record: MountRecord | None) -> None:
    """A mount without a daemon."""
    from acpfs.mounting import mountpoint
    from acpfs.supervisor import fallthrough

    for runtime, beneath in fallthrough.bypassed():
        if beneath.mountpoint == name:
            fallthrough.lift(runtime, name)
            if record is not None:
                registry.remove(record)
            click.echo(
                f"{name}: what lay beneath the bypassed mount is gone too; mounting "
                f"{beneath.backing} again drains what was kept",
                err=True,
            )
            return
    if not mountpoint.is_mounted(name):
        raise NotMountedError(f"no acpfs is mounted on {name}")
    mountpoint.take_away(name, detach=True)
    for directory in places_to_look():
        fallthrough.lift(directory, name)
    if record is not None:
        registry.remove(record)
        click.echo(
            f"{name}: the daemon was gone; what it had not persisted is kept in the RAM tier, "
            f"mounting {record.backing} again drains it",
            err=True,
        )


def _wait_for_end(record: MountRecord) -> None:
    """The daemon has answered; when its process is gone, identity and RAM tier are free for the
    next mount.
    """
    try:
        fd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if record.alive and not readable(fd, DAEMON_ENDS_WAIT_S):
            why = (
                "it is stopped (SIGSTOP)"
                if registry.is_stopped(record.pid)
                else "some call on the backing directory hangs"
            )
            raise AcpfsError(
                f"unmounted, but the daemon (process {record.pid}) does not end: {why}"
            )
    finally:
        os.close(fd)


@click.command("umount")
@click.argument("mountpoint", type=FILE_NAME, required=False)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Give up after this long; the mount stays. [default: never]",
)
@click.option(
    "--leave",
    is_flag=True,
    help=(
        "When --timeout is over, unmount even if not everything is persisted; the rest stays in "
        "the RAM tier for the next mount. Without --timeout it waits for all of it."
    ),
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take the mount point from this configuration file.",
)
def command(
    mountpoint: str | None, timeout_s: float | None, leave: bool, config: Path | None
) -> None:
    """Drain, then unmount MOUNTPOINT. On timeout, say what is left and keep the mount."""
    if mountpoint is None and config is not None:
        from acpfs.config import load_settings

        mountpoint = os.fspath(load_settings({}, config).mountpoint)
    if mountpoint is None:
        raise click.UsageError("name a mount point, or a --config FILE that has it")
    umount(mountpoint, timeout_s, leave=leave)
