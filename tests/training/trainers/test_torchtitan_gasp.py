"""torchtitan's own trainer where the others leave the last step: the recipe of
docs/guide/frameworks.md. A rank dies, the job is started again, and ends with what it has without
the fault, bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
from functools import partial
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
from tests.training.ranks.behind import FLAG, MANY, WRONG, OnDouble, OnProcessors, Place
from tests.training.ranks.forked import Ranks
from tests.training.trainers.test_torchtitan import DIES_AT, STEPS, WORLD, assert_same_end, end_of
from tests.training.trainers.titan_on_double import put
from tests.training.trainers.titan_on_processors import Trainer, config

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "frameworks.md").read_text(encoding="utf-8")
LOAD, TRAIN = (
    next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if begin in block)
    for begin in ("def load_gasp(", "protection = protect(\n")
)
KILLS = 20
DONE = DIES_AT - 1
SLOW = 3
SLOW_S = 0.3
"""The rank whose collectives take longer where a gate is wrong, and how much."""
pytestmark = pytest.mark.long
clause = pytest.mark.clause


def run_job(
    directory: Path,
    *,
    copies: int,
    dies: dict[int, str],
    expected: list[int] | None,
    name: str,
    double: bool = False,
    gate: str = "",
) -> None:
    """To its end, or until ranks have died. What is left of a gasp is loaded.

    `dies`: rank → point in update `DIES_AT`. `expected`: statuses; None: any. `gate`: which one is
    wrong; empty: none.
    """
    directory.mkdir(exist_ok=True)
    folder = str(directory / "titan")
    steps = MANY if gate == FLAG else STEPS  # garbage ends no loop
    job = config(folder, copies=copies, ranks=WORLD, steps=steps, interval=STEPS)
    job.checkpoint.enable = not dies
    # where the exception came first, no wrong gate would be passed
    options: dict[str, Any] = {"interrupt_after_s": 2.0} if gate else {}
    port = free_port()

    def main(rank: int) -> None:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(WORLD),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )

        if double:
            place: Place = put(directory / name, gate)
        else:
            place = OnProcessors()

        def protected(where: str, **given: Any) -> Any:
            trainer = given["state"]["trainer"]
            protection = protect(where, buddy_every=0 if copies > 1 else 1, **given, **options)

            def at(point: str) -> None:
                if dies.get(rank) == point and trainer.step == DIES_AT:
                    os.kill(os.getpid(), signal.SIGKILL)

            def computed(*batch: Any, **named: Any) -> Any:
                if gate and rank == SLOW and isinstance(place, OnDouble):
                    place.stream.slow_s = SLOW_S if trainer.step == DIES_AT else 0.0
                at("forward")
                return compute(*batch, **named)

            compute = trainer.forward_backward_step
            trainer.forward_backward_step = computed
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
        place.wait()
        torch.save(end_of(names["trainer"]), directory / f"end-{rank}.pt")

    (directory / name).mkdir()
    with Ranks(WORLD, directory / name, main) as ranks:
        statuses = ranks.statuses()
        assert expected is None or statuses == expected, ranks.said()


@clause("T232")
@pytest.mark.parametrize("copies", [2, 1], ids=["with copies", "fully sharded"])
@pytest.mark.parametrize(
    "dies",
    [{1: "ready"}, {0: "gated"}, {3: "updating"}, {1: "updated"}, {0: "gated", 1: "updated"}],
)
def test_a_rank_of_torchtitan_dies(tmp_path: Path, copies: int, dies: dict[int, str]) -> None:
    assert_ends_as_without(tmp_path, copies, dies)


@clause("T232", "T234")
@pytest.mark.parametrize("copies", [2, 1], ids=["with copies", "fully sharded"])
@pytest.mark.parametrize("dies", [{1: "forward"}, {0: "gated"}, {3: "updating"}, {2: "updated"}])
def test_a_rank_of_torchtitan_dies_on_the_double(
    tmp_path: Path, copies: int, dies: dict[int, str]
) -> None:
    assert_ends_as_without(tmp_path, copies, dies, double=True)


def assert_ends_as_without(
    tmp_path: Path, copies: int, dies: dict[int, str], *, double: bool = False
) -> None:
    run = partial(run_job, copies=copies, double=double)
    run(tmp_path / "without", dies={}, expected=[0] * WORLD, name="whole")
    left = [-signal.SIGKILL if rank in dies else ExitStatus.SAVED for rank in range(WORLD)]
    run(tmp_path / "with", dies=dies, expected=left, name="dies")
    directory = tmp_path / "with" / "run"
    manifest = verify(directory / (directory / "latest").read_text().strip())
    assert manifest.step in range(DIES_AT - 2, DIES_AT + 1)
    assert not manifest.differing
    run(tmp_path / "with", dies={}, expected=[0] * WORLD, name="resumed")
    assert_same_end(tmp_path / "with", tmp_path / "without")


@clause("T234")
@pytest.mark.parametrize("gate", sorted(WRONG))
def test_each_wrong_gate_is_found(tmp_path: Path, gate: str) -> None:
    """The number that all reduce goes over gloo, so nobody is past that before all hosts have come;
    one that dies behind it leaves reductions that never end.
    """
    run = partial(run_job, copies=2, double=True)
    run(tmp_path / "without", dies={}, expected=[0] * WORLD, name="whole")
    for kill in range(KILLS):
        place = tmp_path / str(kill)
        dies = {kill % 2: "forward" if gate == FLAG else "gated"}
        run(place, dies=dies, expected=None, name="dies", gate=gate)
        tracker = place / "run" / "latest"
        if not tracker.exists():
            continue
        manifest = verify(tracker.parent / tracker.read_text().strip())
        if manifest.step > DIES_AT or manifest.differing or (gate == FLAG and manifest.step > DONE):
            return
        run(place, dies={}, expected=[0] * WORLD, name="resumed")
        try:
            assert_same_end(place, tmp_path / "without")
        except AssertionError:
            return
    pytest.fail(f"{gate} was not found in {KILLS} kills")
