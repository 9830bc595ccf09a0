"""Megatron-Core: `protect_megatron` for its distributed optimizer with several instances, each of which has a copy of every shard.

A shard is what one rank of an instance updates: a range of each buffer of its model-parallel part. The norm that gradients are clipped
with is reduced inside an instance, so it is no gate between instances; there is an explicit one, which the inner optimizer's hook passes
when gradients are clipped. The update is complete when the inner optimizer's is: what Megatron does afterwards, casting to the model's
precision and gathering parameters inside the instance, is done again by those who save.

A gasp is written by Megatron's own `dist_checkpointing`, in its format `dp_reshardable`, in which every rank writes its own shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from acpfs.errors import ConfigError
from acpfs.training.host_state import HostState
from acpfs.training.manifest import saved_file
from acpfs.training.messages import Gate, Save, SavedFile, Shard
from acpfs.training.policy import Policy
from acpfs.training.protection import Protection
from acpfs.training.torch.folding import fold
from acpfs.training.torch.layout import Layout, shard_name
from acpfs.training.torch.local_state import digest_of
from acpfs.training.torch.rank import TorchRank
from acpfs.training.torch.writers import write_host_state

METADATA = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
"""What Megatron's loader asks a checkpoint for."""
NAMING = {"name": "iter_{step:07d}", "tracker": "latest_checkpointed_iteration.txt", "tracker_text": "{step}"}
CHECKPOINT_VERSION = 3.0
Common = Callable[[int], Mapping[str, Any]]


def protect_megatron(
    directory: str | os.PathLike[str],
    *,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any = None,
    increment: int = 1,
    step: int = 0,
    after_update: Callable[[], None] | None = None,
    common: Common | None = None,
    on_stopped: Callable[[], None] | None = None,
    on_settled: Callable[[int], None] | None = None,
    on_saved: Callable[[Path], None] | None = None,
    policy: Policy | None = None,
    **settings: object,
) -> Protection:
    """Protection of this rank's state: called by all ranks, when model and optimizer are made.

    Args:
        directory: Megatron's `--save`; gasps are `iter_N` there.
        model: the chunks, as they are trained: Megatron's `DistributedDataParallel`.
        optimizer: what `get_megatron_optimizer` gave.
        scheduler: the `OptimizerParamScheduler`, if there is one.
        increment: what the loop steps it by after each update.
        step: iterations that were completed before.
        after_update: what the loop does from an update to the end of its step, where it is more than the scheduler's step.
        common: `common(step)` gives further entries of the checkpoint, the same in all ranks: `args` and whatever else its loader wants.
        on_stopped: as for `protect`, and so are those below.
        on_settled: see there.
        on_saved: see there.
        policy: see there.
        settings: see there.

    Raises:
        ConfigError: something that cannot be protected.
    """
    held = MegatronShards(model, optimizer, scheduler, common or (lambda _: {}))
    if scheduler is not None and after_update is None:

        def after_update() -> None:
            scheduler.step(increment=increment)

    policy = policy or Policy.from_environment(None, **{**NAMING, **settings})
    inner = [held.optimizer.optimizer]
    schedulers = [] if scheduler is None else [Schedule(scheduler)]
    rank = TorchRank(None, inner, policy, step, schedulers=schedulers, after_update=after_update, held=held)
    return Protection(Path(directory), rank, policy, on_stopped, on_settled, on_saved)


