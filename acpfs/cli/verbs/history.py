"""`acpfs-ctl history`: what happened to a mount, as a table, for other programs, or as a page with
plots.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import RefusedError

HEADINGS = (
    "when",
    "what",
    "path",
    "step",
    "files",
    "size",
    "saved in",
    "persisted in",
    "loaded in",
)
OF_CHECKPOINTS = ("checkpoint", "load")
DURATIONS = ("save_s", "persist_s", "load_s")


@click.command("history")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    help="Only entries of this kind, such as checkpoint or storage; may be repeated.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print as CSV.")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with plots instead.",
)
@JSON_OPTION
@click.pass_obj
def command(
    target: Target, kinds: tuple[str, ...], as_csv: bool, page: Path | None, as_json: bool
) -> None:
    """What happened to the mount, and to earlier ones of the same backing directory, oldest
    first.
    """
    record = target.record()
    found: list[show.Json] = ask(record, "history", as_json=as_json)["items"]
    entries = [entry for entry in found if not kinds or entry["kind"] in kinds]
    if page is not None:
        from acpfs.cli import history_page

        try:
            page.write_text(history_page.html(record.mountpoint, entries), encoding="utf-8")
        except OSError as error:
            raise RefusedError(f"{page} cannot be written: {error.strerror}") from None
    elif as_json:
        show.print_json(entries)
    elif as_csv:
        _print_csv(entries)
    elif not entries:
        click.echo("nothing is known yet")
    else:
        show.table(HEADINGS, map(_row, entries), numbers=HEADINGS[3:])


def _print_csv(entries: list[show.Json]) -> None:
    import csv

    if entries:
        writer = csv.DictWriter(sys.stdout, list(entries[0]))
        writer.writeheader()
        writer.writerows(
            {
                name: show.printable(value) if isinstance(value, str) else value
                for name, value in entry.items()
            }
            for entry in entries
        )


def _row(entry: show.Json) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["at"]))
    if entry["kind"] not in OF_CHECKPOINTS:
        return (
            when,
            f"{entry['kind']}: {show.printable(entry['text'])}",
            *("" for _ in HEADINGS[2:]),
        )
    times = ("load_s",) if entry["kind"] == "load" else ("save_s", "persist_s")
    return (
        when,
        what(entry),
        show.printable(entry["path"]),
        "" if entry["step"] is None else str(entry["step"]),
        str(entry["files"]),
        show.size(entry["bytes"] or 0),
        *(
            "" if key not in times else "?" if entry[key] is None else show.duration(entry[key])
            for key in DURATIONS
        ),
    )


def what(entry: show.Json) -> str:
    """What happened to a checkpoint."""
    return (
        show.printable(entry["text"])
        if entry["kind"] == "load"
        else "verified"
        if entry["verified"]
        else "persisted"
    )
