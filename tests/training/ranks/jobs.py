"""Small trainings whose every number is known: layouts with copies, and their state at each step without a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from acpfs.training.torch.replicated_zero import ReplicatedZero

WIDTH, BATCH = 16, 4


@dataclass
class Job:
    """What a script has."""

    model: Any
    optimizer: Any
    scheduler: Any
    alike: int = 1
    """So many ranks side by side have the same batch: those of one tensor parallel group."""

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        """Forward, backward, update `number`; random numbers of each rank take part. `at`: called at points by name."""
        torch.manual_seed(1000 * number + dist.get_rank() // self.alike)
        batch = torch.randn(BATCH, WIDTH)
        at("forward")
        loss = (self.model(batch) - batch).square().mean()
        at("backward")
        self.optimizer.zero_grad()
        loss.backward()
        at("reduce")
        self.optimizer.step()
        at("sent_round")
        self.scheduler.step()


class Passage(AbstractContextManager["Passage"]):
    """What `protection.gate()` gives, for the yardstick."""

    values: tuple[float, ...] = ()

    def __exit__(self, *_: object) -> None:
        """Nothing."""


@dataclass
class Clipped(Job):
    """Clips by the norm over all ranks, before the update: a gate that the loop has anyway."""

    gate: Callable[[], AbstractContextManager[Any]] = Passage
    most: float = 0.05
    """Always exceeded, so that an update without clipping is another one."""

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH)
        self.optimizer.zero_grad()
        (self.model(batch) - batch).square().mean().backward()
        at("reduce")
        with self.gate() as passage:
            passage.values = (self._norm(),)
            at("let_through")
        self.clip(passage.values)
        at("clipped")
        self.optimizer.step()
        at("sent_round")
        self.scheduler.step()

    def _norm(self) -> float:
        """Over all ranks, each of which has the reduced gradients: the mean of equal numbers."""
        squares = torch.stack([parameter.grad.square().sum() for parameter in self.model.parameters()]).sum()
        dist.all_reduce(squares)
        return float((squares / dist.get_world_size()).sqrt())

    def clip(self, values: tuple[float, ...]) -> None:
        for parameter in self.model.parameters():
            parameter.grad.mul_(self.most / values[0])


def network() -> Any:
    """With random numbers and averages in its forward pass."""
    torch.manual_seed(7)
    layers = (
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Dropout(0.2),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
    )
    return torch.nn.Sequential(*layers)


def ddp() -> Job:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Job(model, optimizer, decay(optimizer))


def zero() -> Job:
    model = DistributedDataParallel(network())
    optimizer = ReplicatedZero(model.parameters(), torch.optim.Adam, replicas=2, lr=0.01)
    return Job(model, optimizer, decay(optimizer))


def hsdp() -> Job:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Job(model, optimizer, decay(optimizer))


def tensor_parallel() -> Job:
    """Two copies of a model that two ranks have together."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = network()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Job(model, optimizer, decay(optimizer), alike=2)


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def clipped() -> Job:
    plain = zero()
    return Clipped(plain.model, plain.optimizer, plain.scheduler)


JOBS: dict[str, Callable[[], Job]] = {"ddp": ddp, "zero": zero, "hsdp": hsdp}
WITH_OWN_GATE: dict[str, Callable[[], Job]] = {"clipped": clipped}
LAYOUTS: dict[str, Callable[[], Job]] = {**JOBS, "tensor": tensor_parallel}
"""Those whose layout is known; not all of them get out of every collective yet."""


def whole(job: Job) -> dict[str, Any]:
    """Model and optimizer as torch's own functions put them together, on rank 0; a collective."""
    if not hasattr(job.optimizer, "consolidate_state_dict"):
        options = StateDictOptions(full_state_dict=True)
        model, optim = get_state_dict(job.model, job.optimizer, options=options)
        return copy.deepcopy({"model": model, "optim": optim})
    job.optimizer.consolidate_state_dict(0)
    if dist.get_rank() != 0:
        return {}
    names = [name for name, _ in job.model.module.named_parameters()]
    packed = job.optimizer.state_dict()
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]]
    optim = {"state": {names[index]: state for index, state in packed["state"].items()}, "param_groups": groups}
    return copy.deepcopy({"model": job.model.module.state_dict(), "optim": optim})


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert_same(dict(enumerate(found)), dict(enumerate(expected)), where)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where
