"""`acpfs-ctl ls`: state of each file that the upper layer knows."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION


@click.command("ls")
@click.argument("path", type=FILE_NAME, required=False)
@JSON_OPTION
@click.pass_obj
def command(target: Target, path: str | None, as_json: bool) -> None:
    """State of each file in the RAM tier or the queue, at and below PATH.

    Files that are only on the backing directory are not listed.
    """
    record, below = target.with_paths([path] if path else [])
    files = ask(record, "ls", {"paths": below}, as_json=as_json)["items"]
    if as_json:
        show.print_json(files)
        return
    if not files:
        click.echo("nothing in the RAM tier or the queue")
        return
    rows = (
        (
            show.state(f),
            show.size(f["size"]),
            show.duration(f["age_s"]),
            f["tier"],
            f["lane"],
            f["checksum"] or "",
            f["error"] or "",
            ", ".join(
                f"{one['pid']} {show.printable(one['command'] or 'gone')}"
                for one in f.get("writers", ())
            ),
            show.printable(f["path"]),
        )
        for f in files
    )
    show.table(
        ("state", "size", "age", "tier", "lane", "xxh3-128", "error", "written by", "path"),
        rows,
        numbers=("size", "age"),
    )
