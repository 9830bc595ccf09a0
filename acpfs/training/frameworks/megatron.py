"""Megatron-Core: `protect_megatron` for its distributed optimizer with several instances, each of
which has a copy of every shard.

A shard is what one rank of an instance updates: a range of each buffer of its model-parallel part.
Experts have an optimizer and groups of their own, so a rank holds a shard of each. The norm that
gradients are clipped with is reduced inside an instance, so it is no gate between instances; there
is an explicit one, which the first inner optimizer's hook passes when gradients are clipped. The
update is complete when the last inner optimizer's is: what Megatron does in between and afterwards,
casting to the model's precision and gathering parameters inside the instance, is done again by
those who save.

A gasp is written by Megatron's own `dist_checkpointing`, in its format `dp_reshardable`, in which
every rank writes its own shard. What is in no optimizer, such as buffers, is written by the first
saver that has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from acpfs.errors import ConfigError
from acpfs.training.frameworks import and_then
from acpfs.training.host_state import HostState
from acpfs.training.manifest import saved_file
from acpfs.training.messages import Gate, Save, SavedFile, Shard
from acpfs.training.policy import Policy
from acpfs.training.protection import Protection
from acpfs.training.torch.digest import digest_of
from acpfs.training.torch.end_mark import Live
from acpfs.training.torch.folding import fold
from acpfs.training.torch.layout import Layout, shard_name
from acpfs.training.torch.rank import LoopCalls, OnHost, TorchRank, Trained
from acpfs.training.torch.writers import write_host_state

METADATA = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
"""What Megatron's loader asks a checkpoint for."""
NAMING = {
    "name": "iter_{step:07d}",
    "tracker": "latest_checkpointed_iteration.txt",
    "tracker_text": "{step}",
}
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
        after_update: what the loop does from an update to the end of its step, beside the
            scheduler's step.
        common: `common(step)` gives further entries of the checkpoint, the same in all ranks:
            `args` and whatever else its loader wants.
        on_stopped: as for `protect`, and so are those below.
        on_settled: see there.
        on_saved: see there.
        policy: see there.
        settings: see there.

    Raises:
        ConfigError: something that cannot be protected.
    """
    held = MegatronShards(model, optimizer, scheduler, common or (lambda _: {}))

    def end_of_step() -> None:
        if scheduler is not None:
            scheduler.step(increment=increment)

    policy = policy or Policy.from_environment(None, **{**NAMING, **settings})
    inner = [one.optimizer for one in held.optimizers]
    schedulers = [] if scheduler is None else [Schedule(scheduler)]
    rank = TorchRank(
        Trained(None, inner, held=held),
        OnHost(schedulers),
        LoopCalls(after_update=and_then(end_of_step, after_update)),
        policy,
        step,
    )
    return Protection(Path(directory), rank, policy, on_stopped, on_settled, on_saved)


class Schedule:
    """An `OptimizerParamScheduler` whose state can be given back: Megatron's own adds what it loads
    to where it is.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.num_steps = 0
        self._scheduler.load_state_dict(state)

    def step(self) -> None:
        """Never called: what follows an update is given."""


def only_distributed(optimizer: Any) -> list[Any]:
    """The `DistributedOptimizer`s that all of an update is: one, and where there are experts
    theirs.

    Raises:
        ConfigError: it is something else.
    """
    found = getattr(optimizer, "chained_optimizers", [optimizer])
    for one in found:
        if (
            not isinstance(one, DistributedOptimizer)
            or one.is_stub_optimizer
            or one.ddp_config.use_megatron_fsdp
        ):
            raise ConfigError(
                f"{type(one).__name__}: only --use-distributed-optimizer is protected here, with "
                "trained parameters in each rank"
            )
        if getattr(one.config, "use_precision_aware_optimizer", False):
            raise ConfigError(
                "a precision-aware optimizer gives no main parameters that could be compared, or "
                "brought back"
            )
        if one.grad_scaler is not None:
            raise ConfigError("fp16 with a loss scaler is not protected here: bf16 needs none")
        if one.ddp_config.num_distributed_optimizer_instances < 2:
            raise ConfigError(
                "one instance of the distributed optimizer has no copies: "
                "--num-distributed-optimizer-instances 2"
            )
    return list(found)


def give_steps_back(optimizer: Any) -> None:
    """After `optimizer.load_state_dict`, where torch's Adam is the inner one: its count of steps,
    by which it corrects moments.

    Megatron-Core 0.16.1 saves that count in the parameter group, as its own Adam has it, and leaves
    what torch's looks at as it was. Nothing is done to an optimizer that has the count in its group
    only.
    """
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        for group in inner.param_groups:
            own = [
                inner.state[parameter]
                for parameter in group["params"]
                if "step" in inner.state.get(parameter, {})
            ]
            if own and "step" in group:
                step = group.pop("step")
                for state in own:
                    state["step"] = torch.tensor(float(step))


