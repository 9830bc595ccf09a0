"""Small trainings whose every number is known: layouts with copies, and their state at each step
without a fault.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from acpfs.training.torch.replicated_zero import ReplicatedZero

WIDTH = 16
BATCH = 4


@dataclass
class Job:
    """What a script has."""

    model: Any
    optimizer: Any
    scheduler: Any
    alike: int = 1
    """So many ranks side by side have the same batch: those of one tensor parallel group."""
    copies: Any = None
    """What `protect` is told of parameters that are in nothing that says who has them."""
    after_update: Callable[[], None] | None = None
    """What follows an update, where that is more than the scheduler's step."""
    operation: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What an evaluation is in."""

    @property
    def optimizers(self) -> list[Any]:
        return [self.optimizer]

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        """Forward, backward, update `number`; random numbers of each rank take part.

        `at`: called at points by name.
        """
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
        squares = torch.stack(
            [parameter.grad.square().sum() for parameter in self.model.parameters()]
        ).sum()
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
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    model = network()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Job(model, optimizer, decay(optimizer))


def fsdp() -> Job:
    """Nobody has what another rank has."""
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Job(model, optimizer, decay(optimizer))


def lone_zero() -> Job:
    """The same of an optimizer's state."""
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return Job(model, optimizer, decay(optimizer))


def tensor_parallel() -> Job:
    """Two copies of a model that two ranks have together."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = network()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Job(model, optimizer, decay(optimizer), alike=2)


@dataclass
class WithExperts(Job):
    """Two groups of experts: each token goes to one of two experts, which live in two ranks that
    exchange tokens.

    Experts have an optimizer of their own, and one data parallel group each, beside that of
    everything else.
    """

    experts: Any = None
    """Their optimizer."""
    reduce: Callable[[], object] = int
    """Gradients of experts over those who have the same ones."""

    @property
    def optimizers(self) -> list[Any]:
        return [self.optimizer, self.experts]

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH)
        at("forward")
        loss = (self.model(batch) - batch).square().mean()
        at("backward")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        self.reduce()
        at("reduce")
        self.optimizer.step()
        at("between")
        self.experts.step()
        at("sent_round")
        self.scheduler.step()


class Expert(torch.nn.Module):  # type: ignore[misc]  # torch is not there where types are checked
    """The one of this rank, of one or all of the experts."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, tokens: Any) -> Any:
        weight = self.weight.to_local()[0] if isinstance(self.weight, DTensor) else self.weight
        return torch.tanh(tokens @ weight)


class Experts(torch.nn.Module):  # type: ignore[misc]
    """One expert per rank of `group`; the half of the tokens that a router likes best goes to the
    second one.
    """

    def __init__(self, group: Any, name: str, weight: Any) -> None:
        super().__init__()
        self.group = group
        self.name = name
        self.router = torch.nn.Linear(WIDTH, 1)
        self.experts = torch.nn.ModuleDict({name: Expert(weight)})

    def forward(self, tokens: Any) -> Any:
        liked = self.router(tokens)
        order = liked[:, 0].argsort()
        there = _exchanged(tokens[order], self.group)
        back = _exchanged(self.experts[self.name](there), self.group)
        found = torch.empty_like(back)
        found[order] = back
        return found * torch.sigmoid(liked)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, values: Any, group: Any) -> Any:
        context.group = group
        found = torch.empty_like(values)
        dist.all_to_all_single(found, values.contiguous(), group=group)
        return found

    @staticmethod
    def backward(context: Any, gradients: Any) -> Any:
        return _Exchange.apply(gradients, context.group), None


def _exchanged(values: Any, group: Any) -> Any:
    """Halves of the tokens to either rank of the group, and back."""
    return _Exchange.apply(values, group)


