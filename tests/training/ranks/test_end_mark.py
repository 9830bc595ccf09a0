"""Trained tensors are what the last update has left, or become it again, or are in no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from acpfs.training.torch.end_mark import KEPT_UPDATES, ChangedError, EndMark

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
