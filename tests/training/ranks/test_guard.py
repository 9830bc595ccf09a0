"""A fault of acpfs itself never ends training: whatever it calls in a loop raises once, and the
loop does not notice.

Nothing here lists hooks: functions of acpfs are found by running loops, by how they are reached.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from acpfs.errors import ConfigError
from acpfs.training.guard import Guard, theirs
from acpfs.training.host_state import HostState
from acpfs.training.protection import Protection, protect
from acpfs.training.torch.replicated_zero import ReplicatedZero
from tests.training.injection import Coordinator, InjectedError, Seen
from tests.training.ranks.faulty_loops import FAILS, UPDATES, WORLD, each_fails
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.jobs import WIDTH, network
from tests.training.ranks.replaced import Plan, run_job

pytestmark = pytest.mark.clause("T178", "T179")


@dataclass
class Loop:
    """A script. `told`: what `protect` is told of it."""

    told: dict[str, Any]
    update: Callable[[Any, int], None]
    values: Callable[[], list[Any]]
    came: list[int] = field(default_factory=list)
    """Signals that its handlers had."""

    def run(self, protection: Any) -> None:
        for number in range(UPDATES):
            self.update(protection, number)
            signal.raise_signal(signal.SIGUSR1)
            with nullcontext() if protection is None else protection.long_operation():
                signal.raise_signal(signal.SIGUSR2)
        if protection is not None:
            signal.raise_signal(signal.SIGTERM)


def forward(model: Any, number: int) -> None:
    torch.manual_seed(100 * number + dist.get_rank())
    model.zero_grad()
    model(torch.randn(4, WIDTH)).square().mean().backward()


def signalled(optimizer: Any) -> Any:
    """One comes in each update."""
    optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGUSR1))
    return optimizer


def plain() -> Loop:
    model = DistributedDataParallel(network())
    optimizer = signalled(torch.optim.Adam(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def update(_: Any, number: int) -> None:
        forward(model, number)
        optimizer.step()
        scheduler.step()

    told = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Loop(told, update, lambda: list(model.parameters()))


def with_closure() -> Loop:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(_: Any, number: int) -> None:
        optimizer.step(lambda: forward(model, number))

    return Loop({"model": model, "optimizer": optimizer}, update, lambda: list(model.parameters()))


def several_and_explicit_gate() -> Loop:
    model = DistributedDataParallel(network())
    values = list(model.parameters())
    optimizers = [
        ReplicatedZero(half, torch.optim.Adam, replicas=2, lr=0.1)
        for half in (values[:3], values[3:])
    ]

    def update(_: Any, number: int) -> None:
        forward(model, number)
        for optimizer in optimizers:
            optimizer.step()

    return Loop({"model": model, "optimizer": optimizers}, update, lambda: values)


def own_gate() -> Loop:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(protection: Any, number: int) -> None:
        forward(model, number)
        norm = torch.ones(1)
        with nullcontext() if protection is None else protection.gate() as passage:
            dist.all_reduce(norm)
            if passage is not None:
                passage.values = (float(norm),)
        optimizer.step()

    told = {"model": model, "optimizer": optimizer, "gate": print}
    return Loop(told, update, lambda: list(model.parameters()))


def by_hand() -> Loop:
    value = torch.zeros(3)

    def add() -> None:
        value.add_(1)

    def update(protection: Any, number: int) -> None:
        if protection is not None:
            protection.begin_update()
        add()
        if protection is not None:
            protection.end_update()

    told = {"state": lambda: {"value": value}, "save": print, "update": add}
    return Loop(told, update, lambda: [value])


LOOPS = {
    made.__name__: made
    for made in (plain, with_closure, several_and_explicit_gate, own_gate, by_hand)
}


@contextlib.contextmanager
def handled(came: list[int]) -> Iterator[None]:
    """As a script that has handlers of its own; they are there in the end."""

    def note(number: int, _frame: object) -> None:
        came.append(number)

    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, note)
    yield
    assert [signal.getsignal(number) for number in numbers] == [note] * len(numbers)


def values_of(
    made: Callable[[], Loop], directory: Path | None, seen: Seen
) -> tuple[list[Any], str]:
    """What a loop comes to, and what protection ended with."""
    loop = made()
    why = ""
    with handled(loop.came):
        if directory is None:
            loop.run(None)
        else:
            protection: Protection = protect(directory, **loop.told)
            coordinator = Coordinator()
            entered = protection.enter(coordinator.boot())
            sys.setprofile(seen)
            try:
                with contextlib.ExitStack() as life:
                    life.push(entered.__exit__)
                    loop.run(protection)
            finally:
                sys.setprofile(None)
            why = coordinator.heard().why
            assert not protection.guard.is_off or why == protection.guard.why
    sent = 2 if made is plain else 1
    assert loop.came.count(signal.SIGUSR1) == sent * UPDATES
    assert loop.came.count(signal.SIGUSR2) == UPDATES
    return [value.detach().clone() for value in loop.values()], why


def agreed(value: Any) -> Any:
    """What the rank in which acpfs fails says, in all ranks."""
    found = [value]
    dist.broadcast_object_list(found, FAILS)
    return found[0]


def every_fault(made: Callable[[], Loop], directory: Path) -> None:
    """As a rank: the loop again and again, until each call has failed once in one of them."""
    each_fails(
        made.__name__,
        lambda seen: values_of(made, directory, seen),
        values_of(made, None, Seen())[0],
    )


@pytest.mark.parametrize("kind", LOOPS)
def test_whatever_fails_in_acpfs_the_loop_goes_on_in_step(tmp_path: Path, kind: str) -> None:
    def main(rank: int) -> None:
        join_group(rank, WORLD, tmp_path / "store")
        every_fault(LOOPS[kind], tmp_path / "run")

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # what torch imports here no rank has to
    with Ranks(WORLD, tmp_path, main) as ranks:
        assert ranks.statuses(600) == [0] * WORLD, ranks.said()
    print(ranks.said())


@pytest.mark.long
def test_in_a_job_whose_ranks_are_replaced_the_loop_ends_as_without(
    tmp_path: Path, yardsticks: Path
) -> None:
    def enter(run: Any) -> None:
        if run.rank == FAILS and not run.generation:
            taking = HostState.take

            def take(host: HostState, step: int) -> None:
                if step == 3:
                    raise InjectedError("a bug")
                taking(host, step)

            # to mypy a method is nothing that changes
            setattr(HostState, "take", take)  # noqa: B010

    counts = run_job(Plan("hsdp", enter=enter), tmp_path, yardsticks)
    assert set(counts.values()) == {1}
    said = (tmp_path / f"rank-{FAILS}.log").read_text()
    assert said.count("this rank is not protected any more") == 1
    assert "in take" in said, "its traceback"


def test_what_is_said_on_purpose_or_is_the_programs_own_passes() -> None:
    def fails(error: BaseException) -> None:
        raise error

    def of_a_handler(*_: object) -> None:
        raise ValueError("of a handler")

    guard = Guard()
    for error in (ConfigError("refused"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            guard.ours(fails, error)
    with pytest.raises(ValueError, match="the program's"):
        guard.ours(theirs, fails, ValueError("the program's"))
    before = signal.signal(signal.SIGUSR1, of_a_handler)
    with pytest.raises(ValueError, match="of a handler"):
        guard.ours(signal.raise_signal, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert not guard.is_off
    told: list[str] = []
    guard.at_end.append(told.append)
    assert guard.ours(fails, ValueError("a bug")) is None
    assert guard.ours(fails, ValueError("is not called")) is None
    assert told == [guard.why] == ["ValueError: a bug"]
