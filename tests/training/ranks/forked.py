"""Ranks forked from this process, which has torch imported: one starts in some milliseconds.

Real gloo, real SIGKILL, always reaped.

What a first optimizer or layout imports in a rank is imported here: it takes a rank seconds of a
processor, and thousands are forked.

A rank leads a process group, and what it leaves there is killed when it has ended: Megatron-Core's
managers outlive a rank that was killed. Coordinators have sessions of their own. Ranks end with
this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from acpfs.training.launcher.template import ALSO

Main = Callable[[int], None]
END_TIMEOUT_S = 240.0
PR_SET_PDEATHSIG = 1

for _module in (*ALSO["torch"], "acpfs.training.torch.rank"):
    importlib.import_module(_module)
gc.collect()
gc.freeze()  # what is here at the fork stays: a rank's collector neither visits nor copies it


def join_group(rank: int, world: int, store: Path) -> Any:
    """Begin as a rank; the default group."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world
    )
    # a rank that has its connections may end while others still make theirs: that fails them
    dist.barrier()
    return dist.group.WORLD


class Ranks:
    """Ranks that run `main(rank)`. A context manager: whoever lives at its end is killed."""

    def __init__(self, world: int, directory: Path, main: Main) -> None:
        """`directory`: where each rank's output goes, `rank-N.log`."""
        self.world = world
        self.directory = directory
        self._main = main
        self.pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}

    def __enter__(self) -> Ranks:
        torch.set_num_threads(1)
        for rank in range(self.world):
            self.pids[rank] = self._fork(rank)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in range(self.world):
            self.kill(rank)
        for rank in self.pids.keys() - self._statuses.keys():
            self._statuses[rank] = self._reaped(rank)
        if kind is not None:
            print(self.said())

    def _fork(self, rank: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        own = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != own:
                os._exit(status)
            signal.setitimer(signal.ITIMER_REAL, 0)  # the test's own time limit
            for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            output = os.open(self.log(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            self._main(rank)
            status = 0
        except BaseException as error:  # noqa: BLE001  # a child must not go on as the test
            status = (
                error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 70
            )
            sys.excepthook(
                type(error), error, error.__traceback__
            )  # as at the end of a script: protection may have something to do
        finally:
            os._exit(status)

    def _reaped(self, rank: int) -> int:
        """Waits for its end; its status. The group is killed before its number is free."""
        pid = self.pids[rank]
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody else is in it
            os.killpg(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]

    def log(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.log"

    def said(self) -> str:
        """Output of all ranks."""
        logs = ((rank, self.log(rank)) for rank in range(self.world))
        return "\n".join(
            f"--- rank {rank}\n{path.read_text()[-6000:]}" for rank, path in logs if path.exists()
        )

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        if rank not in self._statuses:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def status(self, rank: int, timeout_s: float = END_TIMEOUT_S) -> int:
        """Exit status of a rank when it has ended; negative: the signal."""
        if rank not in self._statuses:
            ended = os.pidfd_open(self.pids[rank])
            try:
                waiting = select.poll()
                waiting.register(ended, select.POLLIN)
                assert waiting.poll(timeout_s * 1000), f"rank {rank} goes on\n{self.said()}"
            finally:
                os.close(ended)
            self._statuses[rank] = self._reaped(rank)
        return os.waitstatus_to_exitcode(self._statuses[rank])

    def statuses(self, timeout_s: float = END_TIMEOUT_S) -> list[int]:
        """Exit statuses of all, when they have ended."""
        deadline = time.monotonic() + timeout_s
        return [
            self.status(rank, max(0.0, deadline - time.monotonic())) for rank in range(self.world)
        ]
