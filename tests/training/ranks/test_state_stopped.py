"""Where the state of a rank is that is stopped again while a generation is being rebuilt, in the
middle of an update that it does alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from acpfs.training.host_state import HostState
from acpfs.training.interrupt import Interrupted
from acpfs.training.marks import Marks
from acpfs.training.messages import Phase, Stopped
from acpfs.training.torch.end_mark import EndMark
from acpfs.training.torch.gate import NoGate
from acpfs.training.torch.hooks import UpdateCalls, UpdateHooks
from acpfs.training.torch.left_state import State

pytestmark = pytest.mark.clause("T79", "T81")
READY = Stopped(4, 5, Phase.READY)


class Stopping:
    """A rank that was stopped when it was ready for update 5."""

    def __init__(self) -> None:
        self.marks = Marks(4)
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.parameter.grad = torch.ones(3)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.5)
        self.fails: Callable[[], None] = lambda: None
        """Called in the middle of the update."""
        end = EndMark(lambda: {"all": {"weight": {"": self.parameter}}}, 1 << 20)
        end.note()
        hooks = UpdateHooks(
            [self.optimizer],
            self.marks,
            NoGate(),
            UpdateCalls(lambda step: None, update=self._update),
            end=end,
        )
        self.state = State(cast("Any", None), HostState({}, lambda: None), hooks, end)
        self.marks.ready()
        self.marks.hold()
        self.stop()
        assert self.state.stopped == READY

    def _update(self) -> None:
        self.fails()
        self.optimizer.step()

    def stop(self) -> None:
        """As `Run` does."""
        now = self.marks.now
        self.state.stop(Stopped(now.done, now.ready, now.phase), damaged=False)
        if now.phase is Phase.UPDATING:
            self.marks.give_up()

    def come(self) -> None:
        self.state.come(5, self.state, self.marks)


def test_an_update_done_alone_that_fails_is_torn() -> None:
    rank = Stopping()

    def fails() -> None:
        raise MemoryError("of the device")

    rank.fails = fails
    with pytest.raises(MemoryError):
        rank.come()
    rank.stop()
    assert rank.state.stopped == Stopped(4, 5, Phase.UPDATING)
    rank.stop()  # and stays torn
    assert rank.state.stopped == Stopped(4, 5, Phase.UPDATING)


def test_an_update_done_alone_counts_though_it_did_not_come_to_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Stopping()
    finish_alone = rank.state.hooks.finish_alone

    def interrupted_behind() -> None:
        finish_alone()
        raise Interrupted

    monkeypatch.setattr(rank.state.hooks, "finish_alone", interrupted_behind)
    with pytest.raises(Interrupted):
        rank.come()
    rank.stop()
    assert rank.state.stopped == Stopped(5, 5, Phase.COMPUTING)
    assert torch.equal(rank.parameter.detach(), torch.full((3,), 0.5))


def test_an_update_is_done_alone_though_another_state_was_about_to_take_its_place() -> None:
    """The marks said already that the loop goes on behind update 4, where all were to begin."""
    rank = Stopping()
    rank.marks.resume(4)
    rank.marks.hold()
    rank.stop()
    assert rank.state.stopped == READY
    rank.come()
    assert rank.state.stopped == Stopped(5, 5, Phase.COMPUTING)
    assert torch.equal(rank.parameter.detach(), torch.full((3,), 0.5))
