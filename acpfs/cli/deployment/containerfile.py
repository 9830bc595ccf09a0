"""`acpfs deploy containerfile`: how to build the image that the manifests name."""

from __future__ import annotations

import click

from acpfs import __version__
from acpfs.cli.deployment.templates import filled


@click.command("containerfile")
@click.option(
    "--base",
    default="debian:13-slim",
    show_default=True,
    metavar="IMAGE",
    help="A Debian image, or one derived from it.",
)
def command(base: str) -> None:
    """Print a Containerfile; build it in a checkout of this version."""
    click.echo(filled("Containerfile", {"base": base, "version": __version__}), nl=False)
