"""Trained tensors are what the last update has left, or become it again, or are in no
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from acpfs.errors import ConfigError
from acpfs.training import protect
from acpfs.training.marks import Marks
from acpfs.training.torch import end_mark
from acpfs.training.torch.end_mark import KEPT_UPDATES, ChangedError, EndDigest, EndMark
from acpfs.training.torch.gate import NoGate
from acpfs.training.torch.hooks import UpdateCalls, UpdateHooks
from acpfs.training.torch.local_state import OwnState
from tests.training.ranks.forked import Ranks, join_group

pytestmark = pytest.mark.clause("T173")
ROOM = 1 << 20


class Loop:
    """A parameter, a shard, and an optimizer with a state."""

    def __init__(self, bytes_max: int = ROOM) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(100))
        self.optimizer = torch.optim.Adam([self.weight])
        self.mark = EndMark(self.live, bytes_max)
        self.mark.note()

    def live(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {"all": {"weight": {"": self.weight, **self.optimizer.state.get(self.weight, {})}}}

    def update(self) -> None:
        self.weight.grad = torch.ones(100)
        self.mark.look()
        self.optimizer.step()
        self.mark.note()


def in_place(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def by_data(weight: Any) -> None:
    weight.data.mul_(0.5)


def exchanged(weight: Any) -> None:
    weight.data = weight.data * 0.5


def without_a_trace(weight: Any) -> None:
    """In the middle, and past torch's count of writes."""
    weight.data[50] = 7


CHANGES = {change.__name__: change for change in (in_place, by_data, exchanged)}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_behind_an_update_is_seen_and_from_then_on_brought_back(
    change: Callable[[Any], None],
) -> None:
    loop = Loop()
    loop.update()
    assert loop.mark.torn() == ()
    loop.mark.bring()
    change(loop.weight)
    assert loop.mark.torn() == ("all",)
    with pytest.raises(ChangedError, match="all"):
        loop.mark.bring()
    loop.update()
    for _ in range(2):  # also where the loop has done nothing of the kind in between
        before = loop.weight.detach().clone()
        change(loop.weight)
        assert loop.mark.torn() == ()
        for _ in range(2):
            loop.mark.bring()
            assert torch.equal(loop.weight, before)
            change(loop.weight)
        loop.update()
        loop.update()


def test_what_leaves_no_trace_is_looked_for_behind_the_first_updates() -> None:
    loop = Loop()
    loop.update()
    without_a_trace(loop.weight)
    loop.update()
    for _ in range(2 * KEPT_UPDATES):
        loop.update()
    before = loop.weight.detach().clone()
    without_a_trace(loop.weight)
    assert loop.mark.torn() == ()
    loop.mark.bring()
    assert torch.equal(loop.weight, before)


def test_no_copy_is_taken_where_nothing_is_changed_any_more() -> None:
    loop = Loop()
    loop.update()
    in_place(loop.weight)
    for _ in range(KEPT_UPDATES + 1):
        loop.update()
    assert loop.mark.torn() == ()
    in_place(loop.weight)
    assert loop.mark.torn() == ("all",)


def test_what_is_kept_for_an_evaluation_comes_back_however_it_was_changed() -> None:
    loop = Loop()
    for _ in range(3):
        loop.update()
    before = loop.weight.detach().clone()
    loop.mark.keep()
    without_a_trace(loop.weight)
    loop.mark.keep()
    loop.mark.bring()
    assert torch.equal(loop.weight, before)


