"""Megatron-Core where ranks are replaced: `restore_megatron` in a function that `resilient` runs
again, in place of `run.restore`.

What holds of `protect_megatron` holds here: a distributed optimizer, and where there are experts
theirs, in several instances, each of which has a copy of every shard. A rank that takes another
one's place gets main parameters and moments from the other instance; each rank then casts them to
the model's precision and gathers the rest inside its instance, as Megatron does behind every
update. Snapshots are Megatron's own checkpoints: the function loads one before it calls this, and
says at which iteration it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from acpfs.errors import ConfigError
from acpfs.training.frameworks import and_then
from acpfs.training.frameworks.megatron import MegatronShards, Schedule, Sharded
from acpfs.training.host_state import HostState
from acpfs.training.messages import Shard
from acpfs.training.torch.end_mark import Live
from acpfs.training.torch.layout import shard_name
from acpfs.training.torch.run import Run
from acpfs.training.torch.transfer import Contents, pieces
from acpfs.training.torch.writers import Writer


def restore_megatron(
    run: Run,
    *,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any = None,
    increment: int = 1,
    step: int = 0,
    after_update: Callable[[], None] | None = None,
    state: Mapping[str, Any] | None = None,
) -> int:
    """Give model, optimizer and scheduler their state; the iteration that they are at then.

    Called by all ranks behind building them.

    Args:
        run: what the function was given.
        model: the chunks, as they are trained: Megatron's `DistributedDataParallel`.
        optimizer: what `get_megatron_optimizer` gave.
        scheduler: the `OptimizerParamScheduler`, if there is one.
        increment: what the loop steps it by after each update.
        step: the iteration of the checkpoint that the function has loaded; where no copy is left,
            all go on from there.
        after_update: what the loop does from an update to the end of its step, beside the
            scheduler's step.
        state: further parts of the host state, as for `protect`.

    Raises:
        ConfigError: something that has no copies, or cannot be told.
    """
    shards = MegatronShards(model, optimizer, scheduler, lambda _: {}, run.control())
    held = MegatronHolding(shards, step)

    def end_of_step() -> None:
        if scheduler is not None:
            scheduler.step(increment=increment)

    schedulers = [] if scheduler is None else [Schedule(scheduler)]
    return run.restore_held(
        held, schedulers, further=state, after_update=and_then(end_of_step, after_update)
    )


def prefix(one: Sharded) -> str:
    """Of names of its state: experts have an optimizer of their own."""
    return "experts." if one.place.is_expert else "dense."


class MegatronHolding:
    """This rank's shard of an instance."""

    def __init__(self, shards: MegatronShards, begun: int) -> None:
        self._shards = shards
        self.layout = shards.layout
        self.buffers = shards.buffers
        self.frozen: dict[str, Any] = {}
        self.optimizers: Sequence[Any] = [one.optimizer.optimizer for one in shards.sharded]
        self.begun: int | None = begun
        self.takes_copies = False

    def live(self) -> Live:
        return self._shards.live()

    def look(self) -> None:
        """Megatron lays out its buffers once: nothing comes later."""

    def contents(self, shard: Shard) -> Contents:
        own = [
            one
            for one in self._shards.sharded
            if shard_name(self._shards.holders(one.place)) == shard
        ]
        return pieces(
            {prefix(one) + name: {"": value} for one in own for name, value in one.main_state()}
        )

    def fill(self, contents: Contents) -> None:
        """In place: a fresh optimizer has no moments before its first step, so there are some
        first.
        """
        for one in self._shards.sharded:
            given = sum(name.startswith(prefix(one)) for name in contents)
            if not given:
                continue  # contents of the other optimizer's shard
            if given > len(dict(one.main_state())):
                # as Megatron's own loader does
                one.optimizer._init_optimizer_states_with_dummy_values()  # noqa: SLF001
            with torch.no_grad():
                for name, value in one.main_state():
                    value.copy_(contents[prefix(one) + name][""].value)

    def gradients(self) -> Contents | None:
        """They lie in buffers that Megatron lays out."""
        return None

    def fill_gradients(self, contents: Contents) -> None:
        raise AssertionError("none were given")

    def spread(self, givers: Mapping[Shard, int]) -> None:
        for one in self._shards.sharded:
            one.cast()
        for chunk in self._shards.chunks:
            chunk.start_param_sync(force_sync=True)

    def load(self, path: Path, rank: int) -> Any:
        raise AssertionError("the function loads Megatron's checkpoints")

    def writer(self, host: HostState, rank: int) -> Writer:
        raise ConfigError(
            "snapshots of Megatron-Core are its own checkpoints: save as ever, and load before "
            "restore_megatron"
        )
