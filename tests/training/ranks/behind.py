"""Jobs on the double of a device that runs behind its host, whose ranks are killed at any moment;
and the gates that are wrong.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus
from acpfs.training.torch.progress import Progress
from tests.training.ranks.asynchronous import (
    BACKEND,
    AsynchronousAdam,
    DeviceMemory,
    Event,
    Stream,
    install,
)
from tests.training.ranks.forked import Ranks
from tests.training.ranks.gasps import STEPS, WORLD, Fault, assert_is_its_step, state_of, train_job
from tests.training.ranks.jobs import BATCH, WIDTH, Job, decay, network

LAG_S = 0.0005
MOMENT_S = 0.05
"""A rank is killed so long after a point at most; a step takes about a third of it."""
POINTS = ("forward", "backward", "reduce", "ready", "gated", "updating", "updated", "sent_round")


@dataclass
class Behind(Job):
    """A loop as on a device, but that it waits where a device's stream would have order."""

    stream: Stream = field(kw_only=True)

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH)
        at("forward")
        self.stream.synchronize()  # the update is before the forward pass
        loss = (self.model(batch) - batch).square().mean()
        at("backward")
        self.optimizer.zero_grad()
        loss.backward()
        at("reduce")
        self.optimizer.step()
        at("sent_round")
        self.scheduler.step()


def ddp(stream: Stream) -> Behind:
    # without views the reducer copies on the host, before the device has reduced anything
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    optimizer = AsynchronousAdam(model.parameters(), stream, lr=0.01)
    return Behind(model, optimizer, decay(optimizer), stream=stream)


def hsdp(stream: Stream) -> Behind:
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh)
    optimizer = AsynchronousAdam(model.parameters(), stream, lr=0.01)
    return Behind(model, optimizer, decay(optimizer), stream=stream)


LAYOUTS: dict[str, Callable[[Stream], Behind]] = {"ddp": ddp, "hsdp": hsdp}


# -- gates that are wrong: each is put into a rank in place of the right one


def _none(progress: Progress, step: int) -> None:
    """The update is queued behind the reduction, as loops do."""


def _flag_not_looked_at(progress: Progress, step: int) -> None:
    """Whatever brought the event."""
    event: Any = progress.device.record()
    event.synchronize()


EARLY: list[Event] = []
"""Recorded before a backward pass."""


def _event_too_early(progress: Progress, step: int) -> None:
    """It was recorded before the backward pass."""
    EARLY[-1].synchronize()


WRONG: dict[str, Callable[[Progress, int], None]] = {
    "none": _none,
    "flag not looked at": _flag_not_looked_at,
    "event too early": _event_too_early,
}


@dataclass(frozen=True)
class Moment(Fault):
    """The rank is killed some time after a point of an update, wherever it is then."""

    number: int = 0
    delay_s: float = 0.0
    gate: str = ""
    """Which one is wrong; empty: none."""

    def reached(self, rank: int, point: str, number: int) -> None:
        if self.ranks.get(rank) == point and number == self.number:
            kill = (os.getpid(), signal.SIGKILL)
            threading.Timer(self.delay_s, os.kill, kill).start()


@dataclass(frozen=True)
class Fails(Moment):
    """Rank 2's device fails, in update 5."""

    never: bool = False
    """Whether it does not answer any more; else it says so, and no memory of it can be read."""

    def at_work(self, rank: int, number: int, stream: Stream, memory: DeviceMemory) -> None:
        if (rank, number) != (2, self.number):
            return
        if self.never:
            stream.launch(threading.Event().wait)
            return
        stream.is_broken = True
        memory.lose()


@dataclass
class Failing(Behind):
    """A loop whose device fails behind the backward pass."""

    fault: Fails = field(kw_only=True)
    memory: DeviceMemory = field(kw_only=True)

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        def reached(point: str) -> None:
            if point == "reduce":
                self.fault.at_work(dist.get_rank(), number, self.stream, self.memory)
            at(point)

        super().step(number, reached)


