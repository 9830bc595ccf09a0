"""A transformers Trainer on a tiny random model. Usage: trainer.py train|resume DIRECTORY.

Needs no network.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_DISABLED="true",
    HF_HUB_DISABLE_TELEMETRY="1",
)

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

STEPS = 12


# torch is not installed where types are checked
class Tokens(Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc]
    """Sixty-four fixed sequences."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer(directory: Path, steps: int) -> Trainer:
    """A trainer that keeps two checkpoints and saves every third step."""
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    )
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        save_steps=3,
        save_total_limit=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        logging_steps=3,
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=Tokens())


def train(directory: Path) -> None:
    """The first half of the steps; of four checkpoints two are left."""
    trainer(directory, STEPS).train()
    kept = sorted(p.name for p in directory.glob("checkpoint-*"))
    assert kept == ["checkpoint-12", "checkpoint-9"], kept


def resume(directory: Path) -> None:
    """Go on from the last checkpoint to twice the steps; the two newest checkpoints are left."""
    last = get_last_checkpoint(str(directory))
    assert last == str(directory / "checkpoint-12"), last
    resumed = trainer(directory, 2 * STEPS)
    resumed.train(resume_from_checkpoint=last)
    assert resumed.state.global_step == 2 * STEPS
    assert sorted(p.name for p in directory.glob("checkpoint-*")) == [
        "checkpoint-21",
        "checkpoint-24",
    ]


if __name__ == "__main__":
    {"train": train, "resume": resume}[sys.argv[1]](Path(sys.argv[2]) / "run")
