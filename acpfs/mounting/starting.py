"""Start of a mount, as who mounts sees it: the supervisor, in this process (foreground) or a
detached one whose answer is waited for.

The supervisor and its template load while the caller checks the settings. Then it writes them to
the supervisor's standard input and reads lines of JSON from a pipe: the steps of the start, and
then ready, or what is wrong. One that ends without that has crashed, and its log says why. Imports
nothing of what only a worker needs: a mount costs its imports once, in the template.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from acpfs.config import CHANGEABLE, Settings
from acpfs.control import runtime
from acpfs.control.registry import slug
from acpfs.control.socket_messages import error_from
from acpfs.descriptors import readable
from acpfs.errors import AcpfsError, DeadlineError, ExitCode, MachineError, RefusedError
from acpfs.supervisor import handover, keeper_client
from acpfs.supervisor.child import Limits

CHILD_ENDS_WAIT_S = 10.0
CHANGES_HANDS_S = 30.0
LOOK_AGAIN_S = 0.1
LOST = "what was open in it has ended with an error"
SUPERVISOR_LATE_S = 30.0
"""How much later than a step's time is up its supervisor says so, on a machine in heavy use."""
READY: dict[str, Any] = {"result": {}}
SUPERVISOR = (sys.executable, "-m", "acpfs.supervisor.supervisor")


RENEWED = (
    *CHANGEABLE,
    "drain_timeout_s",
    "log_file",
    "metrics_port",
    "metrics_address",
    "metrics_file",
)
"""Settings that hold from a take-over on; all others are the mount's own until it ends."""


class Origin(Enum):
    """Whether a mount is there already."""

    NEW = "new"
    TAKEN_OVER = "take_over"
    """A living supervisor has it, and is asked for it."""
    RESUMED = "resume"
    """All its processes were killed, and a keeper holds it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the supervisor is told."""

    settings: Settings
    origin: Origin = Origin.NEW
    instance: str = ""
    """Who mounts, where a container may be started again after another one has taken its mount; "":
    a person.
    """

    def as_json(self) -> bytes:
        told = self.settings.as_json(given_only=True)
        if self.origin is not Origin.NEW:
            told[self.origin.value] = {name: told[name] for name in RENEWED if name in told}
        if self.instance:
            told["instance"] = self.instance
        return json.dumps(told).encode()


def prepare(settings: Settings, *, take_over: bool = False, instance: str = "") -> Prepared:
    """Checks, absolute paths, runtime directory: everything that can fail before a daemon is
    started.

    `take_over`: a mount that is there already is asked for, where its supervisor answers. One that
    only a keeper holds is gone on with.

    Raises:
        AcpfsError: with one line that says what is wrong.
    """
    from acpfs.mounting.checks import check_all, normal  # while the supervisor loads
    from acpfs.mounting.mountpoint import is_mounted

    directory = Path(os.path.abspath(settings.runtime_dir or runtime.runtime_dir()))
    files = {
        name: Path(os.path.abspath(path))
        for name in ("log_file", "metrics_file")
        if (path := getattr(settings, name)) is not None
    }
    settings = normal(settings).changed(runtime_dir=directory, **files)
    origin = _origin(settings.as_json(), take_over=take_over)
    dead = origin is Origin.NEW and is_mounted(os.fspath(settings.mountpoint))
    settings = check_all(settings, is_mounted=origin is not Origin.NEW)
    if dead:
        sys.stderr.write(
            f"acpfs: {settings.mountpoint}: all processes of the mount before were killed and no "
            f"keeper held it: {LOST}\n"
        )
    try:
        runtime.prepare(directory)
    except OSError as error:
        raise MachineError(
            f"the runtime directory {directory} cannot be made: {error.strerror}"
        ) from error
    return Prepared(settings, origin, instance)


