"""Start of a mount: the supervisor, in this process (foreground) or a detached one whose readiness or failure the caller is told.

The caller writes the settings to the supervisor's standard input and reads lines of JSON from a pipe: the steps of the start, and then
ready, or what is wrong. One that ends without that has crashed, and its log says why. `work` is what a worker does, from its orders to its
end; state of its process (limits, umask) is set here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import structlog
import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

from acpfs.config import Settings
from acpfs.control import runtime
from acpfs.control.protocol import error_from
from acpfs.control.registry import slug
from acpfs.errors import AcpfsError, DeadlineError, ExitCode, MachineError
from acpfs.supervisor import logs
from acpfs.supervisor.assembly import assemble
from acpfs.supervisor.checks import check_all
from acpfs.supervisor.child import Limits
from acpfs.supervisor.link import Link, orders_of
from acpfs.supervisor.worker import Worker

CHILD_ENDS_WAIT_S = 10.0
SUPERVISOR_LATE_S = 30.0
"""How much later than a step's time is up its supervisor says so, on a machine in heavy use."""
GC_THRESHOLDS = (50_000, 20, 50)
"""Nodes and operations live long and form no cycles: looking through them at every 700 new ones cost 3 % of a small file."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps the interpreter while another wants it. With Python's 5 ms, a request that comes while the drain computes may
wait for that several times: answers took up to 30-74 ms, with this one 9-19 (medians 2.0 and 1.6), for the same processor time."""
READY: dict[str, Any] = {"result": {}}
SUPERVISOR = (sys.executable, "-m", "acpfs.supervisor.supervisor")

log = structlog.get_logger(__name__)


def prepare(settings: Settings) -> Settings:
    """Checks, absolute paths, runtime directory: everything that can fail before a daemon is started.

    Raises:
        AcpfsError: with one line that says what is wrong.
    """
    directory = Path(os.path.abspath(settings.runtime_dir or runtime.runtime_dir()))
    files = {name: Path(os.path.abspath(path)) for name in ("log_file", "metrics_file") if (path := getattr(settings, name)) is not None}
    settings = check_all(settings).model_copy(update={"runtime_dir": directory, **files})
    try:
        runtime.prepare(directory)
    except OSError as error:
        raise MachineError(f"the runtime directory {directory} cannot be made: {error.strerror}") from error
    return settings


def default_log_file(settings: Settings) -> Path:
    """Where a detached daemon logs when it was not told."""
    name = f"{slug(os.fspath(settings.mountpoint))}.log"
    if os.environ.get(runtime.ENVIRONMENT_VARIABLE) or settings.runtime_dir not in (None, runtime.runtime_dir()):
        return _runtime_of(settings) / "logs" / name
    if os.getuid() == 0:
        return Path("/var/log/acpfs") / name
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "acpfs" / name


def start(settings: Settings) -> None:
    """Start a detached supervisor; returns when the mount is ready. `settings` come from `prepare`.

    Raises:
        AcpfsError: what the worker said, or that it crashed.
        DeadlineError: the supervisor says nothing any more.
    """
    settings = settings.model_copy(update={"log_file": settings.log_file or default_log_file(settings)})
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
    try:
        with os.fdopen(read_fd, "rb", buffering=0) as answers:
            with contextlib.suppress(BrokenPipeError):
                _hand_over(child, settings)
            line = _outcome(answers, child.pid)
    except BaseException:
        child.terminate()  # the user, or we, lost patience: no mount without anybody knowing
        child.returncode = -signal.SIGTERM  # one that is stopped may take its time; nobody waits for it here
        raise
    _judge(child, line, settings.log_file)


def _hand_over(child: subprocess.Popen[bytes], settings: Settings) -> None:
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(_as_json(settings))


def _outcome(answers: io.FileIO, pid: int) -> bytes:
    """The last line of the supervisor. Before it come the steps of the start, each of which it ends when its time is up."""
    limit_s = Limits().start_s + SUPERVISOR_LATE_S
    while True:
        if not select.select([answers], [], [], limit_s)[0]:
            raise DeadlineError(
                f"the supervisor (process {pid}) has said nothing for {limit_s:g} s: it hangs, or was stopped; no mount is made"
            )
        line = answers.readline()
        if not line or "step" not in json.loads(line):
            return line


def _as_json(settings: Settings) -> bytes:
    return settings.model_dump_json(exclude_unset=True).encode()


def _judge(child: subprocess.Popen[bytes], line: bytes, log_file: Path | None) -> None:
    message = json.loads(line) if line else None
    if message == READY:
        child.returncode = 0  # it lives on; nobody waits for it here
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(CHILD_ENDS_WAIT_S)
    if message is None:
        raise AcpfsError(f"the daemon ended before the mount was ready (exit status {child.returncode}); see {log_file}")
    error = error_from(message)
    if error.exit_code is ExitCode.ENVIRONMENT:
        raise MachineError(f"{error} (log: {log_file})")
    raise error


def run_foreground(settings: Settings) -> NoReturn:
    """Become the supervisor, in this process. `settings` come from `prepare`."""
    fd = os.memfd_create("acpfs-settings")
    os.write(fd, _as_json(settings))
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    os.chdir("/")
    os.execv(sys.executable, [*SUPERVISOR, "--foreground"])  # noqa: S606 - our own interpreter


def work(orders: dict[str, Any], fds: list[int]) -> int:
    """Be a worker, in a process that was forked from the template, until the mount ends; the exit code."""
    link = orders_of(orders, fds)
    try:
        settings = Settings.model_validate(orders["settings"])
        code = run(settings, link, detached=bool(orders["detached"]))
    except AcpfsError as error:
        log.error("the mount could not be made" if not link.workers_before else "the mount could not be taken over", error=str(error))
        link.tell(error={"exit_code": int(error.exit_code), "message": str(error)})
        return int(error.exit_code)
    except Exception as error:
        log.exception("the worker failed")
        link.tell(error={"exit_code": int(ExitCode.FAILED), "message": f"internal error: {type(error).__name__}: {error}"})
        return int(ExitCode.FAILED)
    link.tell(ended=int(code))
    return int(code)


def run(settings: Settings, link: Link, *, detached: bool = False) -> ExitCode:
    """Serve until the mount ends.

    Raises:
        AcpfsError: the mount could not be made.
    """
    _set_up_process()
    link.step("opening the log file")
    try:
        logs.configure(settings.log_level, settings.log_file, detached=detached)
    except OSError as error:
        raise MachineError(f"cannot write the log file {settings.log_file}: {error.strerror}") from error
    parts = assemble(settings, _runtime_of(settings), link)
    worker: Worker | None = None
    try:
        worker = Worker(parts, link)
        return trio.run(worker.run)
    except BaseExceptionGroup as group:
        raise _single(group) from None
    finally:
        parts.take_apart(nothing_left=worker is not None and worker.nothing_left)


def _single(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one thing that went wrong; trio wraps what leaves a nursery."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _runtime_of(settings: Settings) -> Path:
    assert settings.runtime_dir is not None, "prepare has filled it in"
    return settings.runtime_dir


def _set_up_process() -> None:
    os.umask(0o022)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
