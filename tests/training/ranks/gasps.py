"""A job whose ranks are killed at points by name, and what its gasp is compared with: the same job
without a fault, step by step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from acpfs.training import protect
from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus, Manifest
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.jobs import (
    JOBS,
    WITH_OWN_GATE,
    Clipped,
    Job,
    assert_same,
    fsdp,
    lone_zero,
    whole,
)

WORLD = 4
STEPS = 8
DIES = 5
"""Ranks, updates of the whole loop, and the update at which somebody dies."""
KINDS = {**JOBS, **WITH_OWN_GATE, "fsdp": fsdp, "lone zero": lone_zero}


@dataclass(frozen=True)
class Fault:
    """`ranks`: rank → point at which it kills itself, in update `DIES` where the point is one of an
    update.
    """

    kind: str
    ranks: Mapping[int, str]
    shut_out: Mapping[int, str] = field(default_factory=dict)
    """Rank → point at which its collective fails, though the others' has not."""
    last: Callable[[], object] = int
    """What a rank does before it kills itself."""

    def reached(self, rank: int, point: str, number: int) -> None:
        """A rank is at a point of update `number`."""
        if self.shut_out.get(rank) == point and number >= DIES:
            raise RuntimeError("Connection closed by peer")
        if self.ranks.get(rank) == point and number >= DIES:
            self.last()
            os.kill(os.getpid(), signal.SIGKILL)


def protected(rank: int, fault: Fault, directory: Path, store: Path, **settings: Any) -> None:
    """A rank that was forked. `settings`: of `protect`."""
    join_group(rank, WORLD, store)
    train(rank, fault, directory, **settings)


def train(rank: int, fault: Fault, directory: Path, **settings: Any) -> None:
    """A rank as a script is: three lines more. `settings`: of `protect`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    train_job(rank, KINDS[fault.kind](), fault, directory, **settings)


def train_job(
    rank: int, job: Job, fault: Fault, directory: Path, steps: int = STEPS, **settings: Any
) -> None:
    """The same with a job that is made."""
    if isinstance(job, Clipped):
        settings["gate"] = job.clip
    protection = protect(
        directory,
        model=job.model,
        optimizer=job.optimizers,
        scheduler=job.scheduler,
        copies=job.copies,
        after_update=job.after_update,
        **settings,
    )
    if isinstance(job, Clipped):
        job.gate = protection.gate
    job.operation = protection.long_operation
    number = 0

    def at(point: str) -> None:
        fault.reached(rank, point, number)

    with protection:
        protection.at(at)
        for number in range(1, steps + 1):  # `at` looks at it
            job.step(number, at)


def state_of(job: Job) -> dict[str, Any]:
    return {"random": torch.get_rng_state(), "scheduler": job.scheduler.state_dict()}


def without_fault(rank: int, kind: str, directory: Path) -> None:
    """The yardstick: state at the end of each step that a gasp may be of."""
    join_group(rank, WORLD, directory / f"store-{kind}")
    job = KINDS[kind]()
    for number in range(1, DIES + 1):
        job.step(number)
        torch.save(state_of(job), directory / f"{kind}-{number}-{rank}.pt")
        found = whole(job)
        if rank == 0:
            torch.save(found, directory / f"{kind}-{number}.pt")


def yardstick(kind: str, directory: Path) -> Path:
    """Where it is; made once."""
    if not (directory / f"{kind}-{DIES}.pt").exists():
        with Ranks(WORLD, directory, lambda rank: without_fault(rank, kind, directory)) as ranks:
            assert ranks.statuses(600) == [0] * WORLD, ranks.said()
    return directory


def assert_gasp(fault: Fault, ranks: Ranks, directory: Path, yardsticks: Path) -> Manifest:
    """All survivors have left, and what they left is the state at its step, bit for bit."""
    for rank in range(WORLD):
        assert ranks.status(rank) == (
            -signal.SIGKILL if rank in fault.ranks else ExitStatus.SAVED
        ), ranks.said()
    return assert_same_as_without(fault, directory, yardsticks)


def assert_same_as_without(fault: Fault, directory: Path, yardsticks: Path) -> Manifest:
    """Bit for bit."""
    manifest = verify(directory / (directory / "latest").read_text().strip())
    assert manifest.step in (DIES - 1, DIES)
    return assert_is_its_step(fault.kind, directory, yardsticks)


def assert_is_its_step(kind: str, directory: Path, yardsticks: Path) -> Manifest:
    """What was left is what a job of this kind has at that step without a fault, bit for bit."""
    name = (directory / "latest").read_text().strip()
    manifest = verify(directory / name)
    assert name == f"step-{manifest.step}"
    assert not manifest.differing
    path = yardsticks / f"found-{name}.pt"
    dcp_to_torch_save(directory / name, path)
    found = torch.load(path, weights_only=True)
    expected = torch.load(yardsticks / f"{kind}-{manifest.step}.pt", weights_only=True)
    for state in (found, expected):  # of ranks with different parameters any may name its own first
        for group in state["optim"]["param_groups"]:
            group["params"].sort()
    assert_same(found, expected)
    for saver in set(manifest.cover.values()):
        host = torch.load(directory / name / "host_state" / f"rank-{saver}.pt", weights_only=True)
        own = torch.load(yardsticks / f"{kind}-{manifest.step}-{saver}.pt", weights_only=True)
        assert host["step"] == manifest.step
        assert_same({"random": host["torch"]["cpu"], "scheduler": host["scheduler"]}, own)
    return manifest
