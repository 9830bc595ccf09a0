"""`acpfs-ctl preload`: files come to RAM before anybody reads them."""

from __future__ import annotations

from collections import Counter

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ExitCode

GOOD = ("verified", "unknown", "in RAM")


@click.command("preload")
@click.argument("paths", type=FILE_NAME, nargs=-1)
@click.option("--latest", is_flag=True, help="Load the newest checkpoint instead of PATHS.")
@click.option("--wait", is_flag=True, help="Wait until everything is in RAM.")
@JSON_OPTION
@click.pass_obj
def command(target: Target, paths: tuple[str, ...], latest: bool, wait: bool, as_json: bool) -> int:
    """Bring files at and below PATHS to RAM, compared with their checksums on the way.

    Without --wait it goes on in the background. Exit code 0: done, or begun; 1: something did not
    come (no room, damaged, changed).
    """
    if bool(paths) == latest:
        raise click.UsageError("name PATHS, or give --latest")
    record, below = target.with_paths(paths)
    with show.progress("preloading") as take:
        files = ask(
            record,
            "preload",
            {"paths": below, "latest": latest, "wait": wait},
            take,
            as_json=as_json,
        )["items"]
    bad = [file for file in files if file["status"] not in GOOD]
    if as_json:
        show.print_json(files)
    elif wait:
        if bad:
            show.table(
                ("status", "size", "path"),
                ((f["status"], show.size(f["size"]), show.printable(f["path"])) for f in bad),
            )
        counts = Counter(file["status"] for file in files)
        total = show.size(sum(file["size"] for file in files if file["status"] in GOOD))
        click.echo(
            ", ".join(f"{count} {status}" for status, count in counts.most_common())
            + f": {total} in RAM"
            if files
            else "nothing found"
        )
    else:
        click.echo("begun: see warmed_files in `acpfs-ctl status`, or give --wait")
    return int(ExitCode.FAILED if bad else ExitCode.OK)
