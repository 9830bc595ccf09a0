"""transformers' Trainer: what survivors leave is its own checkpoint, and it goes on from there as
if nothing had been.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from acpfs.training.frameworks.transformers import protect_trainer
from tests.training.adapters.runs import (
    Run,
    assert_is_found,
    assert_resumes,
    with_fault,
    without_fault,
)
from tests.training.ranks.behind import WRONG
from tests.training.ranks.jobs import assert_same

pytestmark = pytest.mark.long
LENGTH = 6
SEQUENCES = 18


class Points(TrainerCallback):  # type: ignore[misc]  # transformers is Any where types are checked
    def __init__(self, rank: int, run: Run) -> None:
        self.rank = rank
        self.run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.at(self.rank, "begin", state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.at(self.rank, "reduced", state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.at(self.rank, "updated", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.at(self.rank, "end", state.global_step)


def script(rank: int, run: Run) -> Any:
    """Dropout, accumulation, an epoch that it does not divide, and a checkpoint at each step where
    no fault is to come.
    """
    torch.manual_seed(3)
    tokens = torch.randint(0, 32, (SEQUENCES, LENGTH))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    config = GPT2Config(vocab_size=32, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir=str(run.directory),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=run.steps,
        # which does not depend on that number
        lr_scheduler_type="constant_with_warmup" if run.double else "linear",
        warmup_steps=4 if run.double else 0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=2,
        save_steps=3 if run.protected or run.resumed else 1,
        report_to=[],
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        callbacks=[Points(rank, run)],
        optimizers=(run.adam(model.parameters(), lr=0.01) if run.double else None, None),
    )
    if run.protected:
        protect_trainer(trainer, **run.options)
    trainer.train(resume_from_checkpoint=run.resumed or None)
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "step": trainer.state.global_step,
        "random": torch.get_rng_state(),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_fault(script, tmp_path_factory.mktemp("whole"))


def loaded(checkpoint: Path, name: str) -> Any:
    return torch.load(checkpoint / name, weights_only=False)


@pytest.mark.clause("T30")
@pytest.mark.parametrize(
    ("rank", "point"), [(1, "begin"), (0, "reduced"), (2, "updated"), (0, "end")]
)
def test_a_rank_dies(tmp_path: Path, whole: Path, rank: int, point: str) -> None:
    gasp = with_fault(script, tmp_path, {rank: point})
    assert_is_its_own(gasp, whole)
    manifest = assert_resumes(script, tmp_path, gasp, whole)
    assert gasp.name == f"checkpoint-{manifest.step}"


def assert_is_its_own(gasp: Path, whole: Path) -> None:
    """What the Trainer saves at that step of a run without a fault, bit for bit."""
    own = whole / gasp.name
    assert {path.name for path in gasp.iterdir()} - {path.name for path in own.iterdir()} == {
        "gasp.json"
    }
    assert {path.name for path in own.iterdir()} <= {path.name for path in gasp.iterdir()}
    assert (gasp / "model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
    for name in ("optimizer.pt", "scheduler.pt"):
        assert_same(loaded(gasp, name), loaded(own, name), name)
    for number in range(3):
        assert_same(
            loaded(gasp, f"rng_state_{number}.pth")["cpu"],
            loaded(own, f"rng_state_{number}.pth")["cpu"],
        )
    states = [
        json.loads((checkpoint / "trainer_state.json").read_text()) for checkpoint in (gasp, own)
    ]
    assert states[0]["global_step"] == states[1]["global_step"]
    assert states[0]["epoch"] == states[1]["epoch"]


@pytest.fixture(scope="module")
def on_double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a fault."""
    return without_fault(script, tmp_path_factory.mktemp("on-double"), double=True)


@pytest.mark.clause("T229")
@pytest.mark.parametrize(
    ("rank", "point"), [(1, "begin"), (0, "reduced"), (2, "updated"), (0, "end")]
)
def test_a_rank_dies_on_the_double(tmp_path: Path, on_double: Path, rank: int, point: str) -> None:
    gasp = with_fault(script, tmp_path, {rank: point}, double=True)
    assert_is_its_own(gasp, on_double)
    assert_resumes(script, tmp_path, gasp, on_double, double=True)


@pytest.mark.clause("T229")
@pytest.mark.parametrize("gate", sorted(WRONG))
def test_each_wrong_gate_is_found(tmp_path: Path, on_double: Path, gate: str) -> None:
    assert_is_found(script, tmp_path, gate, on_double, assert_is_its_own)