@dataclass(frozen=True)
class Place:
    """What a rank updates with one of its optimizers."""

    is_expert: bool
    model_part: int
    """Of the model-parallel parts; experts have others."""
    part: int
    """Of an instance."""


class Sharded:
    """One of this rank's optimizers: what of it others hold as well, and which parameters it
    updates.
    """

    def __init__(self, optimizer: Any, *, is_expert: bool) -> None:
        self.optimizer = optimizer
        group = optimizer.data_parallel_group
        self.place = Place(is_expert, int(optimizer.data_parallel_group_idx), int(group.rank()))
        self._parts_count = int(group.size())

    def main_state(self) -> Iterator[tuple[str, Any]]:
        """Main parameters and the optimizer's state of this rank's ranges, by name."""
        number = 0
        for buffer in self.optimizer.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter in bucket["param_map"]:
                        # nothing else gives them
                        found = self.optimizer._get_main_param_and_optimizer_states(parameter)  # noqa: SLF001
                        yield from ((f"{number:06}.{key}", value) for key, value in found.items())
                        number += 1

    def cast(self) -> None:
        """Main parameters into the model's, in this rank's ranges: a fault may have come between
        the update and that.
        """
        # part of every update of Megatron's
        self.optimizer._copy_main_params_to_model_params()  # noqa: SLF001

    def parameters(self, part: int) -> list[Any]:
        """The flat ranges of the model's parameters that a part of the instance updates."""
        found = []
        for buffer in self.optimizer.buffers:
            for bucket in buffer.buckets:
                size = bucket.param_data.numel() // self._parts_count
                found.append(bucket.param_data.view(-1)[part * size : (part + 1) * size])
        return found

    def storages(self) -> set[int]:
        """Where the model's parameters lie that it updates."""
        return {buffer.param_data.untyped_storage().data_ptr() for buffer in self.optimizer.buffers}


