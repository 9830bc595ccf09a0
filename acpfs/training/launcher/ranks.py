"""The processes of this node's ranks: begun, waited for, ended.

Each is a session of its own, and gets SIGTERM if the launcher dies.

Whoever dies is seen by `reaped`, which is called on SIGCHLD. The launcher is the *subreaper* of all
that it begins: a rank that a template forked is its child too, and so are the processes that a dead
rank leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from acpfs.training.launcher import fast_saves
from acpfs.training.launcher.environment import Seat
from acpfs.training.launcher.options import Options
from acpfs.training.launcher.rank_logs import RankLog, Shown

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class RankProcess:
    """One that runs."""

    seat: Seat
    pid: int
    log: RankLog
    shown: Shown


def become_subreaper() -> None:
    """Orphans below this process come to it, not to init."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def command_of(options: Options) -> list[str]:
    """What is executed for a rank."""
    if options.no_python:
        return list(options.program)
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    if options.has_fast_saves:
        python += ["-m", fast_saves.__name__]
    return [*python, *(["-m"] if options.is_module else []), *options.program]


def begin(command: Sequence[str], added: Mapping[str, str], log: RankLog) -> int:
    """Execute a program as a rank; its pid. Whoever calls waits for that by `reaped`.

    Raises:
        OSError: there is no such program.
    """
    out, err = opened(log)
    try:
        started = subprocess.Popen(
            command,
            env={**os.environ, **added},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            # the launcher has one thread: nothing can be locked
            preexec_fn=dying_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
        )
    finally:
        close(out, err)
    started.returncode = 0  # `reaped` waits for it
    return started.pid


def dying_with(launcher: int, number: signal.Signals) -> Callable[[], None]:
    """What a child does between fork and execution, so that it gets this signal when the launcher
    dies.
    """

    def dies_with_launcher() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(128 + number)

    return dies_with_launcher


def opened(log: RankLog) -> tuple[int | None, int | None]:
    """Descriptors for stdout and stderr; None: the launcher's own."""
    return _opened(log.out), _opened(log.err)


def close(*descriptors: int | None) -> None:
    """Those that are files."""
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _opened(path: Path | None) -> int | None:
    return (
        None
        if path is None
        else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    )


def reaped() -> list[tuple[int, int]]:
    """Children that have ended, with their status.

    What a rank that failed leaves in its session is killed before its number is free.
    """
    found: list[tuple[int, int]] = []
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return found
        if ended is None:
            return found
        if ended.si_status or ended.si_code != os.CLD_EXITED:
            signal_session(ended.si_pid, signal.SIGKILL)
        found.append(os.waitpid(ended.si_pid, 0))


def dismiss_coordinators(job: str) -> None:
    """Those of this node that ranks of the job have left: they would wait for ranks that come
    again, and keep the job's log open.
    """
    with contextlib.suppress(OSError):
        children = (
            Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        )
        for pid in map(int, children):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"acpfs.training.coordinator" in words and job.encode() in words:
                signal_rank(pid, signal.SIGTERM)


def signal_rank(pid: int, number: signal.Signals) -> None:
    """To the rank itself; what it has begun is its own business."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_session(pid: int, number: signal.Signals) -> None:
    """To all processes that a rank's session has in its first group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
