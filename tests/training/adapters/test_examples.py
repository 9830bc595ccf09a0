"""The examples of docs/TRAINING.md, as they stand: each block is carried out by two ranks, with the
names that it takes for granted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from acpfs.training import protect
from acpfs.training.torch.replicated_zero import ReplicatedZero
from tests.training.adapters.runs import WIDTH, network
from tests.training.ranks.forked import Ranks, join_group

pytestmark = pytest.mark.long
PAGE = (Path(__file__).parents[3] / "docs" / "TRAINING.md").read_text(encoding="utf-8")
DIRECTORY = "/mnt/acp/run1"
WORLD = 2
BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if DIRECTORY in block and "@resilient" not in block
]


class Trained:
    """A model with what belongs to it, and a loop."""

    def __init__(self) -> None:
        self.plain = network()
        self.model = DistributedDataParallel(self.plain)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)

    def backward(self) -> None:
        self.model(torch.randn(4, WIDTH)).square().mean().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.scheduler.step()


def plain_torch() -> dict[str, Any]:
    made = Trained()
    return {
        "model": made.model,
        "optimizer": made.optimizer,
        "scheduler": made.scheduler,
        "train": made.train,
    }


def own_gate() -> dict[str, Any]:
    made = Trained()
    made.backward()
    optimizer = ReplicatedZero(made.model.parameters(), torch.optim.Adam, replicas=2)

    def clip(values: tuple[float, ...]) -> None:
        for parameter in made.plain.parameters():
            parameter.grad.div_(values[0])

    return {
        "model": made.model,
        "optimizer": optimizer,
        "protect": protect,
        "clip": clip,
        "norm_over_all_ranks": lambda model: 2.0,
    }


def trainer() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=4, n_embd=16, n_layer=1, n_head=2)
    )
    data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
    os.makedirs("out", exist_ok=True)
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        max_steps=2,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    return {
        "Trainer": Trainer,
        "model": model,
        "arguments": arguments,
        "data": data,
        "get_last_checkpoint": get_last_checkpoint,
    }


def lightning() -> dict[str, Any]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from tests.training.adapters.test_lightning import Batches, Module

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = DDPStrategy(process_group_backend="gloo")
    settings = {
        "accelerator": "cpu",
        "devices": WORLD,
        "strategy": strategy,
        "max_steps": 2,
        "use_distributed_sampler": False,
        **quiet,
    }
    return {"Trainer": Trainer, "settings": settings, "module": Module(), "loader": Batches()}


def accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = torch.utils.data.DataLoader(torch.randn(8, WIDTH))
    names = {
        "accelerator": Accelerator(cpu=True),
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
    }
    return {**names, "Path": Path, "train": lambda: None}


def megatron() -> dict[str, Any]:
    from tests.training.adapters import megatron_on_processors
    from tests.training.adapters.test_megatron import Run, Training

    megatron_on_processors.stand_in()
    training = Training(dist.get_rank(), Run(Path("run")))
    made = {
        "model": [training.model],
        "optimizer": training.optimizer,
        "opt_param_scheduler": training.scheduler,
    }

    def train() -> None:
        training.step()
        training.end_of_step()

    return {**made, "global_batch_size": 1, "iteration": 0, "args": None, "train": train}


def own_state() -> dict[str, Any]:
    from tests.training.adapters.test_own_state import Loop

    loop = Loop()
    # the example hands it a batch
    loop.compute = lambda rank: dist.all_reduce(loop.gradient)  # type: ignore[method-assign]
    return {"protect": protect, "loop": loop, "loader": range(2)}


NAMES = {
    "with protection:  # from here": plain_torch,
    "protection.gate()": own_gate,
    "protect_trainer": trainer,
    "newest": lightning,
    "protect_accelerator": accelerate,
    "protect_megatron": megatron,
    "loop.compute": own_state,
}


def carry_out(rank: int, block: str, directory: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
    )
    os.chdir(directory)
    join_group(rank, WORLD, directory / "store")
    (names,) = [made for mark, made in NAMES.items() if mark in block]
    exec(compile(block.replace(DIRECTORY, str(directory / "run")), "TRAINING.md", "exec"), names())
    dist.barrier()


@pytest.mark.clause("T34")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs(tmp_path: Path, number: int) -> None:
    with Ranks(WORLD, tmp_path, lambda rank: carry_out(rank, BLOCKS[number], tmp_path)) as ranks:
        assert ranks.statuses() == [0] * WORLD, ranks.said()


@pytest.mark.clause("T34")
def test_there_is_one_of_each() -> None:
    assert len(BLOCKS) == len(NAMES)