class MegatronShards:
    """This rank's shards, what they are called and who else has them.

    Made by all ranks at the same place; one collective.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        common: Common,
        control: Any = None,
    ) -> None:
        """`control`: a group of gloo's, of all ranks; None: the default group."""
        self.optimizers = only_distributed(optimizer)
        self.whole = optimizer
        self.chunks = chunks
        self.scheduler = scheduler
        self.common = common
        of_experts = {id(buffer) for chunk in chunks for buffer in chunk.expert_parallel_buffers}
        self.sharded = [
            Sharded(one, is_expert=any(id(buffer) in of_experts for buffer in one.buffers))
            for one in self.optimizers
        ]
        self.places: list[tuple[Place, ...]] = [()] * dist.get_world_size()
        """Of each rank."""
        own = tuple(one.place for one in self.sharded)
        dist.all_gather_object(self.places, own, group=control)
        mine = [self.holders(one.place) for one in self.sharded]
        self.layout = Layout({shard_name(ranks): ranks for ranks in mine}, {}, Gate.EXPLICIT)
        self.buffers: dict[str, Any] = {}
        for number, chunk in enumerate(chunks):
            kept = chunk.module.state_dict().keys()
            self.buffers |= {
                f"{number}.{name}": value
                for name, value in chunk.module.named_buffers()
                if name in kept
            }

    def holders(self, place: Place) -> tuple[int, ...]:
        return tuple(rank for rank, places in enumerate(self.places) if place in places)

    def digest(self, shard: Shard) -> str:
        """Over main parameters and moments."""
        own = [one for one in self.sharded if shard_name(self.holders(one.place)) == shard]
        return digest_of(
            {
                f"{one.place.is_expert}.{name}": value
                for one in own
                for name, value in one.main_state()
            }
        )

    def live(self) -> Live:
        """Main parameters under "", and moments; compared with what they were at the end of an
        update.
        """
        found: dict[Shard, dict[str, dict[str, Any]]] = {}
        for one in self.sharded:
            mine = found.setdefault(shard_name(self.holders(one.place)), {})
            storages = one.storages()
            for name, value in one.main_state():
                number, _, key = name.partition(".")
                values = mine.setdefault(f"{one.place.is_expert}.{number}", {})
                if key != "param":
                    values[key] = value
                elif value.untyped_storage().data_ptr() in storages:
                    # Of a model in single precision it is a part of what is gathered behind each
                    # update, which torch counts as a write to all of it: told by its bytes.
                    values[""] = value.data
                else:
                    values[""] = value
        return found

    def state_dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What Megatron's checkpoint has of model and optimizer; asks Megatron's groups who this
        rank is.
        """
        names = (
            ["model"]
            if len(self.chunks) == 1
            else [f"model{number}" for number in range(len(self.chunks))]
        )
        models = {
            name: chunk.module.sharded_state_dict(metadata=METADATA)
            for name, chunk in zip(names, self.chunks, strict=True)
        }
        return models, self.whole.sharded_state_dict(
            models if len(models) > 1 else models["model"], metadata=METADATA
        )

    def writer(self, host: HostState, rank: int) -> MegatronWriter:
        return MegatronWriter(self, host, rank)


class MegatronWriter:
    """`megatron.core.dist_checkpointing` in the group of savers."""

    def __init__(self, held: MegatronShards, host: HostState, rank: int) -> None:
        self._held = held
        self._host = host
        self._rank = rank
        self._prepared: tuple[int, dict[str, Any], dict[str, Any]] | None = None

    def prepare(self, step: int) -> None:
        """Megatron's groups are asked while there are any; tensors in what they say are the live
        ones.
        """
        if self._prepared is None:
            self._host.bring(step)  # hyperparameters are copied
            self._prepared = (step, *self._held.state_dicts())

    def write(
        self, directory: Path, order: Save, shards: tuple[Shard, ...]
    ) -> tuple[SavedFile, ...]:
        assert self._prepared is not None
        step, models, optimizer = self._prepared
        if step != order.step:
            raise ConfigError(f"this rank is at step {step}, and {order.step} is to be written")
        held = self._held
        member = dist.get_rank()
        sharing = [self._sharing(one, order) for one in held.sharded]
        for one in held.sharded:
            one.cast()
        writers = [
            fold(one.place.part, members, one.parameters)
            for one, members in zip(held.sharded, sharing, strict=True)
        ]
        state: dict[str, Any] = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": step,
            **held.common(step),
        }
        if held.scheduler is not None:
            state["opt_param_scheduler"] = held.scheduler.state_dict()
        state |= written_by_one(
            models,
            [
                (one.storages(), writer == member)
                for one, writer in zip(held.sharded, writers, strict=True)
            ],
        )
        parts = (
            [optimizer]
            if len(held.sharded) == 1
            else [part for _, part in sorted(optimizer.items())]
        )
        written = [
            optimizer_written_by(
                part, own=members.get(one.place.part) == member, shared=writer == member
            )
            for one, part, members, writer in zip(
                held.sharded, parts, sharing, writers, strict=True
            )
        ]
        state["optimizer"] = written[0] if len(written) == 1 else dict(enumerate(written))
        directory.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state, str(directory), content_metadata=METADATA)
        own = write_host_state(directory, step, self._host, self._rank)
        written = sorted(directory.glob(f"__{member}_*"))
        if member == 0:
            written += [directory / name for name in (".metadata", "common.pt", "metadata.json")]
        return tuple(saved_file(directory, path) for path in (*written, own))

    def _sharing(self, one: Sharded, order: Save) -> dict[int, int]:
        """Part of an instance → number of the saver that stands for it, of those who share a
        model-parallel part.
        """
        found = {}
        for places in self._held.places:
            for place in places:
                if (place.is_expert, place.model_part) == (
                    one.place.is_expert,
                    one.place.model_part,
                ):
                    found[place.part] = order.savers.index(
                        order.cover[shard_name(self._held.holders(place))]
                    )
        return found


def written_by_one(models: dict[str, Any], updated: Sequence[tuple[set[int], bool]]) -> Any:
    """Models' sharded state where each item is written once among the savers: Megatron's main
    replica may be dead. A collective.

    Args:
        models: by name in the checkpoint.
        updated: of each optimizer where the parameters lie that it updates, and whether this saver
            has all of them.
    """

    def updater(item: Any) -> bool | None:
        """Whether this saver writes what an optimizer updates; None: no optimizer does."""
        where = item.data.untyped_storage().data_ptr() if isinstance(item.data, torch.Tensor) else 0
        return next((writes for storages, writes in updated if where in storages), None)

    others: list[tuple[Any, ...]] = []

    def collect(item: Any) -> Any:
        if isinstance(item, ShardedBase) and updater(item) is None:
            others.append(_identity(item))
        return item

    dict_list_map_outplace(collect, models)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, others)
    first = {
        identity: member
        for member, identities in reversed(list(enumerate(found)))
        for identity in identities
    }

    def replica(item: Any) -> Any:
        if not isinstance(item, ShardedBase):
            return item
        writes = updater(item)
        if writes is None:  # of those who have it, tensor-parallel ranks too, one is the first
            return replace(
                item, replica_id=(0 if first[_identity(item)] == dist.get_rank() else 1, 0, 0)
            )
        return replace(item, replica_id=(*item.replica_id[:-1], 0 if writes else 1))

    return dict_list_map_outplace(replica, models)


def _identity(item: Any) -> tuple[Any, ...]:
    """What part of which entry of a checkpoint it is."""
    return item.key, tuple(getattr(item, "global_offset", ()))


def optimizer_written_by(optimizer: Any, *, own: bool, shared: bool) -> Any:
    """An optimizer's sharded state. `own`: this saver writes its shard.

    `shared`: and what those who share a model part have equal.
    """

    def replica(item: Any) -> Any:
        if isinstance(item, ShardedObject):
            return replace(item, replica_id=(0 if shared else 1, 0, 0))
        return (
            replace(item, replica_id=(0 if own else 1, 0, 0))
            if isinstance(item, ShardedBase)
            else item
        )

    return dict_list_map_outplace(replica, optimizer)
