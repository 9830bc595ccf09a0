"""Whatever fails in acpfs, Lightning's loop ends as without it: with validation, checkpoints of its
own, and gone on from one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from acpfs.training.frameworks.lightning import Protect
from tests.training.adapters.runs import WIDTH, network
from tests.training.ranks.faulty_loops import UPDATES, WORLD, Trains, Values, assert_goes_on
from tests.training.ranks.test_guard_accelerate import as_launched

pytestmark = [pytest.mark.long, pytest.mark.clause("T178", "T179")]
BEFORE = 1
"""Updates before the checkpoint from which it goes on."""


class Module(LightningModule):  # type: ignore[misc]  # lightning is Any where types are checked
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Any) -> Any:
        return (self.network(batch) - batch).square().mean()

    def validation_step(self, batch: Any) -> None:
        self.network(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def fitted(directory: Path, steps: int, protect: list[Any], begins: Path | None) -> Values:
    as_launched()
    torch.manual_seed(7 + dist.get_rank())
    rows = torch.randn(4 * (UPDATES + BEFORE), WIDTH)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=steps,
        val_check_interval=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*protect, ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1)],
    )
    module = Module()
    trainer.fit(module, DataLoader(rows, 4), DataLoader(rows[:4], 4), ckpt_path=begins)
    assert trainer.global_step == steps
    return [value.detach() for value in module.parameters()]


def with_lightning(protected: bool) -> Trains:
    def train(directory: Path) -> Values:
        first = directory.parent.parent / "first"  # of both ranks, written by one of them
        if not first.exists():
            fitted(first, BEFORE, [Protect(directory)] if protected else [], None)
        (begins,) = first.glob("*.ckpt")
        callbacks = [Protect(directory)] if protected else []
        return fitted(directory, BEFORE + UPDATES, callbacks, begins)

    return train


def test_with_lightning(tmp_path: Path) -> None:
    assert_goes_on(with_lightning, tmp_path)
