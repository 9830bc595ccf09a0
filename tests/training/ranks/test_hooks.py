"""Updates are seen through optimizers' hooks, behind a gate, and one that was not begun is done
alone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from acpfs.errors import ConfigError
from acpfs.training import messages
from acpfs.training.interrupt import Interrupted
from acpfs.training.marks import Mark, Marks
from acpfs.training.messages import Phase
from acpfs.training.torch.gate import ExplicitGate, NoGate
from acpfs.training.torch.hooks import UpdateCalls, UpdateHooks, refuse_several_with_scaler
from tests.training.ranks.forked import Ranks, join_group


class Broken:
    """A gate that a rank is missing from."""

    kind = messages.Gate.EXPLICIT
    result = None

    def wait(self, step: int) -> None:
        raise RuntimeError("connection closed by peer")


def parameter(value: float = 1.0) -> Any:
    made = torch.nn.Parameter(torch.full((3,), value))
    made.grad = torch.ones(3)
    return made


def hooked(
    optimizers: list[Any], gate: Any = None, update: Callable[[], None] | None = None
) -> tuple[UpdateHooks, Marks, list[int]]:
    marks = Marks()
    ready = list[int]()
    calls = UpdateCalls(ready.append, update=update)
    hooks = UpdateHooks(optimizers, marks, gate or NoGate(), calls)
    hooks.install()
    return hooks, marks, ready


@pytest.mark.clause("T40")
def test_steps_move_the_marks() -> None:
    optimizer = torch.optim.Adam([parameter()])
    hooks, marks, ready = hooked([optimizer])
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(marks.now))
    for _ in range(3):
        optimizer.step()
    assert marks.now == Mark(3, 3, Phase.COMPUTING)
    assert ready == [1, 2, 3]
    hooks.remove()
    optimizer.step()
    assert marks.now.done == 3


@pytest.mark.clause("T172")
@pytest.mark.parametrize("by", ["the loop", "settling", "the rest"])
def test_a_signal_tears_no_update(by: str) -> None:
    """Its handler raises, as that of SIGINT does by default: behind the update, which is whole."""
    first = torch.optim.SGD([parameter()], lr=1)
    last = torch.optim.SGD([parameter()], lr=1)
    hooks, marks, _ = hooked([first, last])
    last.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    if by == "settling":
        marks.ready()
    else:
        first.step()
    with pytest.raises(KeyboardInterrupt):
        {"the loop": last.step, "settling": hooks.finish_alone, "the rest": hooks.finish_begun}[
            by
        ]()
    assert marks.now == Mark(1, 1, Phase.COMPUTING)
    assert [float(one.param_groups[0]["params"][0][0]) for one in (first, last)] == [0, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.clause("T172")
def test_behind_an_update_that_is_torn_handlers_are_as_before() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1)
    hooks, marks, _ = hooked([optimizer])

    def fails(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("torn")

    optimizer.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="torn"):
        optimizer.step()
    assert marks.updating
    hooks.finish_begun()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.clause("T40")
def test_the_first_of_several_begins_and_the_last_ends() -> None:
    dense = torch.optim.SGD([parameter()], lr=1)
    expert = torch.optim.SGD([parameter()], lr=1)
    _, marks, _ = hooked([dense, expert])
    dense.step()
    assert marks.now == Mark(0, 1, Phase.UPDATING)
    expert.step()
    assert marks.now == Mark(1, 1, Phase.COMPUTING)
    expert.step()
    with pytest.raises(ConfigError, match="two steps"):
        expert.step()


@pytest.mark.clause("T40")
def test_a_step_that_a_scaler_skips_moves_nothing() -> None:
    broken = parameter()
    optimizer = torch.optim.SGD([broken], lr=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _, marks, _ = hooked([optimizer])
    scaler.scale(broken.sum()).backward()
    broken.grad = torch.full((3,), float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert marks.now == Mark(0, 0, Phase.COMPUTING)
    broken.grad = torch.ones(3)
    scaler.step(optimizer)
    assert marks.now == Mark(1, 1, Phase.COMPUTING)
    with pytest.raises(ConfigError, match="scaler"):
        refuse_several_with_scaler([optimizer, optimizer], scaler)


@pytest.mark.clause("T190")
def test_an_overflow_that_a_fused_optimizer_sees_itself_moves_nothing() -> None:
    """A scaler calls the step of a fused optimizer in any case."""
    broken = parameter()
    before = broken.detach().clone()
    optimizer = torch.optim.Adam([broken], lr=1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _, marks, ready = hooked([optimizer])
    scaler.scale(broken.sum()).backward()
    broken.grad = torch.full((3,), float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert marks.now == Mark(0, 0, Phase.COMPUTING)
    assert ready == []
    assert torch.equal(broken, before)
    broken.grad = torch.ones(3)
    scaler.step(optimizer)
    assert marks.now == Mark(1, 1, Phase.COMPUTING)
    assert not torch.equal(broken, before)


class Doubling(torch.optim.AdamW):  # type: ignore[misc]  # torch is Any where types are checked
    """Changes something behind its base class's step."""

    seen: Callable[[], object] = str
    """Called in between."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.seen()
        for group in self.param_groups:
            for value in group["params"]:
                value.data.mul_(2)
        return result


@pytest.mark.clause("T191")
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_inside_a_step_is_one_update(with_closure: bool) -> None:
    torch.optim.AdamW([parameter()])  # so that torch has wrapped the step of the base class too
    mine = Doubling([parameter()], lr=1)
    other = torch.optim.SGD([parameter()], lr=1)
    hooks, marks, ready = hooked([mine, other])
    seen: list[Mark] = []
    mine.seen = lambda: seen.append(marks.now)
    closure = [lambda: torch.zeros(())] if with_closure else []
    # One with a closure begins the update. One without is the last here: its base class's step is
    # not the end of it.
    order = [partial(mine.step, *closure), other.step]
    for number in range(1, 3):
        first, second = order if with_closure else reversed(order)
        first()
        assert marks.now == Mark(number - 1, number, Phase.UPDATING), "the other one is to come"
        second()
        assert marks.now == Mark(number, number, Phase.COMPUTING)
    assert ready == [1, 2]
    assert {mark.phase for mark in seen} == {Phase.UPDATING}
    marks.ready()
    hooks.finish_alone()
    assert marks.now == Mark(3, 3, Phase.COMPUTING)
    mine.step(*closure)
    with pytest.raises(ConfigError, match="two steps"):
        mine.step()


@pytest.mark.clause("T40")
def test_gradients_of_a_closure_are_complete_when_it_returns() -> None:
    value = parameter()
    optimizer = torch.optim.Adam([value])
    _, marks, ready = hooked([optimizer])
    seen = []

    def closure() -> Any:
        seen.append(marks.now)
        value.grad = torch.ones(3)
        return torch.zeros(())

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert seen == [Mark(0, 0, Phase.COMPUTING), Mark(1, 1, Phase.COMPUTING)]
    assert ready == [1, 2]
    assert marks.now == Mark(2, 2, Phase.COMPUTING)


class CallsTwice(torch.optim.SGD):  # type: ignore[misc]  # torch is Any where types are checked
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.clause("T40")
def test_a_closure_inside_an_update_is_refused() -> None:
    needs = UpdateHooks(
        [torch.optim.LBFGS([parameter()])], Marks(), NoGate(), UpdateCalls(lambda step: None)
    )
    with pytest.raises(ConfigError, match="closure"):
        needs.install()
    twice = CallsTwice([parameter()])
    hooked([twice])
    with pytest.raises(ConfigError, match="closure"):
        twice.step(lambda: torch.zeros(()))
    dense = torch.optim.SGD([parameter()])
    expert = torch.optim.SGD([parameter()])
    hooked([dense, expert])
    dense.step(lambda: torch.zeros(()))
    with pytest.raises(ConfigError, match="closure"):
        expert.step(lambda: torch.zeros(()))


@pytest.mark.clause("T41")
def test_an_update_whose_gate_failed_is_done_alone() -> None:
    alone = parameter()
    together = parameter()
    optimizer = torch.optim.Adam([alone])
    yardstick = torch.optim.Adam([together])
    hooks, marks, _ = hooked([optimizer], Broken())
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert marks.now == Mark(0, 1, Phase.READY)
    marks.hold()
    hooks.finish_alone()
    yardstick.step()
    assert marks.now == Mark(1, 1, Phase.COMPUTING)
    assert torch.equal(alone, together)


@pytest.mark.clause("T41")
def test_an_update_that_fails_says_that_it_is_torn() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1)

    def fail() -> None:
        raise MemoryError

    hooks, marks, _ = hooked([optimizer], Broken(), fail)
    with pytest.raises(RuntimeError):
        optimizer.step()
    with pytest.raises(MemoryError):
        hooks.finish_alone()
    assert marks.updating


@pytest.mark.clause("T41")
def test_no_step_after_a_hold() -> None:
    value = parameter()
    optimizer = torch.optim.SGD([value], lr=1)
    _, marks, _ = hooked([optimizer])
    marks.hold()
    with pytest.raises(Interrupted):
        optimizer.step()
    assert marks.now == Mark(0, 1, Phase.READY)
    assert torch.equal(value, torch.ones(3))


def _zero(rank: int, store: Path) -> None:
    """The end mark stands when parameters are sent round."""
    group = join_group(rank, 2, store)
    optimizer = ZeroRedundancyOptimizer([parameter(), parameter()], torch.optim.Adam, lr=0.1)
    _, marks, _ = hooked([optimizer], ExplicitGate(dist.new_group()))
    seen = []
    sync = optimizer._sync_params

    def watched() -> None:
        seen.append(marks.now)
        sync()

    optimizer._sync_params = watched
    optimizer.step()
    assert seen == [Mark(1, 1, Phase.COMPUTING)]
    dist.barrier(group)


@pytest.mark.clause("T40")
def test_the_end_mark_is_behind_the_local_update(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, lambda rank: _zero(rank, tmp_path / "store")) as ranks:
        assert ranks.statuses() == [0, 0]


def _disagree(rank: int, store: Path) -> None:
    join_group(rank, 2, store)
    gate = ExplicitGate(dist.new_group())
    gate.wait(1)
    with pytest.raises(RuntimeError, match="same update"):
        gate.wait(2 + rank)


@pytest.mark.clause("T42")
def test_a_gate_notices_ranks_that_do_different_updates(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, lambda rank: _disagree(rank, tmp_path / "store")) as ranks:
        assert ranks.statuses() == [0, 0]
