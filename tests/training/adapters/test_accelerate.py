"""A loop of one's own with accelerate: what survivors leave loads with `load_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader, TensorDataset

from acpfs.training.frameworks.accelerate import protect_accelerator
from tests.training.adapters.runs import (
    DIES,
    WIDTH,
    Run,
    assert_is_found,
    assert_resumes_as_from,
    network,
    with_fault,
    without_fault,
)
from tests.training.ranks.behind import WRONG
from tests.training.ranks.jobs import assert_same

pytestmark = pytest.mark.long
EPOCH = 4
"""Updates."""


class Counter:
    """Something of the loop's own."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self.done = value["done"]


def script(rank: int, run: Run) -> Any:
    elsewhere = ProjectConfiguration(
        str(run.directory / "project"), automatic_checkpoint_naming=run.protected, total_limit=1
    )
    accelerator = Accelerator(cpu=True, project_config=elsewhere)
    counter = Counter()
    torch.manual_seed(3)
    loader = DataLoader(
        TensorDataset(torch.randn(EPOCH * 3 * 2, WIDTH)), batch_size=2, shuffle=True
    )
    model = network()
    optimizer = run.adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(counter)
    if run.resumed:
        accelerator.load_state(str(run.directory / (run.directory / "latest").read_text().strip()))

    def train() -> None:
        for epoch in range(counter.done // EPOCH, run.steps // EPOCH):
            loader.set_epoch(epoch)
            skipped = counter.done - epoch * EPOCH
            for (batch,) in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
                update = counter.done + 1
                run.at(rank, "begin", update)
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                run.at(rank, "reduced", update)
                optimizer.step()
                run.at(rank, "updated", update)
                scheduler.step()
                optimizer.zero_grad()
                counter.done = update
                if not (run.protected or run.resumed):
                    accelerator.save_state(str(run.directory / f"step-{update}"))

    if run.protected:

        def after_update() -> None:
            counter.done += 1

        with protect_accelerator(
            accelerator, run.directory, model=model, after_update=after_update, **run.options
        ):
            train()
    else:
        train()
    ends = {
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    return {**ends, "model": accelerator.unwrap_model(model).state_dict(), "done": counter.done}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_fault(script, tmp_path_factory.mktemp("whole"))


@pytest.mark.clause("T31")
@pytest.mark.parametrize(("rank", "point"), [(0, "begin"), (1, "updated")])
def test_a_rank_dies(tmp_path: Path, whole: Path, rank: int, point: str) -> None:
    gasp = with_fault(script, tmp_path, {rank: point})
    assert_is_its_own(gasp, whole)
    assert_resumes_as_from(whole / gasp.name, script, tmp_path, gasp)


def assert_is_its_own(gasp: Path, whole: Path) -> None:
    """What accelerate saves at that step of a run without a fault, bit for bit."""
    own = whole / gasp.name
    assert {path.name for path in gasp.iterdir()} == {path.name for path in own.iterdir()} | {
        "gasp.json"
    }
    assert (gasp / "model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
    for name in ("optimizer.bin", "scheduler.bin"):
        assert_same(
            *(torch.load(checkpoint / name, weights_only=False) for checkpoint in (gasp, own))
        )


@pytest.fixture(scope="module")
def on_double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a fault."""
    return without_fault(script, tmp_path_factory.mktemp("on-double"), double=True)


@pytest.mark.clause("T229")
@pytest.mark.parametrize(("rank", "point"), [(0, "begin"), (2, "reduced"), (1, "updated")])
def test_a_rank_dies_on_the_double(tmp_path: Path, on_double: Path, rank: int, point: str) -> None:
    gasp = with_fault(script, tmp_path, {rank: point}, double=True)
    assert_is_its_own(gasp, on_double)
    assert_resumes_as_from(on_double / gasp.name, script, tmp_path, gasp, double=True)


def accumulating(rank: int, run: Run) -> Any:
    """Two backward passes to an update; in the one of the fault all others stay in the first."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = run.adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def backward_pass(update: int, number: int) -> None:
        torch.manual_seed(1000 * update + 10 * number + rank)
        batch = torch.randn(2, WIDTH)
        with accelerator.accumulate(model):
            accelerator.backward((model(batch) - batch).square().mean())
            run.at(rank, "accumulated", update)
            while run.dies and update == DIES:
                pass
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def train() -> None:
        for update in range(1, run.steps + 1):
            for number in range(2):
                backward_pass(update, number)
            if not run.protected:
                accelerator.save_state(str(run.directory / f"step-{update}"))

    if run.protected:
        with protect_accelerator(accelerator, run.directory, model=model):
            train()
    else:
        train()


@pytest.mark.clause("T195", "T229")
@pytest.mark.parametrize("double", [False, True], ids=["gloo", "double"])
def test_a_rank_dies_in_the_middle_of_accumulated_gradients(
    tmp_path: Path, *, double: bool
) -> None:
    whole = without_fault(accumulating, tmp_path / "without", double=double)
    gasp = with_fault(accumulating, tmp_path / "with", {1: "accumulated"}, double=double)
    assert_is_its_own(gasp, whole)


@pytest.mark.clause("T229")
@pytest.mark.parametrize("gate", sorted(WRONG))
def test_each_wrong_gate_is_found(tmp_path: Path, on_double: Path, gate: str) -> None:
    assert_is_found(script, tmp_path, gate, on_double, assert_is_its_own)
