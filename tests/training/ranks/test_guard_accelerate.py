"""Whatever fails in acpfs, a loop of accelerate and one of transformers' Trainer end as without
it.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.ranks.faulty_loops import UPDATES, WORLD, Trains, Values, assert_goes_on
from tests.training.ranks.jobs import WIDTH, network

pytestmark = pytest.mark.clause("T178", "T179")
ACCUMULATED = 2


class Counter:
    """Something of the loop's own."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self.done = value["done"]


def as_launched() -> None:
    """As torchrun says it."""
    rank = str(dist.get_rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def with_accelerate(protected: bool) -> Trains:
    def train(directory: Path) -> Values:
        from accelerate import Accelerator

        from acpfs.training.frameworks.accelerate import protect_accelerator

        as_launched()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
        counter = Counter()
        plain = network()
        made = torch.optim.Adam(plain.parameters(), lr=0.01)
        decay = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        model, optimizer, scheduler = accelerator.prepare(plain, made, decay)
        accelerator.register_for_checkpointing(counter)
        whole = (
            protect_accelerator(accelerator, directory, model=model) if protected else nullcontext()
        )
        with whole as protection:
            for number in range(UPDATES * ACCUMULATED):
                torch.manual_seed(100 * number + dist.get_rank())
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.randn(4, WIDTH)).square().mean())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                counter.done += 1
                with nullcontext() if protection is None else protection.long_operation():
                    accelerator.save_state(str(directory / f"own-{number}"))
        assert counter.done == UPDATES * ACCUMULATED
        rates = torch.tensor(scheduler.get_last_lr())
        return [*(value.detach() for value in plain.parameters()), rates]

    return train


def test_with_accelerate(tmp_path: Path) -> None:
    assert_goes_on(with_accelerate, tmp_path)


def with_trainer(protected: bool) -> Trains:
    def train(directory: Path) -> Values:
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        from acpfs.training.frameworks.transformers import protect_trainer

        as_launched()
        torch.manual_seed(3)
        data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 6))]
        arguments = TrainingArguments(
            output_dir=str(directory),
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=UPDATES,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATED,
            learning_rate=0.01,
            logging_steps=1,
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        config = GPT2Config(vocab_size=32, n_positions=6, n_embd=16, n_layer=1, n_head=2)
        trainer = Trainer(
            GPT2LMHeadModel(config), arguments, train_dataset=data, eval_dataset=data[:4]
        )
        if protected:
            protect_trainer(trainer)
        trainer.train()
        dist.barrier()  # the first rank alone writes what the next loop looks for
        assert (directory if dist.get_rank() == 0 else directory.parent).exists()
        return [value.detach() for value in trainer.model.parameters()]

    return train


@pytest.mark.long
def test_with_the_trainer(tmp_path: Path) -> None:
    assert_goes_on(with_trainer, tmp_path)
