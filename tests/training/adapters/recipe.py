"""A script for `acpfs-run`: KIND DIRECTORY NOTES STEPS.

Carries out the page's example of a framework, with a model, data and a loop.

Each update is noted in `NOTES/rank-N`: its number, the loss before it, a digest of parameters and
optimizer state after it. Numbers come from the optimizer's own state, so that a run which goes on
from a checkpoint says what it does again, and what it has left out.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.training.adapters.runs import WIDTH, network

PAGE = (Path(__file__).parents[3] / "docs" / "TRAINING.md").read_text(encoding="utf-8")
SHOWN = "/mnt/acp/run1"
BATCH = 4
MARKS = {
    "trainer": "protect_trainer(trainer)",
    "lightning": "newest(",
    "accelerate": "protect_accelerator(",
    "megatron": "protect_megatron(",
}


def example(kind: str, directory: Path) -> Any:
    """The block of the page, compiled."""
    (block,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if MARKS[kind] in block
    )
    return compile(block.replace(SHOWN, str(directory)), "TRAINING.md", "exec")


class Notes:
    """Of this rank."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / f"rank-{os.environ['RANK']}").open("a", buffering=1)
        self._loss = 0.0
        backward = torch.Tensor.backward

        def noted(loss: Any, *args: Any, **kwargs: Any) -> None:
            self._loss = float(loss)
            backward(loss, *args, **kwargs)

        torch.Tensor.backward = noted
        register_optimizer_step_post_hook(self._updated)

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        from acpfs.training.torch.digest import digest_of

        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        state = {f"{number:04}": parameter for number, parameter in enumerate(parameters)}
        state |= {
            f"{number:04}.{key}": value
            for number, one in enumerate(parameters)
            for key, value in optimizer.state[one].items()
        }
        update = int(optimizer.state[parameters[0]]["step"])
        line = {"update": update, "loss": self._loss, "state": digest_of(state), "pid": os.getpid()}
        self._file.write(
            json.dumps({**line, "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}) + "\n"
        )


def trainer(directory: Path, steps: int) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    torch.manual_seed(3)
    tokens = torch.randint(0, 32, (64, 6))
    settings = {
        "max_steps": steps,
        "save_steps": 50,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
    }
    arguments = TrainingArguments(
        str(directory),
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=6, n_embd=16, n_layer=1, n_head=2)
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return {
        "Trainer": Trainer,
        "model": model,
        "arguments": arguments,
        "data": data,
        "get_last_checkpoint": get_last_checkpoint,
    }


def lightning(directory: Path, steps: int) -> dict[str, Any]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from tests.training.adapters.test_lightning import Batches, Module

    world = int(os.environ["WORLD_SIZE"])
    settings = {
        "accelerator": "cpu",
        "devices": world,
        "strategy": DDPStrategy(process_group_backend="gloo"),
        "max_steps": steps,
    }
    settings |= {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module = Module()
    torch.manual_seed(11)
    return {
        "Trainer": Trainer,
        "settings": {**settings, "use_distributed_sampler": False},
        "module": module,
        "loader": Batches(),
    }


def accelerate(directory: Path, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    loader = torch.utils.data.DataLoader(torch.randn(64, WIDTH), batch_size=BATCH)
    names: dict[str, Any] = {
        "accelerator": made,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
    }

    def train() -> None:
        scheduler = names["scheduler"]
        for update in range(
            scheduler.scheduler.last_epoch // made.num_processes + 1, steps + 1
        ):  # which is in the checkpoint
            batch = torch.randn(
                BATCH,
                WIDTH,
                generator=torch.Generator().manual_seed(1000 * update + made.process_index),
            )
            made.backward((names["model"](batch) - batch).square().mean())
            names["optimizer"].step()
            scheduler.step()
            names["optimizer"].zero_grad()

    names |= {"Path": Path, "train": train}
    return names


def megatron(directory: Path, steps: int) -> dict[str, Any]:
    from tests.training.adapters import megatron_on_processors
    from tests.training.adapters.test_megatron import Run, Training

    megatron_on_processors.stand_in()
    dist.init_process_group("gloo")
    run = Run(directory)
    training = Training(dist.get_rank(), run)
    if (directory / "latest_checkpointed_iteration.txt").exists():
        with torch.no_grad():
            training.load(run)

    def train() -> None:
        for update in range(training.done + 1, steps + 1):
            torch.manual_seed(
                1000 * update + dist.get_rank()
            )  # Megatron's loader gives no random numbers back
            training.step()
            training.end_of_step()

    made = {
        "model": [training.model],
        "optimizer": training.optimizer,
        "opt_param_scheduler": training.scheduler,
    }
    return {
        **made,
        "global_batch_size": 1,
        "iteration": training.done,
        "args": "arguments",
        "train": train,
    }


NAMES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "trainer": trainer,
    "lightning": lightning,
    "accelerate": accelerate,
    "megatron": megatron,
}


def main(kind: str, directory: Path, notes: Path, steps: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made = NAMES[kind](directory, steps)
    Notes(notes)
    exec(example(kind, directory), made)  # the example itself


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