def _origin(told: dict[str, Any], *, take_over: bool) -> Origin:
    """Who has the mount now; while that changes, it is waited for.

    Raises:
        RefusedError: a supervisor is about to go on with it, and does not come to serve.
    """
    until = time.monotonic() + CHANGES_HANDS_S
    while True:
        if take_over and handover.answers(handover.door_of(told)):
            return Origin.TAKEN_OVER
        held = keeper_client.held_mount(told)
        if held is None or (held["phase"] == "served" and not take_over):
            return Origin.NEW  # where somebody serves it, the check of the mount point says so
        if held["phase"] == "alone":
            return Origin.RESUMED
        if time.monotonic() >= until:
            raise RefusedError(
                f"{told['mountpoint']} is held by the keeper for a supervisor that does not "
                f"serve it: {held['phase']}"
            )
        time.sleep(LOOK_AGAIN_S)


def default_log_file(settings: Settings) -> Path:
    """Where a detached daemon logs when it was not told."""
    name = f"{slug(os.fspath(settings.mountpoint))}.log"
    if os.environ.get(runtime.ENVIRONMENT_VARIABLE) or settings.runtime_dir not in (
        None,
        runtime.runtime_dir(),
    ):
        return _runtime_of(settings) / "logs" / name
    if os.getuid() == 0:
        return Path("/var/log/acpfs") / name
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "acpfs" / name


def start(checked: Callable[[], Prepared]) -> None:
    """Start a detached supervisor; returns when the mount is ready.

    `checked` gives the settings (`prepare`), while the processes load.

    Raises:
        AcpfsError: what `checked` or the worker said, or that it crashed.
        DeadlineError: the supervisor says nothing any more.
    """
    read_fd, write_fd = os.pipe()
    try:
        child = subprocess.Popen(
            [*SUPERVISOR, "--start", str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[write_fd],
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(write_fd)
    with os.fdopen(read_fd, "rb", buffering=0) as answers:
        settings = _handed_over(child, checked)
        try:
            line = _outcome(answers, child.pid)
        except BaseException:
            child.terminate()  # the user, or we, lost patience: no mount without anybody knowing
            child.returncode = (
                -signal.SIGTERM
            )  # one that is stopped may take its time; nobody waits for it here
            raise
    _judge(child, line, settings.log_file)


def _handed_over(child: subprocess.Popen[bytes], checked: Callable[[], Prepared]) -> Settings:
    """The settings, which the supervisor has now. Without them it ends, and all that it started."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        try:
            prepared = checked()
        except BaseException:
            pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(CHILD_ENDS_WAIT_S)
            raise
        settings = prepared.settings
        settings = settings.changed(log_file=settings.log_file or default_log_file(settings))
        pipe.write(replace(prepared, settings=settings).as_json())
    return settings


def _outcome(answers: io.FileIO, pid: int) -> bytes:
    """The last line of the supervisor.

    Before it come the steps of the start, each of which it ends when its time is up.
    """
    limit_s = Limits().start_s + SUPERVISOR_LATE_S
    while True:
        if not readable(answers, limit_s):
            raise DeadlineError(
                f"the supervisor (process {pid}) has said nothing for {limit_s:g} s: it hangs, "
                "or was stopped; no mount is made"
            )
        line = answers.readline()
        if not line or "step" not in json.loads(line):
            return line


def _judge(child: subprocess.Popen[bytes], line: bytes, log_file: Path | None) -> None:
    message = json.loads(line) if line else None
    if message == READY:
        child.returncode = 0  # it lives on; nobody waits for it here
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(CHILD_ENDS_WAIT_S)
    if message is None:
        raise AcpfsError(
            f"the daemon ended before the mount was ready (exit status {child.returncode}); see "
            f"{log_file}"
        )
    error = error_from(message)
    if error.exit_code is ExitCode.ENVIRONMENT:
        raise MachineError(f"{error} (log: {log_file})")
    raise error


def run_foreground(prepared: Prepared) -> NoReturn:
    """Become the supervisor, in this process."""
    fd = os.memfd_create("acpfs-settings")
    os.write(fd, prepared.as_json())
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    os.chdir("/")
    os.execv(sys.executable, [*SUPERVISOR, "--foreground"])  # noqa: S606 - our own interpreter


def _runtime_of(settings: Settings) -> Path:
    assert settings.runtime_dir is not None, "prepare has filled it in"
    return settings.runtime_dir
