"""Start of a worker: in this process (foreground), or in a detached one whose readiness or failure the caller is told.

The parent writes the settings to the child's standard input and reads one line of JSON from a pipe: ready, or what is
wrong. A child that ends without a line has crashed, and its log says why. State of the process (signals, limits, umask) is set here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

from acpfs.config import Settings
from acpfs.control import runtime
from acpfs.control.protocol import error_from
from acpfs.control.registry import slug
from acpfs.errors import AcpfsError, ExitCode, MachineError
from acpfs.supervisor import logs
from acpfs.supervisor.assembly import assemble
from acpfs.supervisor.checks import check_all
from acpfs.supervisor.worker import Worker

CHILD_ENDS_WAIT_S = 10.0
SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps the interpreter while another wants it. With Python's 5 ms, a request that comes while the drain computes may
wait for that several times: answers took up to 30-74 ms, with this one 9-19 (medians 2.0 and 1.6), for the same processor time."""
READY: dict[str, Any] = {"result": {}}

log = structlog.get_logger(__name__)


def prepare(settings: Settings) -> Settings:
    """Checks, absolute paths, runtime directory: everything that can fail before a daemon is started.

    Raises:
        AcpfsError: with one line that says what is wrong.
    """
    directory = Path(os.path.abspath(settings.runtime_dir or runtime.runtime_dir()))
    settings = check_all(settings).model_copy(update={"runtime_dir": directory})
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
    """Start a detached daemon; returns when the mount is ready. `settings` come from `prepare`.

    Raises:
        AcpfsError: what the daemon said, or that it crashed.
    """
    settings = settings.model_copy(update={"log_file": settings.log_file or default_log_file(settings)})
    read_fd, write_fd = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "acpfs.supervisor.daemon", str(write_fd)],
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
        with os.fdopen(read_fd, "rb") as answers:
            with contextlib.suppress(BrokenPipeError):
                _hand_over(child, settings)
            line = answers.readline()
    except BaseException:
        child.terminate()  # the user lost patience: no mount without anybody knowing
        raise
    _judge(child, line, settings.log_file)


def _hand_over(child: subprocess.Popen[bytes], settings: Settings) -> None:
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(settings.model_dump_json(exclude_unset=True).encode())


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


def run(settings: Settings, tell: Callable[[dict[str, Any]], None] = lambda _message: None, *, detached: bool = False) -> ExitCode:
    """Be the daemon until the mount ends. `tell` is called once with what the parent is to know.

    Raises:
        AcpfsError: the mount could not be made.
    """
    _set_up_process()
    try:
        logs.configure(settings.log_level, settings.log_file, detached=detached)
    except OSError as error:
        raise MachineError(f"cannot write the log file {settings.log_file}: {error.strerror}") from error
    parts = assemble(settings, _runtime_of(settings))
    worker: Worker | None = None
    try:
        worker = Worker(parts, lambda: tell(READY))
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
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Entry of the detached process: settings on standard input, descriptor of the answer pipe as argument."""
    answer_fd = int(sys.argv[1])
    os.set_inheritable(answer_fd, False)
    told = False

    def tell(message: dict[str, Any]) -> None:
        nonlocal told
        if not told:
            told = True
            with contextlib.suppress(BrokenPipeError):
                os.write(answer_fd, json.dumps(message).encode() + b"\n")
            os.close(answer_fd)

    code = ExitCode.FAILED
    try:
        settings = Settings.model_validate_json(sys.stdin.buffer.read())
        _to_null(0)
        code = run(settings, tell, detached=True)
    except AcpfsError as error:
        log.error("the mount could not be made", error=str(error))
        tell({"error": {"exit_code": int(error.exit_code), "message": str(error)}})
        code = error.exit_code
    except Exception as error:
        log.exception("the daemon failed")
        tell({"error": {"exit_code": int(ExitCode.FAILED), "message": f"internal error: {type(error).__name__}: {error}"}})
    sys.exit(int(code))


def _to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)


if __name__ == "__main__":
    main()
