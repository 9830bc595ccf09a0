"""`acpfs-ctl adopt`: drain what this mount holds of a node that is lost for good.

The copy is drained as that node would have drained it: by a mount under its node id, below the run
directory, over the copy, for as long as that takes. The storage shuts out what the lost node still
does, by a claim of its log (S553). Whatever dies on the way, the same command goes on.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.umount import umount
from acpfs.cli.verbs.flush import JSON_OPTION, TIMEOUT_OPTION
from acpfs.cli.verbs.status import why_withheld
from acpfs.config import option_name
from acpfs.control import client, registry
from acpfs.errors import AcpfsError, DeadlineError, ExitCode, NotMountedError, RefusedError
from acpfs.runtime.file_locks import locked_until

ASKS = (
    "Is {node} off, or its machine started anew? What it still does to names could undo what is "
    "drained now. Go on?"
)


ENDS_S = 5.0
"""A mount that was told to end is killed then."""
AGAIN_S = 0.5
"""Between two tries to unmount what is drained but for pointers that wait for other nodes."""

_LOST = frozenset({"missing", "lost", "unknown"})
"""Of what a pointer waits for (`WaitingPointerReport`): what may never come."""
_NAMED = "named"
"""The same: a pointer whose change is withheld names what is to be removed."""


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

    Exit code 5: it lives, or nothing is held of it here that counts. Code 4: not in time. Code 1:
    a pointer is withheld for another node, which is named. After both the same command goes on.
    """
    if not (is_off or alone):
        click.confirm(ASKS.format(node=node), abort=True)
    record = target.record()
    try:
        lock = registry.adopting_lock(Path(record.runtime_dir), node)
    except OSError as error:
        raise RefusedError(f"{record.runtime_dir} is not yours: {error.strerror}") from error
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    others: list[str] = []

    def tell(owner: str) -> None:
        others.append(f"{node} is being adopted here by {owner or 'another command'}")
        if not alone:
            click.echo(f"{others[0]}: waiting for that", err=True)

    with locked_until(lock, -math.inf if alone else deadline, tell) as is_had:
        if is_had:
            _adopt(record, node, deadline, alone=alone, as_json=as_json)
        elif alone:
            raise RefusedError(others[0])
        else:
            raise DeadlineError(f"{others[0]}, and that was not done in time")
    if as_json:
        show.print_json({"node": node})
    else:
        click.echo(f"adopted: {node}; what it had copied here is on the storage")


def _adopt(
    record: registry.MountRecord, node: str, deadline: float, *, alone: bool, as_json: bool
) -> None:
    found = ask(record, "adopt", {"node": node}, as_json=as_json, patience_s=_left_s(deadline))
    place = registry.adopting_place(Path(found["runtime_dir"]), node)
    if not _is_mounted(place):
        with contextlib.suppress(NotMountedError):  # what an adopter that was killed has left
            umount(str(place), _left_s(deadline), leave=False)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _mount(found, place, deadline, alone=alone)
    _drain(node, place, deadline)
    place.rmdir()
    ask(record, "adopted", {"node": node}, as_json=as_json, patience_s=_left_s(deadline))


def _drain(node: str, place: Path, deadline: float) -> None:
    """And unmount. What waits for a pointer that another node withholds comes when that one's does,
    which may be withheld for the very node that is adopted.
    """
    waited_for = ""
    while True:
        try:
            umount(str(place), _left_s(deadline), leave=False)
        except AcpfsError as error:
            withheld = _withheld(place)
            if not withheld:
                raise
            if time.monotonic() >= deadline or any(map(_may_never_come, withheld)):
                raise _left_behind(node, withheld, error.exit_code) from error
            why = f"{show.printable(withheld[0]['path'])}, since {why_withheld(withheld[0])}"
            if why != waited_for:
                click.echo(f"{node}: waiting for {why}", err=True)
            waited_for = why
            time.sleep(AGAIN_S)
        else:
            return


def _may_never_come(pointer: show.Json) -> bool:
    """Whether it waits for what is lost, or for a change that is withheld for that."""
    return not {*_LOST, _NAMED}.isdisjoint(pointer["waits_for"].values())


def _withheld(place: Path) -> list[show.Json]:
    """Pointers that the mount which adopts withholds for what other nodes may have had."""
    try:
        status = client.request(registry.find(str(place)), "status", {})
    except AcpfsError:  # it has ended
        return []
    waiting = (status.get("cluster") or {}).get("waiting", [])
    return [one for one in waiting if one["withheld"]]


def _left_behind(node: str, withheld: list[show.Json], code: ExitCode) -> AcpfsError:
    first = next(filter(_may_never_come, withheld), withheld[0])
    more = f", with {len(withheld) - 1} more" if len(withheld) > 1 else ""
    reasons = first["waits_for"].items()
    others = [other for other, why in reasons if why in _LOST]
    forget = show.printable((others or [other for other, _why in reasons])[0])
    way_out = (
        f"bring that back, have it adopted at its holder, or `acpfs-ctl nodes forget {forget}`"
        if others or _NAMED not in first["waits_for"].values()
        else f"if that waits for what {node} had not copied, `acpfs-ctl nodes forget {node}` here"
    )
    error = AcpfsError(
        f"{node} is drained but for {show.printable(first['path'])}{more}, withheld since "
        f"{why_withheld(first)}: {way_out}; then `acpfs-ctl adopt {node}` goes on"
    )
    error.exit_code = code
    return error


def _left_s(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def _is_mounted(place: Path) -> bool:
    name = registry.normalised(str(place))
    return any(one.mountpoint == name and one.alive for one in registry.records())


def _options(settings: show.Json) -> list[str]:
    """Of a mount whose log is in the same order as that of this one."""
    found = []
    for name, value in settings.items():
        option = option_name(name)
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = ":".join(value) if isinstance(value, list) else str(value)
            found.append(f"--{option}={text}")
    return found


def _mount(found: show.Json, place: Path, deadline: float, *, alone: bool) -> None:
    with subprocess.Popen(
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
            *_options(found.get("settings", {})),
            *("--ram", "64M"),  # what is copied lies in the copy, and is read from there
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as mounts:
        try:
            _nothing, said = mounts.communicate(timeout=_left_s(deadline))
        except subprocess.TimeoutExpired:
            _end(mounts)
            raise DeadlineError(
                f"the mount that adopts {found['node']} did not begin in time: "
                f"`acpfs-ctl adopt {found['node']}` tries again"
            ) from None
        except BaseException:
            mounts.kill()
            raise
    if mounts.returncode:
        error = AcpfsError(f"{found['node']} cannot be adopted: {said.strip()}")
        # it may have been killed
        error.exit_code = ExitCode(mounts.returncode) if mounts.returncode > 0 else ExitCode.FAILED
        raise error


def _end(mounts: subprocess.Popen[str]) -> None:
    """As Ctrl-C would, at which it ends what it has started."""
    mounts.send_signal(signal.SIGINT)
    try:
        mounts.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        mounts.kill()
