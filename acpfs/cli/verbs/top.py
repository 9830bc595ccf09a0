"""`acpfs-ctl top`: a screen that shows one mount as it is now."""

from __future__ import annotations

from typing import Any

import click

from acpfs.cli.target import Target, ask
from acpfs.errors import RefusedError


@click.command("top")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds between two updates."
)
@click.pass_obj
def command(target: Target, interval_s: float) -> None:
    """A screen with RAM, drain, what is not safe and why, who waits, checkpoints; keys to flush, retry, pin and release."""
    record = target.record()
    try:
        from acpfs.cli.top_screen import TopScreen
    except ImportError:
        raise RefusedError("top needs textual: pip install 'acpfs[top]'; without it: acpfs-ctl status --watch") from None

    def asked(verb: str, args: dict[str, Any]) -> Any:
        return ask(record, verb, args)

    TopScreen(record.mountpoint, asked, interval_s).run()
