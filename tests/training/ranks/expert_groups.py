"""A job with a data parallel group of all ranks, and one for each of two experts; everything of it
is a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.training.ranks.jobs import BATCH, WIDTH, Job, decay


# torch is Any where types are checked
class Gathered(torch.autograd.Function):  # type: ignore[misc]
    """Tokens of all ranks of a group."""

    @staticmethod
    def forward(context: Any, tokens: Any, group: Any) -> Any:
        context.group = group
        context.count = len(tokens)
        found = [torch.empty_like(tokens) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, tokens.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        total = gradient.clone()
        dist.all_reduce(total, group=context.group)
        return total[dist.get_rank(context.group) * context.count :][: context.count], None


class Summed(torch.autograd.Function):  # type: ignore[misc]  # the same
    """Over a group, forward and backward."""

    @staticmethod
    def forward(context: Any, values: Any, group: Any) -> Any:
        context.group = group
        return Summed._sum(values, group)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return Summed._sum(gradient, context.group), None

    @staticmethod
    def _sum(values: Any, group: Any) -> Any:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total


class Expert(torch.nn.Module):  # type: ignore[misc]  # the same
    """One of two, each in two ranks: it has every second token of the two ranks that have both
    experts together.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self._group = mesh["expert"].get_group()
        self._place = mesh["expert"].get_local_rank()
        torch.manual_seed(9)
        self.weight = torch.nn.Parameter(
            distribute_tensor(torch.randn(2, WIDTH, WIDTH) / WIDTH, mesh, [Replicate(), Shard(0)])
        )

    def forward(self, tokens: Any) -> Any:
        every = Gathered.apply(tokens, self._group)
        out = torch.zeros_like(every)
        out[self._place :: 2] = every[self._place :: 2] @ self.weight.to_local()[0]
        return Summed.apply(out, self._group)[self._place * len(tokens) :][: len(tokens)]


class Dense(torch.nn.Module):  # type: ignore[misc]  # the same
    """In all ranks."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.weight = torch.nn.Parameter(
            distribute_tensor(torch.randn(WIDTH, WIDTH) / WIDTH, mesh, [Replicate(), Replicate()])
        )

    def forward(self, tokens: Any) -> Any:
        return torch.tanh(tokens @ self.weight.to_local())


def is_expert(parameter: Any) -> bool:
    return any(placement.is_shard() for placement in parameter.placements)


def reduce(model: Any) -> None:
    """Gradients of dense parameters over all ranks, those of an expert over the ranks that have
    it.
    """
    for parameter in model.parameters():
        dist.all_reduce(
            parameter.grad.to_local(),
            group=parameter.device_mesh["replicate"].get_group() if is_expert(parameter) else None,
        )


class Mixture(Job):
    """Its loop reduces gradients by itself."""

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH)
        at("forward")
        loss = (self.model(batch) - batch).square().mean()
        at("backward")
        self.optimizer.zero_grad()
        loss.backward()
        reduce(self.model)
        at("reduce")
        self.optimizer.step()
        at("sent_round")
        self.scheduler.step()


def mixture(mesh: Any) -> Any:
    """`mesh`: its dimensions are `replicate` and `expert`, of two ranks each."""
    return torch.nn.Sequential(Dense(mesh), torch.nn.Dropout(0.2), Expert(mesh), Dense(mesh))


def expert_groups() -> Job:
    model = mixture(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert")))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Mixture(model, optimizer, decay(optimizer))
