"""What the supervisor says to a worker, without either of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from acpfs.supervisor import channel
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
    """One whose process says which signals it gets; several at once in the order of their
    numbers.
    """
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
        made.pid = process.pid
        made.pidfd = os.pidfd_open(process.pid)
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


@pytest.mark.clause("S445")
def test_an_order_that_finds_the_channel_full_is_kept_until_there_is_room() -> None:
    """A worker that was stopped for a while: told again to end at once, it drained on to the
    deadline.
    """
    ours, theirs = channel.pair()
    with ours, theirs:
        told = Child(ours)
        with contextlib.suppress(BlockingIOError):
            while True:
                channel.send(ours, {"filled": True}, wait=False)
        told.send({"hurry": True})
        told.send({"fd": 1}, [ours.fileno()])
        later: list[tuple[channel.Message, list[int]]] = []
        while len(later) < 2:
            message, fds = channel.receive(theirs)
            told.send_waiting()
            if message is not None and "filled" not in message:
                later.append((message, fds))
        assert [message for message, _fds in later] == [{"hurry": True}, {"fd": 1}]
        assert [len(fds) for _message, fds in later] == [0, 1]
        os.close(later[1][1][0])
        told.let_go()


@pytest.mark.clause("S445")
def test_what_a_process_was_to_be_sent_is_sent_when_it_can_be_watched() -> None:
    """There was no descriptor for that when its number was known."""
    with child() as (worker, said):
        worker.heard({"serving": "/mnt"})
        pidfd = worker.pidfd
        worker.pidfd = -1
        worker.kill(signal.SIGUSR1)
        worker.watched(pidfd)
        assert said.readline() == "SIGUSR1\n"
