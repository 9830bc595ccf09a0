"""torchtitan 0.2.2 without an accelerator: a tiny Llama, and what it calls a device is this
processor.

Stands in for a device only: memory and names of one, and a language for its kernels. Trainer,
parallelism, optimizers and checkpoints are torchtitan's own; two things are given to it that gloo
and a test need: FSDP adds before it divides, and tokens are random numbers whose loader has a
position.

torchtitan alone sees the stand-in: it asks torch what the device is while it is imported, and never
again. Whoever is tested in the same process has torch as it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.utils._triton import has_triton_package

WORDS = 64


def _device() -> Any:
    """What it asks `torch.cuda` for."""
    named = {name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")}
    return SimpleNamespace(
        **{
            **named,
            "set_device": lambda _device: None,
            "current_device": lambda: 0,
            "get_device_name": lambda _device=None: "processor",
            "get_device_properties": lambda _device: SimpleNamespace(total_memory=1 << 30),
            "memory_stats": lambda _device=None: {},
            "reset_peak_memory_stats": lambda: None,
            "empty_cache": lambda: None,
        }
    )


def _triton() -> dict[str, Any]:
    """torch for processors comes without it (1 GB). Kernels of experts are written in it, which no
    model here has.
    """
    package: Any = ModuleType("triton")
    language: Any = ModuleType("triton.language")
    package.jit = lambda kernel: kernel
    package.language = language
    language.constexpr = int
    return {"triton": package, "triton.language": language}


ASKS = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._inductor.compile_fx",
)
"""Parts of torch that keep what they were answered, or whom to ask: imported before."""


def _import_torchtitan() -> Any:
    """With the stand-in; the part of it that asks."""
    for name in ASKS:
        importlib.import_module(name)
    device = _device()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
        patched.setattr(torch._utils, "_get_device_module", lambda _type: device)
        if not has_triton_package():  # which is asked once, and remembered
            for name, module in _triton().items():
                patched.setitem(sys.modules, name, module)
        return importlib.import_module("torchtitan.tools.utils")


utils = _import_torchtitan()
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402  # behind the stand-in
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

__all__ = ["CheckpointManager", "Trainer", "config", "distributed", "utils"]


class Tokens(BaseDataLoader):  # type: ignore[misc]  # torchtitan is not there where types are checked
    """Random ones, others in each rank."""

    def __init__(self, *, dp_rank: int, job_config: Any, **_: Any) -> None:
        self._shape = (job_config.training.local_batch_size, job_config.training.seq_len + 1)
        self._chance = torch.Generator().manual_seed(dp_rank)
        # as torchtitan's own loader: what has the same name in several ranks is saved once
        self._name = f"chance-{dp_rank}"

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        while True:
            tokens = torch.randint(0, WORDS, self._shape, generator=self._chance)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {self._name: self._chance.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._chance.set_state(state[self._name])


def _tiny() -> Any:
    """torchtitan's Llama, of two small layers."""
    llama = train_spec.get_train_spec("llama3")

    def parallelized(model: Any, dims: Any, job: Any) -> Any:
        """gloo has no operation that multiplies before it adds."""
        made = llama.parallelize_fn(model, dims, job)
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return made

    shape = replace(
        llama.model_args["debugmodel"],
        dim=32,
        n_layers=2,
        n_heads=2,
        vocab_size=WORDS,
        multiple_of=8,
    )
    return replace(
        llama,
        model_args={"debugmodel": shape},
        parallelize_fn=parallelized,
        build_dataloader_fn=Tokens,
        build_tokenizer_fn=None,
        build_validator_fn=None,
        state_dict_adapter=None,
    )


train_spec.register_train_spec("tiny", _tiny())


def config(folder: str, *, copies: int, ranks: int, steps: int, interval: int) -> Any:
    """A job's. `copies`: so many of each shard. `interval`: updates from one checkpoint to the
    next.
    """
    job = JobConfig()
    job.job.dump_folder = folder
    job.model.name = "tiny"
    job.model.flavor = "debugmodel"
    job.training.local_batch_size = 1
    job.training.seq_len = 16
    job.training.steps = steps
    job.training.mixed_precision_param = "float32"
    job.lr_scheduler.warmup_steps = 2
    job.parallelism.data_parallel_replicate_degree = copies
    job.parallelism.data_parallel_shard_degree = ranks // copies
    job.activation_checkpoint.mode = "none"
    job.checkpoint.enable = True
    job.checkpoint.interval = interval
    job.comm.trace_buf_size = 0
    job.debug.seed = 7
    return job