class Fused(Loop):
    """With a fused optimizer, which a scaler tells of overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam([self.weight], fused=True)
        hooks = UpdateHooks(
            [self.optimizer], Marks(), NoGate(), UpdateCalls(self.ready), end=self.mark
        )
        hooks.install()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.scaler.scale(torch.zeros(1))  # it makes its state with the first loss

    def ready(self, _step: int) -> None:
        self.mark.look()

    def step(self, gradient: float) -> None:
        self.weight.grad = torch.full((100,), gradient)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.clause("T190")
def test_an_overflow_leaves_what_the_update_before_has_left() -> None:
    loop = Fused()
    for updates in range(2):
        loop.step(float("inf"))
        assert loop.mark.torn() == (), f"after {updates} updates"
        loop.step(1.0)
    in_place(loop.weight)
    loop.step(float("inf"))
    assert loop.mark.torn() == ("all",)


def test_an_optimizers_state_that_is_changed_is_in_no_checkpoint() -> None:
    loop = Loop()
    loop.update()
    loop.mark.keep()
    loop.optimizer.state[loop.weight]["exp_avg"].zero_()
    assert loop.mark.torn() == ("all",)
    loop.update()
    assert loop.mark.torn() == ()


def test_a_copy_that_is_too_large_is_not_taken_and_training_goes_on() -> None:
    loop = Loop(bytes_max=399)
    for _ in range(3):
        loop.update()
        in_place(loop.weight)
    loop.mark.keep()
    assert loop.mark.torn() == ("all",)


def test_what_is_loaded_before_the_first_update_is_no_change() -> None:
    loop = Loop()
    in_place(loop.weight)
    loop.update()
    assert loop.mark.torn() == ()
    in_place(loop.weight)
    assert loop.mark.torn() == ("all",), "nothing was copied"


def test_parameters_come_back_also_where_a_moment_is_lost() -> None:
    loop = Loop()
    loop.update()
    loop.mark.keep()
    before = loop.weight.detach().clone()
    in_place(loop.weight)
    loop.optimizer.state[loop.weight]["exp_avg"].zero_()
    for _ in range(2):
        with pytest.raises(ChangedError, match="all"):
            loop.mark.bring()
        assert torch.equal(loop.weight, before)


@pytest.mark.clause("T181")
def test_a_state_of_ones_own_is_told_by_where_it_lies_or_by_what_it_is() -> None:
    value = torch.zeros(3)
    assert OwnState(lambda: {"value": value}).is_live
    copied = OwnState(lambda: {"value": value.clone(), "done": 3})
    assert not copied.is_live
    assert not OwnState(lambda: {"value": value, "done": 3}).is_live
    mark = EndDigest(lambda: {"all": copied.digest("all")})
    mark.note()
    assert mark.torn() == ()
    value[1] = 1
    mark.look()
    assert mark.torn() == ("all",)
    with pytest.raises(ChangedError, match="all"):
        mark.bring()
    mark.note()
    mark.bring()


@pytest.mark.clause("T181")
def test_a_state_that_cannot_be_brought_back_is_refused_where_something_follows(
    tmp_path: Path,
) -> None:
    def main(rank: int) -> None:
        join_group(rank, 2, tmp_path / "store")
        value = torch.zeros(3)
        given: Any = {"save": print, "update": print}
        protect(tmp_path, state=lambda: {"value": value.clone()}, **given)
        protect(tmp_path, state=lambda: {"value": value}, after_update=print, **given)
        with pytest.raises(ConfigError, match="the tensors themselves"):
            protect(tmp_path, state=lambda: {"value": value.clone()}, after_update=print, **given)

    with Ranks(2, tmp_path, main) as ranks:
        assert ranks.statuses() == [0, 0], ranks.said()


@pytest.mark.clause("T184")
def test_what_a_digest_of_copies_costs_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(end_mark.log, "warning", lambda _, **fields: said.append(fields))
    now = [0.0]
    takes = [0.04]

    def digests() -> dict[str, str]:
        now[0] += takes[0]
        return {"all": "digest"}

    mark = EndDigest(digests, lambda: now[0])
    for _ in range(3):
        mark.note()
        now[0] += 1
    assert said == []
    takes[0] = 0.06
    for _ in range(3):
        mark.note()
        now[0] += 1
    assert said == [{"seconds": 0.06, "of": 1.0}]
