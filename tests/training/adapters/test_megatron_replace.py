"""Megatron-Core's distributed optimizer with two instances: a rank is replaced, and the job ends as
one without a fault.
"""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.training import resilient
from tests.training.adapters import megatron_on_processors, on_double
from tests.training.adapters.test_megatron import PARALLEL, STEPS, Run, Training
from tests.training.ranks.asynchronous import BACKEND
from tests.training.ranks.behind import OnDouble
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.jobs import assert_same
from tests.training.ranks.replaced import Replaced

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.long
DIES = 5
PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "frameworks.md").read_text(encoding="utf-8")
(EXAMPLE,) = (
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if "restore_megatron" in block
)
JOB_S = 600.0


def step_of(training: Training, number: int) -> None:
    from megatron.core import parallel_state

    torch.manual_seed(1000 * number + parallel_state.get_data_parallel_rank())
    training.step()
    training.end_of_step()


def train(run: Any, place: Path, layout: Run, process: int, device: OnDouble | None = None) -> None:
    """As a script is: groups and model are made inside.

    The page's example is what makes and restores them.
    """
    from megatron.core import parallel_state

    warnings.simplefilter("ignore")
    made: list[Training] = []
    number = 0
    rank = run.rank

    def setup() -> tuple[Any, Any, Any, int]:
        made.append(Training(rank, layout))
        if device is not None:
            made[0].order = device.order
            on_double.order_megatron(device)
        made[0].at = at
        return [made[0].model], made[0].optimizer, made[0].scheduler, 0

    def at(point: str) -> None:
        if (number, layout.dies.get(rank), process) == (DIES, point, 0):
            os.kill(os.getpid(), signal.SIGKILL)

    run.at = at
    groups = SimpleNamespace(
        destroy_model_parallel=parallel_state.destroy_model_parallel,
        initialize_model_parallel=lambda **_: (
            None
        ),  # `Training` does it, with the sizes of this test
    )
    job = SimpleNamespace(init_process_group=lambda _: dist.init_process_group(BACKEND))
    names: dict[str, Any] = {
        "dist": dist if device is None else job,
        "parallel_state": groups,
        "setup": setup,
        "run": run,
        "global_batch_size": 1,
    }
    exec(EXAMPLE, names)  # the example itself
    (training,) = made
    for number in range(names["iteration"] + 1, STEPS + 1):  # `at` looks at it
        step_of(training, number)
    torch.save(training.state(), place / f"end-{rank}.pt")


def without_fault(rank: int, place: Path, layout: Run) -> None:
    warnings.simplefilter("ignore")
    device = on_double.join(rank, layout.world, place / "store") if layout.double else None
    if device is None:
        join_group(rank, layout.world, place / "store")
    else:
        on_double.put_megatron(device)
    training = Training(rank, layout)
    if device is not None:
        training.order = device.order
        on_double.order_megatron(device)
    for number in range(1, STEPS + 1):
        step_of(training, number)
    torch.save(training.state(), place / f"whole-{rank}.pt")


@pytest.mark.clause("T34", "T145")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("tensor_parallel", "dies"),
    [
        (1, {1: "ready"}),
        (1, {0: "updating"}),
        (1, {3: "updated"}),
        (1, {1: "gated", 2: "updated"}),
        (2, {0: "updating"}),
    ],
)
def test_a_rank_is_replaced(tmp_path: Path, tensor_parallel: int, dies: dict[int, str]) -> None:
    goes_on(tmp_path, Run(tmp_path / "run", tensor_parallel, dies=dies))


@pytest.mark.clause("T145", "T228")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    "dies",
    [
        {1: "forward"},
        {2: "reduce"},
        {0: "updating"},
        {3: "updated"},
        {1: "gated", 2: "updated"},
    ],
)
def test_a_rank_is_replaced_on_the_double(
    tmp_path: Path, dies: dict[int, str], *, clips: bool
) -> None:
    goes_on(tmp_path, Run(tmp_path / "run", double=True, clips=clips, dies=dies))


@pytest.mark.clause("T145", "T228")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", PARALLEL)
@pytest.mark.parametrize("dies", [{1: "forward"}, {3: "updating"}])
def test_a_rank_of_a_parallel_model_is_replaced_on_the_double(
    tmp_path: Path, layout: str, dies: dict[int, str]
) -> None:
    goes_on(tmp_path, Run(tmp_path / "run", double=True, dies=dies, **PARALLEL[layout]))


@pytest.mark.clause("T145")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", PARALLEL)
def test_a_rank_of_a_parallel_model_is_replaced(tmp_path: Path, layout: str) -> None:
    goes_on(tmp_path, Run(tmp_path / "run", dies={1: "gated"}, **PARALLEL[layout]))


def goes_on(tmp_path: Path, layout: Run) -> None:
    """A job ends as one without a fault, bit for bit."""
    dies = layout.dies
    megatron_on_processors.stand_in()
    with Ranks(layout.world, tmp_path, lambda rank: without_fault(rank, tmp_path, layout)) as ranks:
        assert ranks.statuses(JOB_S) == [0] * layout.world, ranks.said()

    def main(rank: int, process: int) -> None:
        device = None
        if layout.double:
            device = on_double.begin(tmp_path)
            on_double.put_megatron(device)
        resilient(layout.directory)(train)(tmp_path, layout, process, device)

    with Replaced(layout.world, tmp_path, main) as replaced:
        assert isinstance(replaced, Replaced)
        counts = replaced.tend(timeout_s=JOB_S)
    assert all(counts[rank] > 1 for rank in dies)
    for rank in range(layout.world):
        found, expected = (
            torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False)
            for name in ("end", "whole")
        )
        assert_same(found, expected, f"rank {rank}")
