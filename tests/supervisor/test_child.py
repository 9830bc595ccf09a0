"""What the supervisor says to a worker, without either of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from acpfs.supervisor.child import Child

PROCESS = """
import signal
signals = {signal.SIGHUP, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
while True:
    print(signal.Signals(signal.sigwait(signals)).name, flush=True)
"""


@contextmanager
def child() -> Iterator[tuple[Child, IO[str]]]:
    """One whose process says which signals it gets; several at once in the order of their numbers."""
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        subprocess.Popen(
            [sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        made = Child(ours)
        made.pid, made.pidfd = process.pid, os.pidfd_open(process.pid)
        try:
            assert process.stdout.readline() == "ready\n"
            yield made, process.stdout
        finally:
            os.close(made.pidfd)
            process.kill()


def test_a_log_that_was_rotated_while_it_starts_is_opened_again_when_it_serves() -> None:
    with child() as (worker, said):
        worker.kill(signal.SIGHUP)
        worker.kill(signal.SIGUSR1)
        assert said.readline() == "SIGUSR1\n", "it would have died of the other one"
        worker.heard({"serving": "/mnt"})
        assert said.readline() == "SIGHUP\n"


def test_one_that_serves_is_told_at_once_and_one_that_was_told_nothing_never() -> None:
    with child() as (worker, said):
        worker.heard({"serving": "/mnt"})
        worker.kill(signal.SIGUSR1)
        assert said.readline() == "SIGUSR1\n"
        worker.kill(signal.SIGHUP)
        assert said.readline() == "SIGHUP\n"
