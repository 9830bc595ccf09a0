"""A loop with a collective of its own between gradients and update: no other gate, and its result
reaches whom it did not let through.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from acpfs.errors import ConfigError
from acpfs.training import protect
from acpfs.training.marks import Mark, Marks
from acpfs.training.messages import GateResult, Phase
from acpfs.training.torch.gate import ImplicitGate, NoGate
from acpfs.training.torch.hooks import UpdateCalls, UpdateHooks
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.gasps import DIES, STEPS, WORLD, Fault
from tests.training.ranks.jobs import JOBS
from tests.training.ranks.test_gasp import gasp


@pytest.fixture(scope="module")
def yardsticks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yardsticks")


def parameter() -> Any:
    made = torch.nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3)
    return made


def gated() -> tuple[UpdateHooks, Marks, ImplicitGate, Any]:
    value = parameter()

    def clip(values: tuple[float, ...]) -> None:
        value.grad.div_(values[0])

    optimizer = torch.optim.SGD([value], lr=1.0)
    marks = Marks()
    gate = ImplicitGate(clip)
    hooks = UpdateHooks([optimizer], marks, gate, UpdateCalls(lambda step: None))
    hooks.install()
    return hooks, marks, gate, (value, optimizer)


@pytest.mark.clause("T28")
def test_the_update_begins_where_the_block_ends() -> None:
    hooks, marks, gate, (_, optimizer) = gated()
    with hooks.implicit_gate() as passage:
        assert marks.now == Mark(0, 1, Phase.READY)
        passage.values = (2.0,)
    assert marks.updating
    assert gate.result == GateResult(1, (2.0,))
    optimizer.step()
    assert marks.now == Mark(1, 1, Phase.COMPUTING)


@pytest.mark.clause("T28")
def test_who_was_not_let_through_does_the_update_with_what_it_gave_to_others() -> None:
    hooks, marks, gate, (value, _) = gated()
    with pytest.raises(RuntimeError), hooks.implicit_gate():
        raise RuntimeError("Connection closed by peer")
    assert gate.result is None
    marks.hold()
    hooks.finish_alone((4.0,))
    assert marks.now == Mark(1, 1, Phase.COMPUTING)
    assert torch.equal(value, torch.full((3,), 0.75))


@pytest.mark.clause("T28")
def test_an_overflow_is_no_update() -> None:
    hooks, marks, gate, (_, optimizer) = gated()
    with hooks.implicit_gate() as passage:
        passage.skipped = True
    assert gate.result is None
    assert marks.now == Mark(0, 1, Phase.READY)
    with hooks.implicit_gate():
        pass
    optimizer.step()
    assert marks.now == Mark(1, 1, Phase.COMPUTING)


@pytest.mark.clause("T28")
def test_an_update_outside_of_the_block_is_refused() -> None:
    _, _, _, (_, optimizer) = gated()
    with pytest.raises(ConfigError, match=r"protection\.gate"):
        optimizer.step()
    other = UpdateHooks([optimizer], Marks(), NoGate(), UpdateCalls(lambda step: None))
    with pytest.raises(ConfigError, match="gate="), other.implicit_gate():
        pass


def _zero_alone(rank: int, store: Path) -> None:
    join_group(rank, 1, store)
    alone = parameter()
    together = parameter()
    optimizer = ZeroRedundancyOptimizer([alone], torch.optim.Adam, lr=0.1)
    yardstick = ZeroRedundancyOptimizer([together], torch.optim.Adam, lr=0.1)
    calls = UpdateCalls(lambda step: None)
    hooks = UpdateHooks([optimizer], Marks(), ImplicitGate(lambda values: None), calls)
    for outer in (optimizer, yardstick):
        outer.param_groups[0]["lr"] = 0.05  # as a scheduler does
    with pytest.raises(RuntimeError), hooks.implicit_gate():
        raise RuntimeError("Connection closed by peer")
    hooks.finish_alone(())
    yardstick.step()
    assert torch.equal(alone, together)


@pytest.mark.clause("T28")
def test_an_update_alone_has_the_learning_rate_of_its_step(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, lambda rank: _zero_alone(rank, tmp_path / "store")) as ranks:
        assert ranks.statuses() == [0], ranks.said()


@pytest.mark.long
@pytest.mark.clause("T28")
@pytest.mark.parametrize(
    "point", ["reduce", "ready", "let_through", "gated", "clipped", "updated", "sent_round"]
)
def test_a_rank_dies(tmp_path: Path, yardsticks: Path, point: str) -> None:
    gasp(Fault("clipped", {1: point}), tmp_path, yardsticks)


@pytest.mark.long
@pytest.mark.clause("T28")
def test_a_survivor_was_not_let_through(tmp_path: Path, yardsticks: Path) -> None:
    """It clips by a norm that it never saw."""
    assert gasp(Fault("clipped", {1: "updated"}, {2: "let_through"}), tmp_path, yardsticks) == DIES


def _tidying(rank: int, directory: Path, store: Path) -> None:
    join_group(rank, WORLD, store)
    job = JOBS["hsdp"]()  # with a gate, so that all meet

    def told(name: str, *values: object) -> None:
        print("told", name, *values)

    protection = protect(
        directory,
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        on_stopped=lambda: told("stopped"),
        on_settled=lambda step: told("settled", step),
        on_saved=lambda path: told("saved", path.name, path.is_dir()),
    )
    with protection:
        for number in range(1, STEPS + 1):
            if (rank, number) == (3, DIES):
                raise ValueError("a bug in one rank")
            job.step(number)


@pytest.mark.long
@pytest.mark.clause("T29")
def test_survivors_are_told(tmp_path: Path) -> None:
    with Ranks(
        WORLD, tmp_path, lambda rank: _tidying(rank, tmp_path / "run", tmp_path / "store")
    ) as ranks:
        assert ranks.statuses() == [75] * WORLD
        for rank in range(WORLD):
            lines = [
                line for line in ranks.log(rank).read_text().splitlines() if line.startswith("told")
            ]
            assert lines == [
                "told stopped",
                f"told settled {DIES - 1}",
                f"told saved step-{DIES - 1} True",
            ]
