"""`acpfs doctor`: what this machine, and if named a backing directory, offer; each line with what
to do about it.
"""

from __future__ import annotations

from pathlib import Path

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_PATH
from acpfs.errors import ExitCode


@click.command("doctor")
@click.argument(
    "backing", required=False, type=FILE_PATH
)  # click.Path would stat it, and it may hang
@click.option(
    "--spill", type=FILE_PATH, metavar="DIR", help="Also check this directory as a spill tier."
)
@click.option(
    "--second",
    type=FILE_PATH,
    metavar="DIR",
    help="BACKING by another mount of its file system: are late calls of one client refused there?",
)
@click.option(
    "--fix",
    "as_script",
    is_flag=True,
    help="Print commands that repair what can be repaired; runs nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
def command(
    backing: Path | None,
    spill: Path | None,
    second: Path | None,
    as_script: bool,
    as_json: bool,
) -> int:
    """Look at kernel, fuse, memory and huge pages, and at what the file system of BACKING can do.

    Exit code 6: a mount would not work here.
    """
    from acpfs.mounting.doctor import examine, script

    if second is not None and backing is None:
        raise click.UsageError("--second needs BACKING")
    findings = examine(backing, spill, second)
    if as_json:
        show.print_json(
            [
                {"subject": f.subject, "verdict": f.verdict, "text": f.text, "fix": list(f.fix)}
                for f in findings
            ]
        )
    elif as_script:
        click.echo(script(findings))
    else:
        show.table(("", "subject", "finding"), [(f.verdict, f.subject, f.text) for f in findings])
    return int(ExitCode.ENVIRONMENT if any(f.verdict == "bad" for f in findings) else ExitCode.OK)
