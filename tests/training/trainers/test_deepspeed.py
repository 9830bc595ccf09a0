"""DeepSpeed's ZeRO where ranks are replaced: a rank dies, and all end with what they have without
the fault, bit for bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training import resilient
from acpfs.training.frameworks.deepspeed import (
    DeepSpeedHolding,
    forget_generation,
    restore_deepspeed,
)
from tests.rig.ports import free_port
from tests.training.ranks.asynchronous import AsynchronousGroup
from tests.training.ranks.behind import OnDouble, OnProcessors, Place
from tests.training.ranks.jobs import BATCH, WIDTH, assert_same, network
from tests.training.ranks.replaced import STEPS, WORLD, Replaced

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
import deepspeed
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# None of its operations is compiled while a job waits: that takes minutes, and training needs none.
deepspeed.ops.__compatible_ops__ = {}
pytestmark = pytest.mark.long
clause = pytest.mark.clause


def put_on_double(directory: Path) -> OnDouble:
    """Of this process, before its first group. DeepSpeed computes with what is reduced, and casts
    behind the update: a stream would have order, and the host waits for this one.
    """
    place = OnDouble()
    place.enter(directory)
    AsynchronousGroup.is_read_at_once = True
    for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        steps = kind._optimizer_step

        def stepped(zero: Any, number: int, steps: Any = steps) -> None:
            steps(zero, number)
            place.order()

        kind._optimizer_step = stepped
    return place


def engine_of(
    stage: int, *, bfloat16: bool, adam: Callable[..., Any] = torch.optim.Adam, **more: Any
) -> Any:
    """An engine, as a script makes it."""
    model = network()
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, **more},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bfloat16},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adam(model.parameters(), lr=0.01),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        config=settings,
    )
    return engine


def end_of(engine: Any, held: DeepSpeedHolding) -> dict[str, Any]:
    """What this rank has."""
    (contents,) = (held.contents(shard) for shard in held.layout.holders)
    is_parted = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=is_parted):
        whole = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    return {
        "part": {key: piece.value for key, piece in contents["part"].items()},
        "whole": whole,
        "counts": [engine.global_steps, engine.global_samples, engine.micro_steps],
        "schedule": engine.lr_scheduler.last_epoch,
        "random": torch.get_rng_state(),
    }


def run_job(
    stage: int,
    directory: Path,
    fault: tuple[str, int],
    *,
    bfloat16: bool,
    double: bool = False,
) -> set[int]:
    """To its end; the steps at which generations have begun. `fault`: point and update at which
    rank 1 dies.
    """
    directory.mkdir()

    def main(rank: int, process: int) -> None:
        place: Place = put_on_double(directory) if double else OnProcessors()

        def train(run: Any) -> None:
            number = 0

            def at(point: str) -> None:
                if (rank, process) == (1, 0) and fault == (point, number):
                    os.kill(os.getpid(), signal.SIGKILL)

            run.at = at
            dist.init_process_group(place.backend)
            forget_generation()
            engine = engine_of(stage, bfloat16=bfloat16, adam=place.adam)
            step = restore_deepspeed(run, engine)
            (directory / f"begun-{rank}-{run.generation}").write_text(str(step))
            for number in range(step + 1, STEPS + 1):
                torch.manual_seed(1000 * number + rank)
                batch = torch.randn(BATCH, WIDTH).to(torch.bfloat16 if bfloat16 else torch.float32)
                loss = (engine(batch) - batch).square().mean()
                at("backward")
                engine.backward(loss)
                at("reduce")
                engine.step()
                at("sent_round")
            found = end_of(engine, DeepSpeedHolding(engine, 0))
            torch.save(found, directory / f"end-{rank}.pt")

        resilient(directory / "run", buddy_every=1)(train)()

    port = free_port()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Replaced(WORLD, directory, main, lambda _: environment) as ranks:
        assert isinstance(ranks, Replaced)
        counts = ranks.tend()
    assert counts == {rank: 1 + (rank == 1 and bool(fault[0])) for rank in range(WORLD)}
    return {int(path.read_text()) for path in directory.glob("begun-*")}


@clause("T215")
@pytest.mark.parametrize(("stage", "bfloat16"), [(1, False), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize("point", ["backward", "updating", "sent_round"])
def test_a_rank_of_zero_is_replaced(
    tmp_path: Path, stage: int, point: str, *, bfloat16: bool
) -> None:
    run_job(stage, tmp_path / "without", ("", 0), bfloat16=bfloat16)
    begun = run_job(stage, tmp_path / "with", (point, 5), bfloat16=bfloat16)
    assert_same_end(tmp_path, begun)


@clause("T204", "T215")
@pytest.mark.parametrize(("stage", "bfloat16"), [(1, False), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize("point", ["backward", "reduce", "updating"])
def test_a_rank_of_zero_is_replaced_on_the_double(
    tmp_path: Path, stage: int, point: str, *, bfloat16: bool
) -> None:
    run_job(stage, tmp_path / "without", ("", 0), bfloat16=bfloat16, double=True)
    begun = run_job(stage, tmp_path / "with", (point, 5), bfloat16=bfloat16, double=True)
    assert_same_end(tmp_path, begun)


def assert_same_end(place: Path, begun: set[int]) -> None:
    """Of all ranks, bit for bit. `begun`: the steps at which generations have."""
    # one generation more: nothing else was raised in the ranks that live
    assert len(begun) == 2
    for rank in range(WORLD):
        found, expected = (
            torch.load(place / which / f"end-{rank}.pt", weights_only=True)
            for which in ("with", "without")
        )
        assert_same(found, expected, f"rank {rank}")


@clause("T215")
def test_what_is_not_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(free_port())),
        ("LOCAL_RANK", "0"),
    ):
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        forget_generation()
        with pytest.raises(ConfigError, match="stage 0"):
            DeepSpeedHolding(engine_of(0, bfloat16=False), 0)
        with pytest.raises(ConfigError, match="sub_group_size"):
            DeepSpeedHolding(engine_of(3, bfloat16=False, sub_group_size=10), 0)
    finally:
        dist.destroy_process_group()
