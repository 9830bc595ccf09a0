"""`acpfs salvage`: copies what a RAM tier has that no mount takes any more."""

from __future__ import annotations

from pathlib import Path

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_PATH
from acpfs.errors import ExitCode


@click.command("salvage")
@click.argument("tier", metavar="TIER", type=FILE_PATH)
@click.argument("target", metavar="TARGET", type=FILE_PATH)
@click.option(
    "--all", "everything", is_flag=True, help="Also copy files that the backing directory has."
)
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
def command(tier: Path, target: Path, everything: bool, as_json: bool) -> int:
    """Copy files out of TIER, a RAM tier that was left (a refused mount names its directory), to
    TARGET, a new directory.

    Changes nothing in TIER. Files go to TARGET/files under their names, those whose names are not
    known to TARGET/unnamed. Exit code 0: all are there as they were written; 1: for some that is
    not so, or not known, which is told.
    """
    from dataclasses import asdict

    from acpfs.mounting.tier_salvage import salvage

    saved = salvage(tier, target, everything=everything)
    if as_json:
        show.print_json([asdict(one) for one in saved])
    elif saved:
        rows = (
            (
                show.size(s.size),
                show.printable(s.target or "–"),
                show.printable(s.begins),
                show.printable(s.problem),
            )
            for s in saved
        )
        show.table(("size", "copied to", "begins with", "problem"), rows, numbers=("size",))
    else:
        click.echo("there is nothing that the backing directory has not")
    return int(ExitCode.FAILED if any(one.problem for one in saved) else ExitCode.OK)
