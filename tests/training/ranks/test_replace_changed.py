"""What a loop does to parameters beside its updates, where ranks are replaced: no rank is given it,
or has it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from acpfs.errors import ConfigError
from acpfs.training.messages import Phase, Stopped
from acpfs.training.torch.holding import TorchHolding
from tests.training.ranks import replaced
from tests.training.ranks.behind import OnDouble, OnProcessors, Place
from tests.training.ranks.forked import Ranks
from tests.training.ranks.jobs import Job, hsdp, network
from tests.training.ranks.replaced import Plan, die, run_job
from tests.training.ranks.test_state_stopped import Stopping

DIES = 5
RUNS: list[Any] = []
"""What the script of this process holds."""


@dataclass
class Halved(Job):
    """Its parameters are halved behind each update; it says so."""

    def __post_init__(self) -> None:
        self.after_update = self.follow

    def follow(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().mul_(0.5)
        self.scheduler.step()

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(4, 16)
        self.optimizer.zero_grad()
        (self.model(batch) - batch).square().mean().backward()
        self.optimizer.step()
        at("before")
        self.follow()
        at("behind")


@dataclass
class Evaluated(Job):
    """Other parameters are swapped in behind each update, and all ranks meet then."""

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        super().step(number, at)
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        with RUNS[-1].long_operation() if RUNS else nullcontext():
            for parameter in self.model.parameters():
                parameter.data.fill_(77)
            at("evaluating")
            dist.barrier()
            for parameter, value in zip(self.model.parameters(), kept, strict=True):
                parameter.data.copy_(value)


def made(kind: type[Job]) -> Callable[[], Job]:
    def make() -> Job:
        plain = hsdp()
        return kind(plain.model, plain.optimizer, plain.scheduler)

    return make


@pytest.mark.long
@pytest.mark.clause("T180")
@pytest.mark.parametrize(
    ("kind", "point"), [(Halved, "before"), (Halved, "behind"), (Evaluated, "evaluating")]
)
def test_a_rank_dies_where_parameters_are_changed_behind_an_update(
    tmp_path: Path, yardsticks: Path, kind: type[Job], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(replaced.KINDS, kind.__name__, made(kind))
    plan = Plan(kind.__name__, {(1, 0, point, DIES): die}, enter=RUNS.append)
    assert run_job(plan, tmp_path, yardsticks)[1] > 1


def _is_refused(directory: Path, place: Place) -> None:
    place.join(0, directory, 1)
    net = network()
    net[0].weight.requires_grad_(False)
    optimizer = place.adam(net.parameters())
    held = TorchHolding(DistributedDataParallel(net), [optimizer])
    held.look()
    net[0].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="behind restore"):
        held.look()


@pytest.mark.clause("T180")
@pytest.mark.parametrize("place", [OnProcessors(), OnDouble()], ids=["gloo", "double"])
def test_what_is_trained_from_some_update_on_is_refused(tmp_path: Path, place: Place) -> None:
    with Ranks(1, tmp_path, lambda _: _is_refused(tmp_path, place)) as ranks:
        assert ranks.statuses() == [0], ranks.said()


@pytest.mark.clause("T180")
def test_what_was_changed_and_not_copied_is_taken_from_another_rank() -> None:
    rank = Stopping()
    rank.come()
    with torch.no_grad():
        rank.parameter.mul_(0.5)
    rank.stop()
    assert rank.state.stopped == Stopped(5, 5, Phase.COMPUTING, damaged=("all",))