class Schedule:
    """An `OptimizerParamScheduler` whose state can be given back: Megatron's own adds what it loads to where it is."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.num_steps = 0
        self._scheduler.load_state_dict(state)

    def step(self) -> None:
        """Never called: what follows an update is given."""


def only_distributed(optimizer: Any) -> Any:
    """The one `DistributedOptimizer` that all of an update is.

    Raises:
        ConfigError: it is something else.
    """
    found = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(found) != 1:
        raise ConfigError("several of Megatron's optimizers (experts, or parameters gathered between two): they communicate in one update")
    (one,) = found
    if not isinstance(one, DistributedOptimizer) or one.is_stub_optimizer or one.ddp_config.use_megatron_fsdp:
        raise ConfigError(f"{type(one).__name__}: only --use-distributed-optimizer is protected here, with trained parameters in each rank")
    if one.grad_scaler is not None:
        raise ConfigError("fp16 with a loss scaler is not protected here: bf16 needs none")
    if one.ddp_config.num_distributed_optimizer_instances < 2:
        raise ConfigError("one instance of the distributed optimizer has no copies: --num-distributed-optimizer-instances 2")
    return one


class MegatronShards:
    """This rank's shard, what it is called and who else has it. Made by all ranks at the same place; one collective."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any, common: Common) -> None:
        self.optimizer = only_distributed(optimizer)
        self.whole, self.chunks, self.scheduler, self.common = optimizer, chunks, scheduler, common
        group = self.optimizer.data_parallel_group
        self.model_part, self.part = int(self.optimizer.data_parallel_group_idx), int(group.rank())
        self.parts_count = int(group.size())
        self.places: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        """Model-parallel part and part of the instance, by rank."""
        dist.all_gather_object(self.places, (self.model_part, self.part))
        mine = tuple(rank for rank, place in enumerate(self.places) if place == (self.model_part, self.part))
        self.layout = Layout({shard_name(mine): mine}, {}, Gate.EXPLICIT)
        self.buffers: dict[str, Any] = {}
        for number, chunk in enumerate(chunks):
            kept = chunk.module.state_dict().keys()
            self.buffers |= {f"{number}.{name}": value for name, value in chunk.module.named_buffers() if name in kept}

    def digest(self, shard: Shard) -> str:
        """Over main parameters and moments."""
        return digest_of(dict(self.main_state()))

    def main_state(self) -> Iterator[tuple[str, Any]]:
        """Main parameters and the optimizer's state of this rank's ranges, by name."""
        number = 0
        for buffer in self.optimizer.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter in bucket["param_map"]:
                        found = self.optimizer._get_main_param_and_optimizer_states(parameter)  # noqa: SLF001  # nothing else gives them
                        yield from ((f"{number:06}.{key}", value) for key, value in found.items())
                        number += 1

    def cast(self) -> None:
        """Main parameters into the model's, in this rank's ranges: a fault may have come between the update and that."""
        self.optimizer._copy_main_params_to_model_params()  # noqa: SLF001  # part of every update of Megatron's

    def parameters(self, part: int) -> list[Any]:
        """The flat ranges of the model's parameters that a part of the instance updates."""
        found = []
        for buffer in self.optimizer.buffers:
            for bucket in buffer.buckets:
                size = bucket.param_data.numel() // self.parts_count
                found.append(bucket.param_data.view(-1)[part * size : (part + 1) * size])
        return found

    def sharded(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What Megatron's checkpoint has of model and optimizer; asks Megatron's groups who this rank is."""
        names = ["model"] if len(self.chunks) == 1 else [f"model{number}" for number in range(len(self.chunks))]
        models = {name: chunk.module.sharded_state_dict(metadata=METADATA) for name, chunk in zip(names, self.chunks, strict=True)}
        return models, self.whole.sharded_state_dict(models if len(models) > 1 else models["model"], metadata=METADATA)

    def writer(self, host: HostState, rank: int) -> MegatronWriter:
        return MegatronWriter(self, host, rank)


class MegatronWriter:
    """`megatron.core.dist_checkpointing` in the group of savers."""

    def __init__(self, held: MegatronShards, host: HostState, rank: int) -> None:
        self._held, self._host, self._rank = held, host, rank
        self._prepared: tuple[int, dict[str, Any], dict[str, Any]] | None = None

    def prepare(self, step: int) -> None:
        """Megatron's groups are asked while there are any; tensors in what they say are the live ones."""
        if self._prepared is None:
            self._host.bring(step)  # hyperparameters are copied
            self._prepared = (step, *self._held.sharded())

    def write(self, directory: Path, order: Save, shards: tuple[Shard, ...]) -> tuple[SavedFile, ...]:
        assert self._prepared is not None
        step, models, optimizer = self._prepared
        if step != order.step:
            raise ConfigError(f"this rank is at step {step}, and {order.step} is to be written")
        held, member = self._held, dist.get_rank()
        held.cast()
        sharing = {held.places[rank][1]: number for number, rank in enumerate(order.savers) if held.places[rank][0] == held.model_part}
        writes = fold(held.part, sharing, held.parameters) == member
        state: dict[str, Any] = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": step, **held.common(step)}
        if held.scheduler is not None:
            state["opt_param_scheduler"] = held.scheduler.state_dict()
        state |= {name: written_by(model, writes=writes) for name, model in models.items()}
        state["optimizer"] = optimizer_written_by(optimizer, writes=writes)
        directory.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state, str(directory), content_metadata=METADATA)
        own = write_host_state(directory, step, self._host, self._rank)
        written = sorted(directory.glob(f"__{member}_*"))
        if member == 0:
            written += [directory / name for name in (".metadata", "common.pt", "metadata.json")]
        return tuple(saved_file(directory, path) for path in (*written, own))


def written_by(model: Any, *, writes: bool) -> Any:
    """A model's sharded state where of those who share it one writes: Megatron's main replica may be dead."""

    def replica(item: Any) -> Any:
        return replace(item, replica_id=(*item.replica_id[:-1], 0 if writes else 1)) if isinstance(item, ShardedBase) else item

    return dict_list_map_outplace(replica, model)


def optimizer_written_by(optimizer: Any, *, writes: bool) -> Any:
    """An optimizer's sharded state where everybody here writes its own shard, and one of those who share a model what is theirs."""

    def replica(item: Any) -> Any:
        if isinstance(item, ShardedObject):
            return replace(item, replica_id=(0 if writes else 1, 0, 0))
        return replace(item, replica_id=(0, 0, 0)) if isinstance(item, ShardedBase) else item

    return dict_list_map_outplace(replica, optimizer)
