"""`acpfs-ctl verify`: scrub the backing directory against the manifest."""

from __future__ import annotations

from collections import Counter

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode

GOOD = ("ok", "unknown")


@click.command("verify")
@click.argument("paths", nargs=-1)
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], as_json: bool) -> int:
    """Read files of the backing directory (below PATHS; all recorded ones when none) and compare with the recorded checksums.

    Exit code 0: all equal; 1: some differ, are missing or cannot be read. Files that were never written through the mount are
    `unknown`, which is no fault.
    """
    record, below = target.with_paths(paths)
    verdicts = ask(record, "verify", {"paths": below}, as_json=as_json)["items"]
    bad = [verdict for verdict in verdicts if verdict["status"] not in GOOD]
    if as_json:
        show.print_json(verdicts)
    else:
        _tell(verdicts, bad)
    return int(ExitCode.FAILED if bad else ExitCode.OK)


def _tell(verdicts: list[show.Json], bad: list[show.Json]) -> None:
    if bad:
        rows = ((v["status"], show.printable(v["path"]), v["expected"] or "", v["found"] or v["error"] or "") for v in bad)
        show.table(("status", "path", "expected", "found"), rows)
    counts = Counter(verdict["status"] for verdict in verdicts)
    click.echo(", ".join(f"{count} {status}" for status, count in counts.most_common()) or "nothing is recorded there")