def drawn(kind: str, chance: random.Random, gate: str = "", first: int = 3) -> Moment:
    """`first`: the update from which on; in DDP's first two the host reads what the device sends
    round, and a rank may end by that, which is one more fault.
    """
    return Moment(
        kind,
        {chance.randrange(WORLD): chance.choice(POINTS)},
        number=chance.randrange(first, STEPS),
        delay_s=chance.random() * MOMENT_S,
        gate=gate,
    )


def joined(rank: int, directory: Path) -> Stream:
    """Begin as a rank on a device of its own."""
    stream = Stream(LAG_S)
    install(stream, directory)
    store = dist.FileStore(str(directory / "store"), WORLD)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=WORLD)
    return stream


def protected(rank: int, fault: Moment, directory: Path, **settings: Any) -> None:
    """A rank that was forked. `settings`: of `protect`."""
    stream = joined(rank, directory)
    job = LAYOUTS[fault.kind](stream)
    if isinstance(fault, Fails):
        job = Failing(
            *(job.model, job.optimizer, job.scheduler),
            stream=stream,
            fault=fault,
            memory=DeviceMemory(job.model),
        )
    if fault.gate:
        setattr(Progress, "gradients", WRONG[fault.gate])  # noqa: B010  # to mypy it never changes
        job.model.register_forward_hook(lambda *_: EARLY.append(stream.record()))
        # on a machine that is busy the exception would come before the wrong gate is passed
        settings["interrupt_after_s"] = 5.0
    train_job(rank, job, fault, directory / "run", **settings)
    stream.synchronize()


# -- the yardstick


def without_fault(rank: int, kind: str, directory: Path) -> None:
    """State at the end of each step, put together over gloo."""
    stream = joined(rank, directory)
    group = dist.new_group(backend="gloo")
    job = LAYOUTS[kind](stream)
    for number in range(1, STEPS + 1):
        job.step(number)
        stream.synchronize()
        torch.save(state_of(job), directory / f"{kind}-{number}-{rank}.pt")
        model, optim = get_state_dict(job.model, job.optimizer)
        checkpoint.save(
            {"model": model, "optim": optim},
            checkpoint_id=directory / f"{kind}-{number}",
            process_group=group,
        )
        if rank == 0:
            dcp_to_torch_save(directory / f"{kind}-{number}", directory / f"{kind}-{number}.pt")


def yardstick(kind: str, directory: Path) -> Path:
    """Where it is; made once."""
    found = directory / f"behind-{kind}"
    if not (found / f"{kind}-{STEPS}.pt").exists():
        found.mkdir()
        with Ranks(WORLD, found, lambda rank: without_fault(rank, kind, found)) as ranks:
            assert ranks.statuses(600) == [0] * WORLD, ranks.said()
    return found


def verdict(fault: Moment, directory: Path, yardsticks: Path, **settings: Any) -> str:
    """What a job with this fault leaves: "right", "corrupted", "too late", or that nothing was
    left. `settings`: of `protect`.
    """
    expected = yardstick(fault.kind, yardsticks)
    with Ranks(
        WORLD, directory, lambda rank: protected(rank, fault, directory, **settings)
    ) as ranks:
        statuses = ranks.statuses()
        said = ranks.said()
    if all(status == 0 for rank, status in enumerate(statuses) if rank not in fault.ranks):
        return "too late"
    latest = directory / "run" / "latest"
    if not latest.exists():
        return f"nothing was left: {statuses}\n{said}"
    manifest = verify(directory / "run" / latest.read_text().strip())
    try:
        for rank, status in enumerate(statuses):
            lost = isinstance(fault, Fails) and rank == 2
            assert status in (
                ({-signal.SIGKILL, ExitStatus.SAVED} if rank in fault.ranks else set())
                | {ExitStatus.TAKEN_FOR_LOST if lost else ExitStatus.SAVED}
            ), said
        assert_is_its_step(fault.kind, directory / "run", expected)
    except AssertionError as error:
        return f"corrupted at step {manifest.step}, {fault}, {statuses}: {str(error)[:2000]}"
    # at most the update of the fault is lost, or what was launched while the timer ran
    return "right"
