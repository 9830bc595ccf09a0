"""`acpfs with`: a mount for as long as a command runs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from acpfs.cli import mount
from acpfs.cli.around import run_between
from acpfs.config import load_settings
from acpfs.control import registry
from acpfs.errors import MachineError
from acpfs.mounting.mountpoint import is_mounted

PLACE = "ACPFS_DIR"
"""In the command's environment: the mount point, as Slurm's tasks have it."""
MOUNTS_ITSELF = frozenset({"foreground", "take_over", "instance"})
"""Of what `acpfs mount` takes: they are about another's life than the command's."""
_WORDS = "acpfs.with.words"
_MOUNT = "acpfs.with.mount"


class WithCommand(mount.DescribedCommand):
    """Its options end at `--`, whatever the command behind that takes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_MOUNT] = args[:at]
        ctx.meta[_WORDS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


def _program() -> list[str]:
    return [sys.executable, "-m", "acpfs.cli.main"]


@click.command(
    "with",
    cls=WithCommand,
    params=[one for one in mount.command.params if one.name not in MOUNTS_ITSELF],
)
@click.pass_context
def command(ctx: click.Context, /, config: Path | None, **options: Any) -> int:
    """Mount BACKING on MOUNTPOINT, run COMMAND, wait until all that it saved is persisted, and
    unmount.

    The exit code is COMMAND's, or 1 where not all was persisted within drain_timeout_s: then the
    mount stays, and goes on with it. Signals go to COMMAND, which finds the mount point in
    ACPFS_DIR. Without the mount it does not run. Options are those of `acpfs mount`.
    """
    words: list[str] = ctx.meta[_WORDS]
    if not words:
        raise click.UsageError("name the command to run, behind --")
    given = {name: value for name, value in options.items() if value is not None}
    if config is None and not given.keys() >= set(mount.ARGUMENTS):
        raise click.UsageError("name BACKING and MOUNTPOINT, or a --config FILE that has them")
    settings = load_settings(given, config)
    mountpoint = registry.normalised(os.fspath(settings.mountpoint))
    _make(mountpoint)
    return run_between(
        [*_program(), "mount", *ctx.meta[_MOUNT]],
        words,
        [*_program(), "umount", "--timeout", f"{settings.drain_timeout_s:g}", mountpoint],
        {**os.environ, PLACE: mountpoint},
        failed=lambda: _tell_of_rest(mountpoint),
    )


def _make(mountpoint: str) -> None:
    """What is there already `acpfs mount` looks at: it may be a mount that does not answer."""
    try:
        os.makedirs(os.path.dirname(mountpoint), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(mountpoint)
    except OSError as error:
        raise MachineError(f"mount point {mountpoint}: {error.strerror}") from error


def _tell_of_rest(mountpoint: str) -> None:
    """What is left to do, where the mount is not gone."""
    if is_mounted(mountpoint):
        click.echo(
            f"{mountpoint} stays mounted, and goes on to drain; `acpfs umount {mountpoint}` waits "
            "for it again",
            err=True,
        )
