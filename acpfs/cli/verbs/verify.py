"""`acpfs-ctl verify`: scrub the backing directory against the manifest."""

from __future__ import annotations

from collections import Counter

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode

GOOD = ("ok", "unknown", "repaired")


@click.command("verify")
@click.argument("paths", type=FILE_NAME, nargs=-1)
@click.option(
    "--ram",
    "of_ram",
    is_flag=True,
    help="Check the copies in RAM instead. Bad copies of persisted files leave RAM.",
)
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], of_ram: bool, as_json: bool) -> int:
    """Read files of the backing directory (below PATHS; all recorded ones when none) and compare
    with the recorded checksums.

    Exit code 0: all equal; 1: some differ, are missing or cannot be read. Files that were never
    written through the mount are `unknown`, which is no fault.
    """
    record, below = target.with_paths(paths)
    verdicts = ask(record, "verify_ram" if of_ram else "verify", {"paths": below}, as_json=as_json)[
        "items"
    ]
    bad = [verdict for verdict in verdicts if verdict["status"] not in GOOD]
    if as_json:
        show.print_json(verdicts)
    else:
        _tell(verdicts, [verdict for verdict in verdicts if verdict["status"] not in GOOD[:2]])
    return int(ExitCode.FAILED if bad else ExitCode.OK)


def _tell(verdicts: list[show.Json], remarkable: list[show.Json]) -> None:
    if remarkable:
        rows = (
            (
                v["status"],
                show.printable(v["path"]),
                v["expected"] or "",
                ", ".join(filter(None, (v["found"], v["error"]))),
            )
            for v in remarkable
        )
        show.table(("status", "path", "expected", "found"), rows)
    counts = Counter(verdict["status"] for verdict in verdicts)
    click.echo(
        ", ".join(f"{count} {status}" for status, count in counts.most_common())
        or "nothing is recorded there"
    )
