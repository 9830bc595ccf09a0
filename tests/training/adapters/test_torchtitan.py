"""torchtitan's own trainer where ranks are replaced: the recipe of docs/TRAINING.md. A rank dies,
and all end with what they have without the fault, bit for bit. Skipped where torchtitan is not
installed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from acpfs.training import resilient
from tests.rig.ports import free_port
from tests.training.adapters.titan_on_processors import Trainer, config
from tests.training.ranks.jobs import assert_same
from tests.training.ranks.replaced import Replaced

WORLD = 4
STEPS = 6
DIES_AT = 4
pytestmark = pytest.mark.long
clause = pytest.mark.clause


def end_of(trainer: Any) -> dict[str, Any]:
    """What this rank has."""
    (model,) = trainer.model_parts
    (optimizer,) = trainer.optimizers
    return {
        "model": {name: value.to_local() for name, value in model.named_parameters()},
        "optimizer": [
            {
                key: value.to_local() if hasattr(value, "to_local") else value
                for key, value in state.items()
            }
            for state in optimizer.state.values()
        ],
        "trainer": trainer.state_dict(),
        "schedule": trainer.lr_schedulers.state_dict(),
        "loader": trainer.dataloader.state_dict(),
    }


def run_job(directory: Path, *, copies: int, dies: str) -> set[int]:
    """To its end; the steps at which generations have begun. `dies`: the point of an update at
    which rank 1 does; empty: nobody does.
    """
    directory.mkdir()
    job = config(str(directory / "titan"), copies=copies, ranks=WORLD, steps=STEPS)

    def main(rank: int, process: int) -> None:
        def train(run: Any) -> None:
            trainer = Trainer(job)

            def at(point: str) -> None:
                if (rank, process, point, trainer.step) == (1, 0, dies, DIES_AT):
                    os.kill(os.getpid(), signal.SIGKILL)

            run.at = at
            trainer.checkpointer.load(step=job.checkpoint.load_step)
            run.restore(
                model=trainer.model_parts[0],
                optimizer=list(trainer.optimizers),
                scheduler=trainer.lr_schedulers,
                state={"trainer": trainer, "loader": trainer.dataloader},
            )
            (directory / f"begun-{rank}-{run.generation}").write_text(str(trainer.step))
            trainer.checkpointer.load = lambda step: False
            trainer.train()
            torch.save(end_of(trainer), directory / f"end-{rank}.pt")

        resilient(directory / "run", buddy_every=0 if copies > 1 else 1)(train)()

    port = free_port()

    def environment(rank: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}

    with Replaced(WORLD, directory, main, environment) as ranks:
        assert isinstance(ranks, Replaced)
        counts = ranks.tend()
    assert counts == {rank: 1 + (rank == 1 and bool(dies)) for rank in range(WORLD)}
    return {int(path.read_text()) for path in directory.glob("begun-*")}


@clause("T226")
@pytest.mark.parametrize("copies", [2, 1], ids=["with copies", "fully sharded"])
@pytest.mark.parametrize("dies", ["updating", "updated"])
def test_a_rank_is_replaced(tmp_path: Path, copies: int, dies: str) -> None:
    run_job(tmp_path / "without", copies=copies, dies="")
    begun = run_job(tmp_path / "with", copies=copies, dies=dies)
    # one generation more, from the steps that were done
    assert len(begun) == 2
    assert max(begun) in range(DIES_AT - 2, DIES_AT + 1)
    for rank in range(WORLD):
        found, expected = (
            torch.load(tmp_path / which / f"end-{rank}.pt", weights_only=True)
            for which in ("with", "without")
        )
        assert_same(found, expected, f"rank {rank}")
