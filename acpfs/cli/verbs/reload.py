"""`acpfs-ctl reload`: restart the worker with the installed code, while the mount is in use."""

from __future__ import annotations

import time
from typing import Any

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.control.registry import MountRecord
from acpfs.errors import AcpfsError, DeadlineError

LOOK_INTERVAL_S = 0.1


@click.command("reload")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=60.0,
    metavar="SECONDS",
    help="[default: 60]",
)
@JSON_OPTION
@click.pass_obj
def command(target: Target, timeout_s: float, as_json: bool) -> None:
    """Restart the worker with the installed code.

    Applications see a short pause; nothing is unmounted, no open file is lost.

    Where the new code refuses (a state that is newer than itself), the old code goes on, and the
    exit code is 1.
    """
    before = ask(target.record(), "reload", {}, as_json=as_json)
    worker = _next_worker(target.record(), before["number"], time.monotonic() + timeout_s)
    refused = worker["last_end"].startswith("reload refused")
    if as_json:
        show.print_json(worker)
    else:
        change = f"{before['version']} → {worker['version']}"
        click.echo(
            f"{change}: process {before['pid']} → {worker['pid']}, pause {worker['pause_s']:.3f} s"
        )
    if refused:
        raise AcpfsError(worker["last_end"])


def _next_worker(record: MountRecord, number: int, deadline: float) -> dict[str, Any]:
    while time.monotonic() < deadline:
        try:
            worker: dict[str, Any] = ask(record, "status", {})["worker"]
        except AcpfsError:
            worker = {"number": number}  # between two workers
        if worker["number"] > number:
            return worker
        if worker.get("reload_failed"):
            raise AcpfsError(worker["reload_failed"])
        time.sleep(LOOK_INTERVAL_S)
    raise DeadlineError("no other worker has taken over in time; see the log")
