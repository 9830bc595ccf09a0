"""Which shards this rank holds, and who else holds the same: read off the model and its optimizers,
never configured.

A shard is named after its holders: everything that the same ranks hold together is one shard. DDP:
one of all ranks in its group. DTensor: ranks that differ only on dimensions of the mesh that are
not sharded. ZeRO: parameters are everywhere, but only the owner has updated its part when an update
is done, so a parameter belongs to the shard of its owner, with its optimizer state. What DDP is
told to ignore, such as experts, is in nothing that could be read: `Copies` says it.

A checkpoint knows a parameter by its name. Where ranks that hold different ones call them alike,
one of the two would be lost: refused.
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
from acpfs.training.torch.digest import digest_of
from acpfs.training.torch.hooks import local_optimizer

Holders = tuple[int, ...]
Copies = Mapping[str, Any]
"""Beginning of parameters' names → the group whose ranks have equal ones."""
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


def uncompiled(model: Any) -> Any:
    """The module that `torch.compile` was given; told by its name, as torch._dynamo takes seconds
    to import.
    """
    # torch offers nothing else
    return model._orig_mod if "_orig_mod" in getattr(model, "_modules", ()) else model  # noqa: SLF001


def plain_module(model: Any) -> Any:
    """The module whose names a state dict has."""
    model = uncompiled(model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: Any) -> dict[str, Any]:
    """Parameters that are trained, by the names of the state dict."""
    return {
        plain_name(name): value
        for name, value in plain_module(model).named_parameters()
        if value.requires_grad
    }


def shard_name(holders: Holders) -> Shard:
    """The same for all who hold it, and nobody else's."""
    text = "-".join(map(str, holders))
    short = f"{holders[0]}-to-{holders[-1]}-{zlib.crc32(text.encode()):08x}"
    return "ranks-" + (text if len(holders) <= _SHOWN_MAX else short)


def layout_of(model: Any, optimizers: Sequence[Any], copies: Copies | None = None) -> Layout:
    """What this rank holds. Made by all ranks at the same place; a collective.

    Raises:
        ConfigError: it cannot be told from the model and the optimizers.
    """
    model = uncompiled(model)
    zero = {
        id(parameter): optimizer
        for optimizer in optimizers
        for parameter in _sharded_by_zero(optimizer)
    }
    held: dict[Holders, list[str]] = {}
    places: dict[str, Holders] = {}
    parameters = named_parameters(model)
    for name, parameter in parameters.items():
        is_zero = id(parameter) in zero
        ranks = (
            _zero_holders(zero[id(parameter)], parameter)
            if is_zero
            else holders_of(name, parameter, model, copies or {})
        )
        place = (
            _group_holders(model)
            if is_zero
            else mesh_ranks(parameter)
            if isinstance(parameter, DTensor)
            else ranks
        )
        if dist.get_rank() in place:
            places[name] = place
        if dist.get_rank() in ranks:
            held.setdefault(ranks, []).append(name)
    if not held:
        raise ConfigError("this rank trains no parameter: there is nothing that it could save")
    _refuse_two_of_one_name(parameters, places)
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


def _refuse_two_of_one_name(parameters: Mapping[str, Any], places: Mapping[str, Holders]) -> None:
    """Where ranks differ on who has a name, they have different parameters.

    `places`: name → all who have a part of it.

    But for what the ranks of a tensor-parallel group have equal, each on a mesh of its own: then
    the group has other parameters together, and the numbers are equal.
    """
    claims = _gathered(dict(places))
    told = dict[str, set[Holders]]()
    for name, ranks in ((name, ranks) for claim in claims for name, ranks in claim.items()):
        told.setdefault(name, set()).add(ranks)
    doubtful = sorted(name for name, groups in told.items() if len(groups) > 1)
    if not doubtful:
        return
    together = [set(ranks) for groups in told.values() for ranks in groups]
    digests = _gathered({name: _on_a_mesh(parameters[name]) for name in doubtful if name in places})
    for name in doubtful:
        parts = dict[int, set[str]]()
        for rank, found in enumerate(digests):
            if name in found:
                parts.setdefault(claims[rank][name].index(rank), set()).add(found[name])
        everyone = set[int]().union(*told[name])
        if not any(everyone <= ranks for ranks in together) or any(
            len(found) > 1 or "" in found for found in parts.values()
        ):
            raise ConfigError(
                f"{name} is another parameter in other ranks "
                f"({', '.join(map(str, sorted(told[name])))}): "
                "a checkpoint has one of each name, so call stages and experts by their number "
                "in the whole model"
            )


def _on_a_mesh(parameter: Any) -> str:
    """The numbers here, for what may be one in several groups; nothing for plain tensors, which may
    begin alike and are not one.
    """
    return digest_of({"": parameter}) if isinstance(parameter, DTensor) else ""


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def holders_of(name: str, parameter: Any, model: Any, copies: Copies) -> Holders:
    """Of a parameter that no optimizer shards.

    Raises:
        ConfigError: it cannot be told.
    """
    group = next((group for prefix, group in copies.items() if name.startswith(prefix)), None)
    if group is not None:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    if isinstance(parameter, DTensor):
        return _mesh_holders(name, parameter)
    if isinstance(model, DistributedDataParallel) and name not in model.parameters_to_ignore:
        return _group_holders(model)
    if dist.get_world_size() == 1:
        return (0,)
    raise ConfigError(
        f"{name} is a plain tensor outside DistributedDataParallel: who else has the same cannot "
        "be told; copies= says it"
    )


def _group_holders(model: Any) -> Holders:
    """Of a DistributedDataParallel; everybody, where gradients are reduced in another way."""
    group = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD
    return tuple(sorted(dist.get_process_group_ranks(group)))


def mesh_ranks(parameter: Any) -> Holders:
    """All that have a part of a DTensor, in the order of its mesh."""
    return tuple(int(rank) for rank in parameter.device_mesh.mesh.flatten().tolist())


def _mesh_holders(name: str, parameter: Any) -> Holders:
    """Ranks that differ from this one only where nothing is sharded."""
    mesh = parameter.device_mesh
    ranks = parameter.device_mesh.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    for dimension, placement in reversed(list(enumerate(parameter.placements))):
        if placement.is_partial():
            raise ConfigError(
                f"{name} has a partial placement: it is no state, but a part of a sum"
            )
        if not placement.is_replicate():
            ranks = ranks.select(dimension, coordinate[dimension])
    return tuple(sorted(int(rank) for rank in ranks.flatten().tolist()))


def _sharded_by_zero(optimizer: Any) -> Iterable[Any]:
    if local_optimizer(optimizer) is optimizer:
        return ()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _zero_holders(optimizer: Any, parameter: Any) -> Holders:
    """The owner in each part of the group."""
    # torch offers nothing else that says it
    owner = optimizer._param_to_rank[parameter]  # noqa: SLF001
    parts = getattr(optimizer, "parts", None) or [
        dist.get_process_group_ranks(optimizer.process_group)
    ]
    return tuple(sorted(part[owner] for part in parts))
