"""A loop without DDP and without an optimizer: its own state, its own update, its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training import protect
from tests.training.adapters.runs import (
    STEPS,
    WIDTH,
    WORLD,
    Run,
    assert_resumes,
    with_fault,
    without_fault,
)

pytestmark = pytest.mark.long
RATE = 0.1
MOMENTUM = 0.9


class Loop:
    """Linear regression with momentum, by hand."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.weight = torch.randn(WIDTH, WIDTH)
        self.velocity = torch.zeros(WIDTH, WIDTH)
        self.done = 0
        self.gradient = torch.zeros(WIDTH, WIDTH)

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight, "velocity": self.velocity}

    def compute(self, rank: int) -> None:
        batch = torch.randn(WORLD * 4, WIDTH)[
            rank::WORLD
        ]  # the same numbers in all ranks, of which each has its part
        self.gradient = batch.T @ (batch @ self.weight - batch)
        dist.all_reduce(self.gradient)

    def update(self) -> None:
        self.velocity.mul_(MOMENTUM).add_(self.gradient, alpha=-RATE / 100)
        self.weight.add_(self.velocity)

    def after_update(self) -> None:
        self.done += 1

    def save(self, step: int, directory: Path) -> None:
        torch.save(
            {**self.state(), "done": step, "random": torch.get_rng_state()}, directory / "loop.pt"
        )

    def load(self, path: Path) -> None:
        found = torch.load(path, weights_only=True)
        self.weight = found["weight"]
        self.velocity = found["velocity"]
        self.done = found["done"]
        torch.set_rng_state(found["random"])


def script(rank: int, run: Run) -> Any:
    loop = Loop()
    if run.resumed:
        loop.load(run.directory / (run.directory / "latest").read_text().strip() / "loop.pt")
    protection = protect(
        run.directory,
        state=loop.state,
        save=loop.save,
        update=loop.update,
        after_update=loop.after_update,
        step=loop.done,
    )
    with protection:
        for update in range(loop.done + 1, STEPS + 1):
            run.at(rank, "begin", update)
            loop.compute(rank)
            run.at(rank, "reduced", update)
            protection.begin_update()
            run.at(rank, "updating", update)
            loop.update()
            protection.end_update()
            run.at(rank, "updated", update)
            loop.after_update()
    return {**loop.state(), "done": loop.done, "random": torch.get_rng_state()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_fault(script, tmp_path_factory.mktemp("whole"))


@pytest.mark.clause("T33")
@pytest.mark.parametrize(
    ("rank", "point"), [(1, "begin"), (0, "reduced"), (2, "updating"), (0, "updated")]
)
def test_a_rank_dies(tmp_path: Path, whole: Path, rank: int, point: str) -> None:
    gasp = with_fault(script, tmp_path, {rank: point})
    assert {path.name for path in gasp.iterdir()} == {"loop.pt", "gasp.json"}
    assert_resumes(script, tmp_path, gasp, whole)


@pytest.mark.clause("T33")
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(ConfigError, match="model="):
        protect(tmp_path)
    with pytest.raises(ConfigError, match="model="):
        protect(tmp_path, model=torch.nn.Linear(1, 1), state=loop.state)
    with pytest.raises(ConfigError, match="update="):
        protect(tmp_path, state=loop.state, save=loop.save)
