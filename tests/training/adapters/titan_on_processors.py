"""torchtitan 0.2.2 without an accelerator: a tiny Llama, and what it calls a device is this
processor.

Stands in for a device only: memory and names of one. Trainer, parallelism, optimizers and
checkpoints are torchtitan's own; two things are given to it that gloo and a test need: FSDP adds
before it divides, and tokens are random numbers whose loader has a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

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


DEVICE = _device()
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _type: DEVICE
titan = pytest.importorskip("torchtitan")
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402  # behind the stand-in
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

__all__ = ["Trainer", "config"]


class Tokens(BaseDataLoader):  # type: ignore[misc]  # torchtitan is not there where types are checked
    """Random ones, others in each rank."""

    def __init__(self, *, dp_rank: int, job_config: Any, **_: Any) -> None:
        self._shape = (job_config.training.local_batch_size, job_config.training.seq_len + 1)
        self._chance = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        while True:
            tokens = torch.randint(0, WORDS, self._shape, generator=self._chance)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"chance": self._chance.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._chance.set_state(state["chance"])


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


def config(folder: str, *, copies: int, ranks: int, steps: int) -> Any:
    """A job's. `copies`: so many of each shard."""
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
    job.checkpoint.interval = steps
    job.comm.trace_buf_size = 0
    job.debug.seed = 7
    return job
