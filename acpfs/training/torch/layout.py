"""Which shards this rank holds, and who else holds the same: read off the model and its optimizers, never configured.

A shard is named after its holders: everything that the same ranks hold together is one shard. DDP: one of all ranks in its group.
DTensor: ranks that differ only on dimensions of the mesh that are not sharded. ZeRO: parameters are everywhere, but only the owner has
updated its part when an update is done, so a parameter belongs to the shard of its owner, with its optimizer state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from acpfs.errors import ConfigError
from acpfs.training.messages import Gate, Shard
from acpfs.training.torch.hooks import local_optimizer

Holders = tuple[int, ...]
_SHOWN_MAX = 8
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing add to names, and state dicts leave out."""


@dataclass(frozen=True)
class Layout:
    """What one rank holds."""

    holders: Mapping[Shard, Holders]
    parameters: Mapping[Shard, tuple[str, ...]]
    """Shard → names of the parameters in it."""
    gate: Gate

    @property
    def copies(self) -> int:
        """Of the shard that has the fewest."""
        return min(len(ranks) for ranks in self.holders.values())


def plain_module(model: Any) -> Any:
    """The module whose names a state dict has."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: Any) -> dict[str, Any]:
    """Parameters that are trained, by the names of the state dict."""
    return {plain_name(name): value for name, value in plain_module(model).named_parameters() if value.requires_grad}


def shard_name(holders: Holders) -> Shard:
    """The same for all who hold it, and nobody else's."""
    text = "-".join(map(str, holders))
    short = f"{holders[0]}-to-{holders[-1]}-{zlib.crc32(text.encode()):08x}"
    return "ranks-" + (text if len(holders) <= _SHOWN_MAX else short)


def layout_of(model: Any, optimizers: Sequence[Any]) -> Layout:
    """What this rank holds.

    Raises:
        ConfigError: it cannot be told from the model and the optimizers.
    """
    zero = {id(parameter): optimizer for optimizer in optimizers for parameter in _sharded_by_zero(optimizer)}
    held: dict[Holders, list[str]] = {}
    for name, parameter in named_parameters(model).items():
        ranks = _zero_holders(zero[id(parameter)], parameter) if id(parameter) in zero else _holders(name, parameter, model)
        if dist.get_rank() in ranks:
            held.setdefault(ranks, []).append(name)
    if not held:
        raise ConfigError("this rank trains no parameter: there is nothing that it could save")
    everyone = tuple(range(dist.get_world_size()))
    return Layout(
        {shard_name(ranks): ranks for ranks in held},
        {shard_name(ranks): tuple(names) for ranks, names in held.items()},
        Gate.NONE if held.keys() == {everyone} and not zero else Gate.EXPLICIT,
    )


def everywhere() -> Layout:
    """Every rank holds everything."""
    everyone = tuple(range(dist.get_world_size()))
    return Layout({shard_name(everyone): everyone}, {}, Gate.NONE)


def _holders(name: str, parameter: Any, model: Any) -> Holders:
    if isinstance(parameter, DTensor):
        return _mesh_holders(name, parameter)
    if isinstance(model, DistributedDataParallel):
        return tuple(sorted(dist.get_process_group_ranks(model.process_group)))
    if dist.get_world_size() == 1:
        return (0,)
    raise ConfigError(f"{name} is a plain tensor outside DistributedDataParallel: who else has the same cannot be told")


def _mesh_holders(name: str, parameter: Any) -> Holders:
    """Ranks that differ from this one only where nothing is sharded."""
    mesh, ranks = parameter.device_mesh, parameter.device_mesh.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    for dimension, placement in reversed(list(enumerate(parameter.placements))):
        if placement.is_partial():
            raise ConfigError(f"{name} has a partial placement: it is no state, but a part of a sum")
        if not placement.is_replicate():
            ranks = ranks.select(dimension, coordinate[dimension])
    return tuple(sorted(int(rank) for rank in ranks.flatten().tolist()))


def _sharded_by_zero(optimizer: Any) -> Iterable[Any]:
    if local_optimizer(optimizer) is optimizer:
        return ()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _zero_holders(optimizer: Any, parameter: Any) -> Holders:
    """The owner in each part of the group."""
    owner = optimizer._param_to_rank[parameter]  # noqa: SLF001  # torch offers nothing else that says it
    parts = getattr(optimizer, "parts", None) or [dist.get_process_group_ranks(optimizer.process_group)]
    return tuple(sorted(part[owner] for part in parts))
