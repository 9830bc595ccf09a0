"""`acpfs-ctl checkpoints`: each checkpoint with its state, times, and where it can be loaded
from.
"""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_NAME
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION


@click.command("checkpoints")
@click.argument("path", type=FILE_NAME, required=False)
@JSON_OPTION
@click.pass_obj
def command(target: Target, path: str | None, as_json: bool) -> None:
    """Checkpoints at and below PATH that were written or looked at through the mount, oldest first.

    Loading times are estimates.
    """
    record, below = target.with_paths([path] if path else [])
    found = ask(record, "checkpoints", {"paths": below}, as_json=as_json)["items"]
    if as_json:
        show.print_json(found)
        return
    if not found:
        click.echo(
            "no checkpoint is known; one is a name with a step, such as step-100/ or model-100.pt "
            "(checkpoint_patterns)"
        )
        return
    headings = (
        "checkpoint",
        "step",
        "files",
        "size",
        "state",
        "lies",
        "saved in",
        "persisted in",
        "loads from",
        "in about",
    )
    show.table(
        headings,
        (_row(report) for report in found),
        numbers=("step", "files", "size", "saved in", "persisted in", "in about"),
    )


def _row(report: show.Json) -> tuple[str, ...]:
    return (
        show.printable(report["path"]),
        "" if report["step"] is None else str(report["step"]),
        str(report["files"]),
        show.size(report["bytes"]),
        show.checkpoint_state(report),
        lies(report),
        *(_duration(report[key]) for key in ("save_s", "persist_s")),
        {"ram": "RAM", "mixed": "several places"}.get(
            str(report["loads_from"]), str(report["loads_from"])
        ),
        _duration(report["estimated_load_s"]),
    )


def lies(report: show.Json) -> str:
    """Where a checkpoint is: what the loss of this node would leave of it."""
    if report["persisted_files"] == report["files"]:
        return "on the storage"
    left = report["files"] - report["persisted_files"]
    copied = report.get("copied_files", 0)
    if not copied:
        return "here alone"
    holder = show.printable(report["holder"])
    return f"here and at {holder}" if copied >= left else f"here, {copied} of {left} at {holder}"


def _duration(seconds: float | None) -> str:
    return "?" if seconds is None else show.duration(seconds)