def experts_plain() -> WithExperts:
    """Experts are plain tensors that DDP ignores; the loop reduces their gradients itself."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    exchange = groups[rank // 2]
    copies = groups[2 + rank % 2]
    torch.manual_seed(7)
    weights = torch.randn(2, WIDTH, WIDTH)
    layer = Experts(exchange, f"number-{rank % 2}", weights[rank % 2].clone())
    model = torch.nn.Sequential(network(), layer, torch.nn.Linear(WIDTH, WIDTH))
    (ignored,) = (name for name, _ in model.named_parameters() if ".experts." in name)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [ignored])
    mine = model.get_parameter(ignored)

    def reduce() -> None:
        dist.all_reduce(mine.grad, group=copies)
        mine.grad.div_(dist.get_world_size())

    dense = torch.optim.Adam([value for value in model.parameters() if value is not mine], lr=0.01)
    return WithExperts(
        *(DistributedDataParallel(model), dense, decay(dense)),
        copies={"1.experts.": copies},
        experts=torch.optim.AdamW([mine], lr=0.02),
        reduce=reduce,
    )


def experts_on_meshes() -> WithExperts:
    """Everything but experts is sharded over two ranks and has two copies; each expert is whole in
    two ranks.
    """
    dense_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "expert"))
    torch.manual_seed(7)
    weights = distribute_tensor(torch.randn(2, WIDTH, WIDTH), mesh["expert"], [Shard(0)])
    layer = Experts(mesh["expert"].get_group(), "all", weights)
    model = torch.nn.Sequential(network(), layer, torch.nn.Linear(WIDTH, WIDTH))
    fully_shard(layer.experts["all"], mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=dense_mesh)
    mine = layer.experts["all"].weight
    dense = torch.optim.Adam([value for value in model.parameters() if value is not mine], lr=0.01)
    return WithExperts(model, dense, decay(dense), experts=torch.optim.AdamW([mine], lr=0.02))


@dataclass
class Stage(Job):
    """One of two pipeline stages, each of which has two ranks: a batch goes through both, and its
    gradient back.
    """

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        rank = dist.get_rank()
        torch.manual_seed(1000 * number + rank // 2)
        batch = torch.randn(BATCH, WIDTH)
        between = torch.empty(BATCH, WIDTH)
        at("forward")
        self.optimizer.zero_grad()
        if rank % 2:
            dist.recv(between, rank - 1)
            loss = (self.model(between.requires_grad_()) - batch).square().mean()
            at("backward")
            loss.backward()
            dist.send(between.grad, rank - 1)
        else:
            found = self.model(batch)
            dist.send(found.detach(), rank + 1)
            at("backward")
            dist.recv(between, rank + 1)
            found.backward(between)
        at("reduce")
        self.optimizer.step()
        at("sent_round")
        self.scheduler.step()


def stages() -> Stage:
    """Modules are called by their number in the whole model."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    layers = list(network())
    mine = layers[3:] if rank % 2 else layers[:3]
    named = {str(number + 3 * (rank % 2)): layer for number, layer in enumerate(mine)}
    model = DistributedDataParallel(
        torch.nn.Sequential(OrderedDict(named)), process_group=groups[rank % 2]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Stage(model, optimizer, decay(optimizer))


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def clipped() -> Job:
    plain = zero()
    return Clipped(plain.model, plain.optimizer, plain.scheduler)


LAYOUTS: dict[str, Callable[[], Job]] = {
    "ddp": ddp,
    "zero": zero,
    "hsdp": hsdp,
    "tensor": tensor_parallel,
}
"""All ranks do the same with all parameters."""
JOBS: dict[str, Callable[[], Job]] = {
    **LAYOUTS,
    "experts": experts_plain,
    "experts on meshes": experts_on_meshes,
    "stages": stages,
}
WITH_OWN_GATE: dict[str, Callable[[], Job]] = {"clipped": clipped}


def whole(job: Job) -> dict[str, Any]:
    """Model and optimizer as torch's own functions put them together, on rank 0; a collective."""
    if not hasattr(job.optimizer, "consolidate_state_dict"):
        options = StateDictOptions(full_state_dict=True)
        model, optim = get_state_dict(job.model, job.optimizers, options=options)
        return _together({"model": model, "optim": optim})
    job.optimizer.consolidate_state_dict(0)
    if dist.get_rank() != 0:
        return {}
    names = [name for name, _ in job.model.module.named_parameters()]
    packed = job.optimizer.state_dict()
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in packed["param_groups"]
    ]
    optim = {
        "state": {names[index]: state for index, state in packed["state"].items()},
        "param_groups": groups,
    }
    return copy.deepcopy({"model": job.model.module.state_dict(), "optim": optim})


def _together(own: dict[str, Any]) -> dict[str, Any]:
    """What ranks have that hold different parameters."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    merged = copy.deepcopy(own)
    for other in found:
        merged["model"] |= other["model"]
        merged["optim"]["state"] |= other["optim"]["state"]
        for group, more in zip(
            merged["optim"]["param_groups"], other["optim"]["param_groups"], strict=True
        ):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    return merged


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
