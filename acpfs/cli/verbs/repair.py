"""`acpfs-ctl repair`: what the backing directory spoiled or lost is written once more from RAM."""

from __future__ import annotations

from collections import Counter

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode


@click.command("repair")
@click.argument("paths", type=FILE_NAME, nargs=-1, required=True)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Give up waiting after this long. [default: never]",
)
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], timeout_s: float | None, as_json: bool) -> int:
    """Verify files at and below PATHS; write those that are not as recorded once more, from RAM
    where it still has the recorded content.

    Exit code 0: all are as recorded now; 1: some could not be repaired, and the output says why.
    """
    record, below = target.with_paths(paths)
    verdicts = ask(record, "repair", {"paths": below, "timeout_s": timeout_s}, as_json=as_json)[
        "items"
    ]
    bad = [verdict for verdict in verdicts if verdict["status"] != "repaired"]
    if as_json:
        show.print_json(verdicts)
    else:
        if bad:
            show.table(
                ("status", "path", "not repaired because"),
                ((v["status"], show.printable(v["path"]), v["error"] or "") for v in bad),
            )
        counts = Counter(verdict["status"] for verdict in verdicts)
        click.echo(
            ", ".join(f"{count} {status}" for status, count in counts.most_common())
            or "all as recorded"
        )
    return int(ExitCode.FAILED if bad else ExitCode.OK)
