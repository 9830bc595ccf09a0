"""Ranks that are replaced: forked from this process, and forked again when they end otherwise than
in order. Real gloo, real SIGKILL.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from acpfs.training import resilient
from acpfs.training.torch.device import DeviceMemoryError
from tests.training.gasp_job import DEADLINE_S
from tests.training.ranks.expert_groups import expert_groups
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.jobs import LAYOUTS, Job, assert_same, fsdp, lone_zero, whole

WORLD = 4
STEPS = 8


def steady(made: Callable[[], Job]) -> Callable[[], Job]:
    """DDP lays its buckets out anew behind a model's first step, so one that was built again sums
    in another order: this one does not.
    """

    def build() -> Job:
        plain = DistributedDataParallel.__init__
        DistributedDataParallel.__init__ = functools.partialmethod(
            plain, find_unused_parameters=True
        )
        try:
            return made()
        finally:
            DistributedDataParallel.__init__ = plain

    return build


KINDS = {
    **LAYOUTS,
    "ddp": steady(LAYOUTS["ddp"]),
    "zero": steady(LAYOUTS["zero"]),
    "expert groups": expert_groups,
    "fsdp": fsdp,
    "lone zero": lone_zero,
}
FORKS_MAX = 40
RANDOM_LOST = "random numbers of this rank are lost with its buddy"


@dataclass(frozen=True)
class Plan:
    """What happens in a job.

    `faults`: (rank, which process of that rank, point, update) → what the rank does there.
    """

    kind: str
    faults: Mapping[tuple[int, int, str, int], Callable[[Job | None], object]] = field(
        default_factory=dict
    )
    snapshot_at: int = 0
    steps: int = STEPS
    device: str = "auto"
    buddy_every: int = 0
    own_at: int = 0
    """At that step the loop writes a checkpoint of its own, which it loads by itself."""
    enter: Callable[[Any], object] = id
    """Called first in each generation, with what a script holds."""


def die(_: Job | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def together(
    directory: Path, acts: Mapping[int, Callable[[Job | None], object]], point: str, number: int
) -> dict[tuple[int, int, str, int], Callable[[Job | None], object]]:
    """Faults of these ranks: none of them begins before all are at the point, or one might be
    stopped for another's fault and never come there.
    """

    def act(rank: int, job: Job | None) -> None:
        (directory / f"there-{rank}").touch()
        while not all((directory / f"there-{other}").exists() for other in acts):
            select.select([], [], [], 0.005)
        acts[rank](job)

    return {(rank, 0, point, number): functools.partial(act, rank) for rank in acts}


def fail(_: Job | None) -> None:
    raise ValueError("a bug that shows once")


def poison(_: Job | None) -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def lose_memory(job: Job | None) -> None:
    """As a device does: what was there may be anything, and it says so."""
    assert job is not None
    for parameter in job.model.parameters():
        state = getattr(job.optimizer, "optim", job.optimizer).state.get(parameter, {})
        for value in (parameter.detach(), *state.values()):
            (value.to_local() if isinstance(value, DTensor) else value).fill_(float("nan"))
    raise DeviceMemoryError("simulated: UCE ERROR")


def save_own(job: Job, directory: Path) -> None:
    """A checkpoint that acpfs knows nothing of. A collective."""
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler.state_dict()}
    checkpoint.save(state, checkpoint_id=directory / "own")


def load_own(job: Job, directory: Path, step: int) -> int:
    """Its step; 0: there is none. A collective."""
    if not (directory / "own" / ".metadata").exists():
        return 0
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler.state_dict()}
    checkpoint.load(state, checkpoint_id=directory / "own")
    set_state_dict(
        job.model, job.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"]
    )
    job.scheduler.load_state_dict(state["scheduler"])
    return step


def train(run: Any, plan: Plan, directory: Path, process: int) -> int:
    """As a script is."""
    rank = run.rank
    number = 0
    made = list[Job]()

    def at(point: str) -> None:
        act = plan.faults.get((rank, process, point, number))
        if act is not None and not (directory / f"done-{rank}-{process}-{point}").exists():
            (directory / f"done-{rank}-{process}-{point}").touch()
            act(made[0] if made else None)

    run.at = at
    plan.enter(run)
    at(f"entering {run.generation}")
    dist.init_process_group("gloo")
    at("built")
    job = KINDS[plan.kind]()
    made.append(job)
    step = run.restore(
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        after_update=job.after_update,
        step=load_own(job, directory, plan.own_at) if plan.own_at else None,
    )
    (directory / f"restored-{rank}-{run.generation}").write_text(str(step))
    for number in range(step + 1, plan.steps + 1):
        job.step(number, at)
        if number == plan.snapshot_at:
            run.snapshot()
        if number == plan.own_at:
            save_own(job, directory)
    found = whole(job)
    torch.save(
        {"random": torch.get_rng_state(), "scheduler": job.scheduler.state_dict()},
        directory / f"host-{rank}.pt",
    )
    if rank == 0:
        torch.save(found, directory / "found.pt")
    return int(step)


def without_fault(rank: int, kind: str, steps: int, directory: Path) -> None:
    join_group(rank, WORLD, directory / f"store-{kind}-{steps}")
    job = KINDS[kind]()
    for number in range(1, steps + 1):
        job.step(number)
    found = whole(job)
    torch.save(
        {"random": torch.get_rng_state(), "scheduler": job.scheduler.state_dict()},
        directory / f"host-{rank}-{kind}-{steps}.pt",
    )
    if rank == 0:
        torch.save(found, directory / f"whole-{kind}-{steps}.pt")


def end_state(kind: str, directory: Path, steps: int = STEPS) -> Path:
    """The yardstick; made once."""
    if not (directory / f"whole-{kind}-{steps}.pt").exists():
        with Ranks(
            WORLD, directory, lambda rank: without_fault(rank, kind, steps, directory)
        ) as ranks:
            assert ranks.statuses() == [0] * WORLD, ranks.said()
    return directory


@dataclass(frozen=True)
class Site:
    """Where ranks run."""

    directory: Callable[[int], Path]
    """What a rank is told to save in."""
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {}
    """Of a rank, beside what a launcher says on one node."""
    enter: Callable[[int], object] = int
    """Called first in a rank's process."""


