"""torchtitan's own trainer where the others leave the last step: the recipe of
docs/guide/frameworks.md. A rank dies, the job is started again, and ends with what it has without
the fault, bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from acpfs.training import protect
from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus
from tests.rig.ports import free_port
from tests.training.ranks.forked import Ranks
from tests.training.trainers.test_torchtitan import DIES_AT, STEPS, WORLD, assert_same_end, end_of
from tests.training.trainers.titan_on_processors import Trainer, config

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "frameworks.md").read_text(encoding="utf-8")
LOAD, TRAIN = (
    next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if begin in block)
    for begin in ("def load_gasp(", "protection = protect(\n")
)
pytestmark = pytest.mark.long
clause = pytest.mark.clause


def run_job(
    directory: Path, *, copies: int, dies: dict[int, str], expected: list[int], name: str
) -> None:
    """To its end, or until ranks have died. `dies`: rank → point in update `DIES_AT`. What is left
    of a gasp is loaded.
    """
    directory.mkdir(exist_ok=True)
    folder = str(directory / "titan")
    job = config(folder, copies=copies, ranks=WORLD, steps=STEPS, interval=STEPS)
    job.checkpoint.enable = not dies
    port = free_port()

    def main(rank: int) -> None:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(WORLD),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )

        def protected(where: str, **given: Any) -> Any:
            trainer = given["state"]["trainer"]
            protection = protect(where, buddy_every=0 if copies > 1 else 1, **given)

            def at(point: str) -> None:
                if dies.get(rank) == point and trainer.step == DIES_AT:
                    os.kill(os.getpid(), signal.SIGKILL)

            protection.at(at)
            return protection

        names = {
            "Trainer": Trainer,
            "Path": Path,
            "config": job,
            "dcp": dcp,
            "get_state_dict": get_state_dict,
            "protect": protected,
            "set_state_dict": set_state_dict,
            "torch": torch,
        }
        for example in (LOAD, TRAIN):  # the examples themselves
            exec(example.replace("/mnt/acp/run1", str(directory / "run")), names)
        torch.save(end_of(names["trainer"]), directory / f"end-{rank}.pt")

    (directory / name).mkdir()
    with Ranks(WORLD, directory / name, main) as ranks:
        assert ranks.statuses() == expected, ranks.said()


@clause("T232")
@pytest.mark.parametrize("copies", [2, 1], ids=["with copies", "fully sharded"])
@pytest.mark.parametrize(
    "dies",
    [{1: "ready"}, {0: "gated"}, {3: "updating"}, {1: "updated"}, {0: "gated", 1: "updated"}],
)
def test_a_rank_of_torchtitan_dies(tmp_path: Path, copies: int, dies: dict[int, str]) -> None:
    run_job(tmp_path / "without", copies=copies, dies={}, expected=[0] * WORLD, name="whole")
    left = [-signal.SIGKILL if rank in dies else ExitStatus.SAVED for rank in range(WORLD)]
    run_job(tmp_path / "with", copies=copies, dies=dies, expected=left, name="dies")
    run = tmp_path / "with" / "run"
    manifest = verify(run / (run / "latest").read_text().strip())
    assert manifest.step in range(DIES_AT - 2, DIES_AT + 1)
    assert not manifest.differing
    run_job(tmp_path / "with", copies=copies, dies={}, expected=[0] * WORLD, name="resumed")
    assert_same_end(tmp_path / "with", tmp_path / "without")
