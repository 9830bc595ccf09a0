"""torchtitan's own trainer where ranks are replaced: the recipe of docs/TRAINING.md. A rank dies,
and all end with what they have without the fault, bit for bit.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._utils

from acpfs.training import resilient
from tests.rig.ports import free_port
from tests.training.ranks.behind import OnProcessors, Place
from tests.training.ranks.jobs import assert_same
from tests.training.ranks.replaced import Replaced
from tests.training.trainers.titan_on_double import put
from tests.training.trainers.titan_on_processors import Trainer, config, utils

WORLD = 4
STEPS = 6
DIES_AT = 4
SAVED_AT = 2
"""And at each further multiple of it."""
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


def run_job(
    directory: Path, *, copies: int, dies: str, dies_at: int = DIES_AT, double: bool = False
) -> set[int]:
    """To its end; the steps at which generations have begun. `dies`: the point of an update at
    which rank 1 does; empty: nobody does. A checkpoint that is there is loaded.
    """
    directory.mkdir(exist_ok=True)
    folder = str(directory / "titan")
    job = config(folder, copies=copies, ranks=WORLD, steps=STEPS, interval=SAVED_AT)

    def main(rank: int, process: int) -> None:
        place: Place = put(directory) if double else OnProcessors()

        def train(run: Any) -> None:
            trainer = Trainer(job)

            def at(point: str) -> None:
                if (rank, process, point, trainer.step) == (1, 0, dies, dies_at):
                    os.kill(os.getpid(), signal.SIGKILL)

            def computed(*batch: Any, **named: Any) -> Any:
                at("forward")
                return compute(*batch, **named)

            compute = trainer.forward_backward_step
            trainer.forward_backward_step = computed
            run.at = at
            trainer.checkpointer.load(step=job.checkpoint.load_step)
            step = run.restore(
                model=trainer.model_parts[0],
                optimizer=list(trainer.optimizers),
                scheduler=trainer.lr_schedulers,
                state={"trainer": trainer, "loader": trainer.dataloader},
                step=trainer.step,
            )
            assert step == trainer.step
            (directory / f"begun-{rank}-{run.generation}").write_text(str(trainer.step))
            trainer.checkpointer.load = lambda step: False
            trainer.train()
            place.wait()
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


def assert_same_end(found: Path, expected: Path) -> None:
    """Of all ranks, bit for bit."""
    for rank in range(WORLD):
        mine, right = (
            torch.load(where / f"end-{rank}.pt", weights_only=True) for where in (found, expected)
        )
        assert_same(mine, right, f"rank {rank}")


def test_other_tests_have_torch_as_it_is() -> None:
    """The stand-in for a device is torchtitan's alone."""
    assert utils.device_type == "cpu"
    for asked in (torch._utils._get_available_device_type, torch._utils._get_device_module):
        assert asked.__module__ == "torch._utils"
    assert ("triton" in sys.modules) == bool(importlib.util.find_spec("triton"))


@clause("T226")
@pytest.mark.parametrize("copies", [2, 1], ids=["with copies", "fully sharded"])
@pytest.mark.parametrize("dies", ["updating", "updated"])
def test_a_rank_of_torchtitan_is_replaced(tmp_path: Path, copies: int, dies: str) -> None:
    assert_is_replaced(tmp_path, copies, dies)


@clause("T226", "T234")
@pytest.mark.parametrize("copies", [2, 1], ids=["with copies", "fully sharded"])
@pytest.mark.parametrize("dies", ["forward", "updating", "updated"])
def test_a_rank_of_torchtitan_is_replaced_on_the_double(
    tmp_path: Path, copies: int, dies: str
) -> None:
    assert_is_replaced(tmp_path, copies, dies, double=True)


def assert_is_replaced(tmp_path: Path, copies: int, dies: str, *, double: bool = False) -> None:
    run_job(tmp_path / "without", copies=copies, dies="", double=double)
    begun = run_job(tmp_path / "with", copies=copies, dies=dies, double=double)
    # one generation more, from the steps that were done
    assert len(begun) == 2
    assert max(begun) in range(DIES_AT - 2, DIES_AT + 1)
    assert_same_end(tmp_path / "with", tmp_path / "without")


@clause("T226", "T227")
@pytest.mark.parametrize("copies", [2, 1], ids=["with copies", "fully sharded"])
def test_a_rank_of_torchtitan_is_replaced_in_a_job_that_was_started_again(
    tmp_path: Path, copies: int
) -> None:
    """From torchtitan's own checkpoint, whose counts go on; it has saved another one since."""
    run_job(tmp_path / "without", copies=copies, dies="")
    name = f"titan/checkpoint/step-{SAVED_AT}"
    shutil.copytree(tmp_path / "without" / name, tmp_path / "with" / name)
    begun = run_job(tmp_path / "with", copies=copies, dies="updated", dies_at=2 * SAVED_AT + 1)
    assert min(begun) == SAVED_AT
    assert len(begun) == 2
    assert max(begun) in (2 * SAVED_AT, 2 * SAVED_AT + 1)
    assert_same_end(tmp_path / "with", tmp_path / "without")
