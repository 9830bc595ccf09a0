"""A main thread that no error brings out of C: another thread of its process saves in its place."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from acpfs.training import protect
from acpfs.training.guard import Guard
from acpfs.training.interrupt import Charge, Interrupted, Interrupter
from acpfs.training.messages import ExitStatus, Leave, Trouble
from acpfs.training.policy import Policy
from acpfs.training.protection import Protection
from acpfs.training.torch.rank import TorchRank
from acpfs.training.torch.store import LinkStore
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.gasps import (
    DIES,
    STEPS,
    WORLD,
    Fault,
    assert_same_as_without,
    protected,
    yardstick,
)
from tests.training.ranks.jobs import JOBS

STUCK = 0
DEAD = 3
NUMBERS = 8 << 20
"""More than the connection between two ranks takes when one of them reads nothing."""


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def sends_to_the_dead(rank: int) -> None:
    """Rank `DEAD` dies when a send to it is half-way. gloo tells nobody: who waits for that send
    waits for ever.
    """
    numbers = torch.ones(NUMBERS)
    if rank == DEAD:
        receiving = dist.irecv(
            numbers, STUCK
        )  # gloo sends when the other side is ready, and this rank says so before its number
        dist.send(torch.tensor([os.getpid()]), STUCK)
        os.kill(os.getpid(), signal.SIGSTOP)
        receiving.wait()
    elif rank == STUCK:
        pid = torch.zeros(1, dtype=torch.int64)
        dist.recv(pid, DEAD)
        while not stopped(int(pid)):
            pass
        sending = dist.isend(numbers, DEAD)
        os.kill(int(pid), signal.SIGKILL)
        sending.wait()


def trains(
    rank: int,
    kind: str,
    directory: Path,
    store: Path,
    during: Callable[[int], None],
    **settings: Any,
) -> None:
    join_group(rank, WORLD, store)
    job = JOBS[kind]()
    with protect(
        directory, model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, **settings
    ):
        for number in range(1, STEPS + 1):
            if number == DIES:
                during(rank)
            job.step(number)


@pytest.mark.clause("T24")
def test_a_send_that_nobody_will_ever_take(tmp_path: Path, yardsticks: Path) -> None:
    """What it left is the whole state, since nobody else has its shard."""
    expected = yardstick("zero", yardsticks)
    directory = tmp_path / "run"

    def main(rank: int) -> None:
        trains(rank, "zero", directory, tmp_path / "store", sends_to_the_dead, stuck_s=0.1)

    with Ranks(WORLD, tmp_path, main) as ranks:
        for rank in range(WORLD):
            assert ranks.status(rank) == (-signal.SIGKILL if rank == DEAD else ExitStatus.SAVED), (
                ranks.said()
            )
    manifest = assert_same_as_without(Fault("zero", {DEAD: "half-way"}), directory, expected)
    assert manifest.step == DIES - 1


class LeavesAnAddress(LinkStore):
    """A saver's way to the others: it dies when they know where it is, and before it has called
    anybody.
    """

    def set(self, key: str, value: Any) -> None:
        super().set(key, value)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.clause("T160")
def test_a_saver_that_dies_while_the_others_wait_for_its_call(
    tmp_path: Path, yardsticks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no connection to it that could be ended, so nothing brings their threads back."""
    expected = yardstick("tensor", yardsticks)
    directory = tmp_path / "run"

    def main(rank: int) -> None:
        if rank == DEAD:
            monkeypatch.setattr("acpfs.training.torch.rank.LinkStore", LeavesAnAddress)
        protected(rank, Fault("tensor", {0: "updated"}), directory, tmp_path / "store", stuck_s=0.1)

    with Ranks(WORLD, tmp_path, main) as ranks:
        for rank in range(WORLD):
            assert ranks.status(rank) == (
                -signal.SIGKILL if rank in (0, DEAD) else ExitStatus.SAVED
            ), ranks.said()
    manifest = assert_same_as_without(Fault("tensor", {0: "updated"}), directory, expected)
    assert manifest.lost == (0, DEAD)


class Interrupting:
    """A park that is interrupted between two of its lines, where it cannot know: before or behind
    its own loop.
    """

    def __init__(self) -> None:
        self.runs = 0

    def run(self, trouble: Trouble) -> Leave:
        self.runs += 1
        if self.runs == 1:
            raise Interrupted
        return Leave(75, "saved")


@pytest.mark.clause("T48")
def test_an_interrupt_between_two_lines_of_the_handler_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[int]()
    monkeypatch.setattr(
        Protection, "_leave", lambda protection, leave, error: left.append(leave.status)
    )
    protection: Any = Protection(
        tmp_path, cast("TorchRank", SimpleNamespace(guard=Guard())), Policy()
    )
    protection._charge = Charge(
        Interrupter(threading.get_ident(), lambda: False, 3600.0, 3600.0), lambda: None
    )
    protection._park = Interrupting()
    protection._fault(RuntimeError("connection closed"))
    assert left == [75]


def waits_in_a_late_group(rank: int) -> None:
    """A group that nobody knew when protection began: its connections stay, and so do those who
    wait in it.
    """
    late = dist.new_group()
    if rank == DEAD:
        raise ValueError("a bug in one rank")
    dist.barrier(group=late)


@pytest.mark.long  # four processes, for something that the test above has in another way
@pytest.mark.clause("T24")
def test_a_group_that_was_made_after_protection_began(tmp_path: Path, yardsticks: Path) -> None:
    expected = yardstick("ddp", yardsticks)
    directory = tmp_path / "run"

    def main(rank: int) -> None:
        trains(rank, "ddp", directory, tmp_path / "store", waits_in_a_late_group, stuck_s=0.1)

    with Ranks(WORLD, tmp_path, main) as ranks:
        assert ranks.statuses() == [ExitStatus.SAVED] * WORLD, ranks.said()
    assert assert_same_as_without(Fault("ddp", {}), directory, expected).lost == ()
