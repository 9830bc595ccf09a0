"""A loop with a state of its own on a device that runs behind its host: what is queued behind an
aborted collective is in no checkpoint.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training import protect
from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus
from tests.training.ranks.behind import FLAG, MANY, Moment, OnDouble, put_wrong
from tests.training.ranks.forked import Ranks
from tests.training.ranks.gasps import STEPS, WORLD
from tests.training.ranks.jobs import BATCH, WIDTH, assert_same

RATE = 0.001
MOMENTUM = 0.9
DIES = 5
FILE = "loop.pt"


@dataclass
class Loop:
    """Linear regression with momentum, by hand; its update is queued behind the reduction."""

    place: OnDouble

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        self.weight = torch.randn(WIDTH, WIDTH)
        self.velocity = torch.zeros(WIDTH, WIDTH)
        self.gradient = torch.zeros(WIDTH, WIDTH)

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight, "velocity": self.velocity}

    def copies(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.state().items()}

    def compute(self, number: int) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        self.place.order()  # it is behind the update
        batch = torch.randn(BATCH, WIDTH)
        self.gradient = batch.T @ (batch @ self.weight - batch)
        dist.all_reduce(self.gradient)

    def update(self) -> None:
        weight = self.weight.data
        velocity = self.velocity.data
        gradient = self.gradient

        def work() -> None:
            velocity.mul_(MOMENTUM).add_(gradient, alpha=-RATE)
            weight.add_(velocity)

        # torch counts writes when they are launched
        torch.autograd.graph.increment_version((self.weight, self.velocity))
        self.place.do(work)

    def save(self, step: int, directory: Path) -> None:
        torch.save({**self.state(), "step": step}, directory / FILE)


def without_fault(rank: int, directory: Path) -> None:
    place = OnDouble()
    place.join(rank, directory)
    loop = Loop(place)
    for number in range(1, STEPS + 1):
        loop.compute(number)
        loop.update()
        place.wait()
        if rank == 0:
            loop.save(number, directory)
            (directory / FILE).rename(directory / f"{number}.pt")


def protected(rank: int, fault: Moment, directory: Path, exits: bool) -> None:
    place = OnDouble()
    place.join(rank, directory)
    loop = Loop(place)
    settings: dict[str, Any] = {}
    last = STEPS
    if fault.gate:
        put_wrong(fault.gate)
        last = MANY  # garbage ends no loop
        settings["interrupt_after_s"] = 2.0  # else it comes before the wrong gate is passed
    protection = protect(
        directory / "run", state=loop.state, save=loop.save, update=loop.update, **settings
    )
    number = 0

    def at(point: str) -> None:
        fault.reached(rank, point, number)

    with protection:
        protection.at(at)
        for number in range(1, last + 1):  # `at` looks at it
            at("begin")
            loop.compute(number)
            at("reduced")
            if exits and number == DIES:
                place.order()
                raise SystemExit
            protection.begin_update()
            loop.update()
            protection.end_update()


def left(fault: Moment, directory: Path, *, exits: bool = False) -> tuple[Any, Any]:
    """What is in the gasp, and what it has to be. `exits`: the loop, for what an aborted collective
    has left.
    """
    expected = directory / "without"
    expected.mkdir()
    with Ranks(WORLD, expected, lambda rank: without_fault(rank, expected)) as ranks:
        assert ranks.statuses() == [0] * WORLD, ranks.said()
    with Ranks(WORLD, directory, lambda rank: protected(rank, fault, directory, exits)) as ranks:
        for rank, status in enumerate(ranks.statuses()):
            assert status == (-signal.SIGKILL if rank in fault.ranks else ExitStatus.SAVED), (
                ranks.said()
            )
    gasp = directory / "run" / (directory / "run" / "latest").read_text().strip()
    step = verify(gasp).step
    found = torch.load(gasp / FILE, weights_only=True)
    if step not in (DIES - 1, DIES):  # nobody could go on without the dead
        return found, None
    return found, torch.load(expected / f"{step}.pt", weights_only=True)


@pytest.mark.clause("T230")
@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (1, "begin"),
        *(
            pytest.param(*where, marks=pytest.mark.long)
            for where in ((0, "reduced"), (3, "ready"), (2, "updating"), (0, "updated"))
        ),
    ],
)
def test_a_rank_dies(tmp_path: Path, rank: int, point: str) -> None:
    found, right = left(Moment("", {rank: point}, number=DIES), tmp_path)
    assert right is not None
    assert_same(found, right)


@pytest.mark.clause("T230")
def test_a_hold_that_nobody_looks_at_is_found(tmp_path: Path) -> None:
    found, right = left(Moment("", {1: "begin"}, number=DIES, gate=FLAG), tmp_path)
    if right is not None:
        with pytest.raises(AssertionError):
            assert_same(found, right)


@pytest.mark.clause("T231")
def test_a_loop_exits_for_what_an_aborted_collective_has_left(tmp_path: Path) -> None:
    """As Lightning's does: rank 0 tells the others at each batch whether they are to exit."""
    found, right = left(Moment("", {1: "begin"}, number=DIES), tmp_path, exits=True)
    assert right is not None
    assert_same(found, right)


def copies_are_refused(rank: int, directory: Path) -> None:
    place = OnDouble()
    place.join(rank, directory)
    loop = Loop(place)
    with pytest.raises(ConfigError, match="the tensors themselves"):
        protect(directory / "run", state=loop.copies, save=loop.save, update=loop.update)


@pytest.mark.clause("T201", "T230")
def test_copies_are_refused(tmp_path: Path) -> None:
    with Ranks(WORLD, tmp_path, lambda rank: copies_are_refused(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0] * WORLD, ranks.said()
