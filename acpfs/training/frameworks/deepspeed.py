"""DeepSpeed's ZeRO optimizers where ranks are replaced: `restore_deepspeed` in a function that
`resilient` runs again, in place of `run.restore`.

Each rank has a part of the optimizer that nobody else has, and with stage 3 of the model, too: with
`buddy_every` it is copied to another rank's memory, and a rank that takes another one's place gets
it from there. Parameters in the model's precision are made of the parts, as DeepSpeed does behind
every update. Checkpoints are DeepSpeed's own: the function loads one before it calls this, and says
at which step it is.

Stages 1 to 3, without offloading, fp16, or experts; one parameter group, and with stage 3 one
sub-group (`sub_group_size`), so that an update is one step of the inner optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training.host_state import HostState
from acpfs.training.messages import Gate, Shard
from acpfs.training.torch.end_mark import Live
from acpfs.training.torch.layout import Layout, shard_name
from acpfs.training.torch.run import Run
from acpfs.training.torch.transfer import Contents, pieces, placed
from acpfs.training.torch.writers import Writer

_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def forget_generation() -> None:
    """What DeepSpeed keeps of the generation before: process groups, and how many parameters and
    modules it has numbered, which has to be the same in ranks that are new. Before
    `deepspeed.initialize`.
    """
    parameters = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if parameters is not None:
        vars(parameters)["Init"].param_id = 0
    modules = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if modules is not None:
        vars(modules)["FWD_MODULE_STACK"].clear()
        register = vars(modules)["DeepSpeedZeRoOffload"]._register_deepspeed_module  # noqa: SLF001
        for kept in register.__defaults__:  # `count=[0]`: one list for all engines of a process
            kept[:] = [0]
    comm = sys.modules.get("deepspeed.comm.comm")
    groups = sys.modules.get("deepspeed.utils.groups")
    if comm is not None:
        vars(comm)["cdb"] = None
    if groups is not None:
        for name, value in list(vars(groups).items()):
            if name.startswith("_") and name.endswith(("_GROUP", "_RANKS", "_SIZE", "_RANK")):
                vars(groups)[name] = {} if isinstance(value, dict) else None
        vars(groups)["mesh_device"] = None


def restore_deepspeed(
    run: Run,
    engine: Any,
    *,
    step: int = 0,
    after_update: Callable[[], None] | None = None,
    state: Mapping[str, Any] | None = None,
) -> int:
    """Give an engine its state; the step that it is at then.

    Called by all ranks behind `deepspeed.initialize`.

    Args:
        run: what the function was given.
        engine: what `deepspeed.initialize` gave.
        step: of the checkpoint that the function has loaded; where no copy is left, all go on from
            there.
        after_update: what the loop does from `engine.step()` to the end of its step.
        state: further parts of the host state, as for `protect`.

    Raises:
        ConfigError: something that is not taken.
    """
    held = DeepSpeedHolding(engine, step)

    def end_of_step() -> None:
        """As behind the update in `engine.step()`."""
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step()
        engine.global_steps += 1
        engine.global_samples += engine.train_batch_size()
        engine.micro_steps += 1
        if after_update is not None:
            after_update()

    schedulers = [] if engine.lr_scheduler is None else [engine.lr_scheduler]
    return run.restore_held(
        held,
        schedulers,
        further={"engine": _Counts(engine), **(state or {})},
        after_update=end_of_step,
    )


class _Counts:
    """What an engine counts."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        return {name: int(getattr(self._engine, name)) for name in _COUNTS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for name, value in state.items():
            setattr(self._engine, name, value)


class DeepSpeedHolding:
    """This rank's part."""

    def __init__(self, engine: Any, begun: int) -> None:
        zero = engine.optimizer
        stage = engine.zero_optimization_stage()
        _refuse(engine, stage)
        self._engine = engine
        self._zero = zero
        self._stage = stage
        (self._part,) = (
            zero.fp32_partitioned_groups_flat
            if stage == 3
            else zero.single_partition_of_fp32_groups
        )
        ranks = (dist.get_rank(),)
        self._shard = shard_name(ranks)
        self.layout = Layout({self._shard: ranks}, {self._shard: ("part",)}, Gate.EXPLICIT)
        self.buffers = dict(engine.module.named_buffers())
        self.frozen: dict[str, Any] = {}
        self.optimizers: Sequence[Any] = [zero.optimizer]
        self.begun: int | None = begun
        self.takes_copies = True

    def live(self) -> Live:
        return {self._shard: {"part": {"": self._part, **self._moments()}}}

    def _moments(self) -> dict[str, Any]:
        return dict(self._zero.optimizer.state.get(self._part, {}))

    def look(self) -> None:
        """DeepSpeed lays out its parts once: nothing comes later."""

    def contents(self, shard: Shard) -> Contents:
        return pieces({"part": {"": self._part, **self._moments()}})

    def fill(self, contents: Contents) -> None:
        with torch.no_grad():
            self._part.copy_(contents["part"][""].value)
        self._zero.optimizer.state[self._part] = {
            key: placed(self._part, piece) for key, piece in contents["part"].items() if key
        }

    def gradients(self) -> Contents | None:
        """They lie in buffers that DeepSpeed lays out."""
        return None

    def fill_gradients(self, contents: Contents) -> None:
        raise AssertionError("none were given")

    def spread(self, givers: Mapping[Shard, int]) -> None:
        # DeepSpeed has no public name for any of this
        zero = self._zero
        if self._stage < 3:
            zero.update_lp_params()
            return
        zero._reassign_or_swap_out_partitioned_parameters(0)  # noqa: SLF001
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def load(self, path: Path, rank: int) -> Any:
        raise AssertionError("the function loads DeepSpeed's checkpoints")

    def writer(self, host: HostState, rank: int) -> Writer:
        raise ConfigError(
            "snapshots of DeepSpeed are its own checkpoints: save as ever, and load before "
            "restore_deepspeed"
        )


def _refuse(engine: Any, stage: int) -> None:
    """Raises ConfigError."""
    zero = engine.optimizer
    parts = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    if not stage or not hasattr(zero, parts):
        raise ConfigError(
            f"restore_deepspeed: {type(zero).__name__} of ZeRO stage {stage} has no parts that are "
            "known"
        )
    wrong = {
        "fp16, whose scaler skips steps": bool(engine.fp16_enabled()),
        "offloading": bool(
            getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False)
        ),
        "experts": bool(getattr(engine, "has_moe_layers", False)),
        "several parameter groups": len(zero.optimizer.param_groups) > 1,
        "several sub-groups: raise sub_group_size": len(getattr(zero, parts)) > 1,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ConfigError(f"restore_deepspeed: {what}")
