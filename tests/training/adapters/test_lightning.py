"""Lightning: what survivors leave is a `.ckpt`, and `ckpt_path=` goes on from there as if nothing
had been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback as TrainerCallback
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from acpfs.training.frameworks.lightning import FILE, Protect, newest
from tests.training.adapters.runs import (
    STEPS,
    WIDTH,
    WORLD,
    Run,
    assert_is_found,
    assert_resumes_as_from,
    network,
    with_fault,
    without_fault,
)
from tests.training.ranks.behind import WRONG
from tests.training.ranks.jobs import BATCH, assert_same

pytestmark = pytest.mark.long
ACCUMULATED = 2
EPOCHS = 2
BATCHES = STEPS * ACCUMULATED // EPOCHS


class Batches:
    """A loader that can say where it is."""

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        if self.position == BATCHES:
            self.epoch = self.epoch + 1
            self.position = 0
        while self.position < BATCHES:
            self.position += 1
            made = torch.Generator().manual_seed(
                1000 * self.epoch + 10 * self.position + dist.get_rank()
            )
            yield torch.randn(BATCH, WIDTH, generator=made)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self.epoch = value["epoch"]
        self.position = value["position"]


class Module(LightningModule):  # type: ignore[misc]  # lightning is Any where types are checked
    def __init__(self, adam: Callable[..., Any] = torch.optim.Adam) -> None:
        super().__init__()
        self.network = network()
        self.adam = adam

    def training_step(self, batch: Any) -> Any:
        return (self.network(batch) - batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Points(TrainerCallback):  # type: ignore[misc]  # lightning is Any where types are checked
    def __init__(self, rank: int, run: Run) -> None:
        self.rank = rank
        self.run = run

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.run.at(self.rank, "begin", trainer.global_step + 1)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.fit_loop.batch_idx % ACCUMULATED == ACCUMULATED - 1:
            self.run.at(self.rank, "backward", trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.run.at(self.rank, "reduced", trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.run.at(self.rank, "end", trainer.global_step)


def script(rank: int, run: Run) -> Any:
    """Dropout, clipping, accumulation, two epochs."""
    callbacks: list[Any] = [Points(rank, run), Protect(run.directory, **run.options)]
    if not (run.protected or run.resumed):
        callbacks += [
            ModelCheckpoint(run.directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        ]
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=EPOCHS * run.steps // STEPS,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=0.05,
        logger=False,
        enable_checkpointing=not (run.protected or run.resumed),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    module = Module(run.adam)
    torch.manual_seed(11)
    trainer.fit(module, Batches(), ckpt_path=newest(run.directory) if run.resumed else None)
    ends = {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "step": trainer.global_step,
    }
    return {
        **ends,
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_fault(script, tmp_path_factory.mktemp("whole"))


@pytest.mark.clause("T32")
@pytest.mark.parametrize(("rank", "point"), [(1, "begin"), (0, "reduced"), (0, "end")])
def test_a_rank_dies(tmp_path: Path, whole: Path, rank: int, point: str) -> None:
    gasp = with_fault(script, tmp_path, {rank: point})
    own = assert_is_its_own(gasp, whole)
    assert_resumes_as_from(own, script, tmp_path, gasp)


def assert_is_its_own(gasp: Path, whole: Path) -> Path:
    """What Lightning saves at that step of a run without a fault, bit for bit; where that is."""
    assert {path.name for path in gasp.iterdir()} == {FILE, "gasp.json"}
    step = int(gasp.name.removeprefix("step-"))
    found, own = (
        torch.load(path, weights_only=False) for path in (gasp / FILE, whole / f"step={step}.ckpt")
    )
    assert found.keys() == own.keys()
    for name in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(found[name], own[name], name)
    assert found["loops"]["fit_loop"] == own["loops"]["fit_loop"]
    return whole / f"step={step}.ckpt"


@pytest.fixture(scope="module")
def on_double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a fault."""
    return without_fault(script, tmp_path_factory.mktemp("on-double"), double=True)


@pytest.mark.clause("T229")
@pytest.mark.parametrize(("rank", "point"), [(1, "begin"), (0, "reduced"), (0, "end")])
def test_a_rank_dies_on_the_double(tmp_path: Path, on_double: Path, rank: int, point: str) -> None:
    gasp = with_fault(script, tmp_path, {rank: point}, double=True)
    own = assert_is_its_own(gasp, on_double)
    assert_resumes_as_from(own, script, tmp_path, gasp, double=True)


@pytest.mark.clause("T229")
@pytest.mark.parametrize("gate", sorted(WRONG))
def test_each_wrong_gate_is_found(tmp_path: Path, on_double: Path, gate: str) -> None:
    """Lightning's host waits for all ranks at each batch: one that dies has come to the last of an
    update, and the others are ahead of their devices for the rest of that one only.
    """
    assert_is_found(script, tmp_path, gate, on_double, assert_is_its_own, "backward")
