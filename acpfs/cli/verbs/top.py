"""`acpfs-ctl top`: a screen that shows one mount, or all of this machine, as they are now."""

from __future__ import annotations

from functools import partial

import click

from acpfs.cli.target import Target, ask
from acpfs.control import registry
from acpfs.errors import RefusedError


@click.command("top")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 60),
    default=1.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.pass_obj
def command(target: Target, interval_s: float) -> None:
    """A screen with RAM, drain, what is not safe and why, who waits, checkpoints, members; keys to
    flush, retry, pin and release.

    Without a mount point it has all mounts of this machine.
    """
    records = (
        [target.record()]
        if target.mountpoint is not None
        else sorted(registry.reachable(), key=lambda record: record.mountpoint)
    )
    if not records:
        target.record()  # says that there is none
    try:
        from acpfs.cli.top_screen import Mount, TopScreen
    except ImportError:
        raise RefusedError(
            "top needs textual: pip install 'acpfs[top]'; without it: acpfs-ctl status --watch"
        ) from None
    TopScreen(
        [Mount(record.mountpoint, partial(ask, record)) for record in records], interval_s
    ).run()
