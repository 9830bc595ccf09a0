"""`acpfs-ctl adopt`: drain what this mount holds of a node that is lost for good.

The copy is drained as that node would have drained it: by a mount under its node id, below the run
directory, over the copy, for as long as that takes. The storage shuts out what the lost node still
does, by a claim of its log (S553). Whatever dies on the way, the same command goes on.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.umount import umount
from acpfs.cli.verbs.flush import JSON_OPTION, TIMEOUT_OPTION
from acpfs.control import registry
from acpfs.errors import AcpfsError, ExitCode, NotMountedError, RefusedError
from acpfs.runtime.file_locks import locked

ASKS = (
    "Is {node} off, or its machine started anew? What it still does to names could undo what is "
    "drained now. Go on?"
)


@click.command("adopt")
@click.argument("node")
@click.option("--is-off", is_flag=True, help="NODE is off, or was started anew: do not ask.")
@click.option(
    "--alone",
    is_flag=True,
    help="Nobody knows whether NODE is off: refuse what could be undone then. Mounts run it so.",
)
@TIMEOUT_OPTION
@JSON_OPTION
@click.pass_obj
def command(
    target: Target, node: str, is_off: bool, alone: bool, timeout_s: float | None, as_json: bool
) -> None:
    """Drain what this mount holds of NODE, which is lost for good with what it had not persisted.

    Afterwards NODE counts as having left in order; nobody mounts under that node id any more.

    Exit code 5: it lives, or nothing is held of it here that counts. Code 4: not in time; the same
    command goes on.
    """
    if not (is_off or alone):
        click.confirm(ASKS.format(node=node), abort=True)
    record = target.record()
    try:
        lock = registry.adopting_lock(Path(record.runtime_dir), node)
    except OSError as error:
        raise RefusedError(f"{record.runtime_dir} is not yours: {error.strerror}") from error
    with locked(lock, may_wait=not alone) as is_had:
        if not is_had:
            raise RefusedError(f"{node} is being adopted here already")
        _adopt(record, node, timeout_s, alone=alone, as_json=as_json)
    if as_json:
        show.print_json({"node": node})
    else:
        click.echo(f"adopted: {node}; what it had copied here is on the storage")


def _adopt(
    record: registry.MountRecord, node: str, timeout_s: float | None, *, alone: bool, as_json: bool
) -> None:
    found = ask(record, "adopt", {"node": node}, as_json=as_json)
    place = Path(found["runtime_dir"]) / "adopting" / node
    if not _is_mounted(place):
        with contextlib.suppress(NotMountedError):  # what an adopter that was killed has left
            umount(str(place), timeout_s, leave=False)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _mount(found, place, alone=alone)
    umount(str(place), timeout_s, leave=False)
    place.rmdir()
    ask(record, "adopted", {"node": node}, as_json=as_json)


def _is_mounted(place: Path) -> bool:
    name = registry.normalised(str(place))
    return any(one.mountpoint == name and one.alive for one in registry.records())


def _mount(found: show.Json, place: Path, *, alone: bool) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "acpfs.cli.main",
            "mount",
            found["backing"],
            str(place),
            *("--node-id", found["node"]),
            *("--adopts", found["by"]),
            *(["--adopts-alone"] if alone else []),
            *("--spill", found["spill"]),
            *("--spill-mode", "mirror"),
            *("--runtime-dir", found["runtime_dir"]),
            *("--expect-volume", found["volume"]),
            *("--on-failure", "stop"),
            *("--prefault", "0"),
            *("--ram", "64M"),  # what is copied lies in the copy, and is read from there
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        error = AcpfsError(f"{found['node']} cannot be adopted: {done.stderr.strip()}")
        error.exit_code = ExitCode(done.returncode)
        raise error