class Replaced(Ranks):
    """Each rank's processes, one after the other."""

    def __init__(
        self,
        world: int,
        directory: Path,
        main: Callable[[int, int], None],
        environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> None:
        """`main(rank, process)`: `process` counts a rank's, from 0."""
        self.processes = dict.fromkeys(range(world), 0)
        self._environment = environment
        self.forks = 0
        super().__init__(world, directory, lambda rank: self._begin(rank, main))

    def _begin(self, rank: int, main: Callable[[int, int], None]) -> None:
        """In the rank's process, as a launcher would have begun it."""
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "ACPFS_JOB": "job",
            "ACPFS_GENERATION": str(self.processes[rank]),
            **self._environment(rank),
        }
        logging.getLogger("acpfs").addHandler(
            logging.StreamHandler(sys.stderr)
        )  # pytest has all that the root logger gets
        main(rank, self.processes[rank])

    def _fork(self, rank: int) -> int:
        self.forks += 1
        assert self.forks <= FORKS_MAX * self.world, self.said()
        return super()._fork(rank)

    def tend(
        self, turn: Callable[[], object] = lambda: None, timeout_s: float = DEADLINE_S
    ) -> dict[int, int]:
        """Replace who dies until all have ended in order; how many processes each rank had.

        `turn` is called each 20 ms.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._statuses) < self.world:
            assert time.monotonic() < deadline, self.said()
            with self._watched() as waiting:
                waiting.poll(20)
            turn()
            for rank in range(self.world):
                self._look_after(rank)
        assert set(self._statuses.values()) == {0}, self.said()
        return {rank: count + 1 for rank, count in self.processes.items()}

    def _look_after(self, rank: int) -> None:
        if rank in self._statuses:
            return
        if os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        status = self._reaped(rank)
        if os.waitstatus_to_exitcode(status) in (0, 76):
            self._statuses[rank] = status
        else:
            self.processes[rank] += 1
            self.pids[rank] = self._fork(rank)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[select.poll]:
        """Readable when somebody has ended."""
        waiting = select.poll()
        opened = []
        for rank in range(self.world):
            if rank not in self._statuses:
                opened.append(os.pidfd_open(self.pids[rank]))
                waiting.register(opened[-1], select.POLLIN)
        try:
            yield waiting
        finally:
            for descriptor in opened:
                os.close(descriptor)


def run_job(
    plan: Plan,
    tmp_path: Path,
    yardsticks: Path,
    turn: Callable[[Replaced], object] = lambda ranks: None,
    timeout_s: float = DEADLINE_S,
    site: Site | None = None,
) -> dict[int, int]:
    """A job to its end, whose state must be that of one without a fault; how many processes each
    rank had.

    But for the random numbers of a rank that says that they are lost with its buddy. That shows
    only behind a last step: all others begin with a seed of their own.
    """
    expected = end_state(plan.kind, yardsticks, plan.steps)
    where = site or Site(lambda rank: tmp_path / "run")

    def main(rank: int, process: int) -> None:
        where.enter(rank)
        decorate = resilient(
            where.directory(rank), device=plan.device, buddy_every=plan.buddy_every
        )
        decorate(train)(plan, tmp_path, process)

    ranks = Replaced(WORLD, tmp_path, main, where.environment)
    with ranks:
        counts = ranks.tend(lambda: turn(ranks), timeout_s)
    assert_same(
        torch.load(tmp_path / "found.pt", weights_only=True),
        torch.load(expected / f"whole-{plan.kind}-{plan.steps}.pt", weights_only=True),
    )
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"host-{rank}.pt", weights_only=True)
        without = torch.load(
            expected / f"host-{rank}-{plan.kind}-{plan.steps}.pt", weights_only=True
        )
        if RANDOM_LOST in ranks.log(rank).read_text():
            del found["random"], without["random"]
        assert_same(found, without, f"host state of rank {rank}")
    return counts
