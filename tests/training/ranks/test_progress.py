"""The point between gradients and update on a device that runs behind its host, one rank alone: its
peer never comes to a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.training.interrupt import LOOK_EVERY_S, Interrupted, Interrupter
from acpfs.training.marks import Mark, Marks
from acpfs.training.messages import Phase
from acpfs.training.torch.aborts import Aborts
from acpfs.training.torch.end_mark import EndMark
from acpfs.training.torch.gate import NoGate
from acpfs.training.torch.hooks import UpdateCalls, UpdateHooks
from acpfs.training.torch.progress import (
    DeviceFailedError,
    LostError,
    Progress,
    SuspectError,
)
from tests.training.ranks.asynchronous import AsynchronousAdam, AsynchronousGroup, Double, Stream
from tests.training.ranks.behind import EARLY, WRONG

DONE = 3


class Loop:
    """Of one rank: one parameter, and a group whose other rank is dead."""

    def __init__(
        self,
        directory: Path,
        gradients: Callable[..., None] | None = None,
        update_s: float = 60.0,
    ) -> None:
        """`gradients`: a wrong gate."""
        torch.manual_seed(3)
        self.stream = Stream()
        self.group = AsynchronousGroup(dist.HashStore(), 0, 2, self.stream, directory)
        self.parameter = torch.nn.Parameter(torch.ones(50))
        self.parameter.grad = torch.ones(50)
        self.optimizer = AsynchronousAdam([self.parameter], self.stream, lr=0.1)
        self.marks = Marks()
        self.failed = False
        self.in_gate = threading.Event()
        self.progress = Progress(Double(self.stream), self.marks, lambda: self.failed, update_s)
        right = self.progress.gradients

        def gate(step: int) -> None:
            self.in_gate.set()
            (right(step) if gradients is None else gradients(self.progress, step))

        setattr(self.progress, "gradients", gate)  # noqa: B010  # to mypy it never changes
        self.end = EndMark(
            lambda: {"all": {"weight": {"": self.parameter, **self.state()}}},
            1 << 20,
            is_done=self.progress.wait_updated,
        )
        self.hooks = UpdateHooks(
            [self.optimizer],
            self.marks,
            NoGate(),
            UpdateCalls(lambda step: self.end.look()),
            end=self.end,
            progress=self.progress,
        )
        self.end.note()
        self.hooks.install()
        for _ in range(DONE):  # behind the first two digests are compared, which waits for them
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return dict(self.optimizer.state.get(self.parameter, {}))

    def values(self) -> Any:
        self.stream.synchronize()
        return self.parameter.detach().clone()

    def stop(self) -> None:
        """What a member does."""
        self.in_gate.wait()
        self.marks.hold()
        self.group.abort()


@pytest.mark.clause("T197")
def test_gradients_of_an_aborted_collective_are_not_ready(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    before = loop.values()
    loop.in_gate.clear()
    loop.group.allreduce([loop.parameter.grad])
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    with pytest.raises(Interrupted, match="gradients of update 4"):
        loop.optimizer.step()
    stopping.join()
    assert torch.equal(loop.values(), before)
    assert loop.marks.now == Mark(DONE, DONE, Phase.COMPUTING)
    assert loop.end.torn() == ()


@pytest.mark.clause("T197")
def test_an_abort_that_was_over_before_the_gate(tmp_path: Path) -> None:
    """The event comes at once, and only the hold says what brought it."""
    loop = Loop(tmp_path)
    before = loop.values()
    loop.group.allreduce([loop.parameter.grad])
    loop.stop()
    loop.stream.synchronize()
    with pytest.raises(Interrupted, match="gradients of update 4"):
        loop.optimizer.step()
    assert torch.equal(loop.values(), before)
    assert loop.marks.now == Mark(DONE, DONE, Phase.COMPUTING)


@pytest.mark.parametrize("gate", sorted(WRONG))
def test_what_a_wrong_gate_does(tmp_path: Path, gate: str) -> None:
    """The double shows it: garbage is in the state, or said to be complete gradients."""
    EARLY.append(Stream().record())
    loop = Loop(tmp_path, WRONG[gate])
    before = loop.values()
    loop.in_gate.clear()
    EARLY.append(loop.stream.record())
    loop.group.allreduce([loop.parameter.grad])
    if gate == "flag not looked at":
        stopping = threading.Thread(target=loop.stop)
        stopping.start()
        with pytest.raises(Interrupted):
            loop.optimizer.step()
        stopping.join()
        assert loop.marks.now == Mark(
            DONE, DONE + 1, Phase.READY
        )  # it may be asked to do that alone
        return
    loop.optimizer.step()
    assert loop.marks.now == Mark(DONE + 1, DONE + 1, Phase.COMPUTING)
    loop.stop()
    assert not torch.equal(loop.values(), before)
    assert loop.parameter.grad is not None
    assert not torch.equal(loop.parameter.grad, torch.ones(50))


@pytest.mark.clause("T198")
def test_an_update_counts_when_the_device_has_done_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    before = loop.values()
    let_go = threading.Event()
    loop.stream.launch(let_go.wait)
    event = loop.stream.record()
    assert not event.query()
    # what is launched next is behind that
    loop.progress.launched()
    assert not loop.progress.has_updated()
    settling = threading.Thread(target=loop.progress.settle, args=(lambda: loop.parameter, 60.0))
    settling.start()
    assert settling.is_alive()
    let_go.set()
    settling.join()
    assert loop.progress.has_updated()
    assert torch.equal(loop.values(), before)


@pytest.mark.clause("T197")
def test_a_group_that_says_it_failed_is_as_good_as_the_hold(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.failed = True
    with pytest.raises(SuspectError, match="before update 4"):
        loop.optimizer.step()
    assert loop.marks.now == Mark(DONE, DONE, Phase.COMPUTING)


@pytest.mark.clause("T199")
def test_a_device_that_works_no_more_is_said_by_the_gate_and_by_the_probe(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.stream.synchronize()
    loop.stream.is_broken = True
    for call in (loop.progress.wait_updated, loop.progress.launched, loop.optimizer.step):
        with pytest.raises(DeviceFailedError, match="uncorrectable ECC"):
            call()
    with pytest.raises(LostError, match="uncorrectable ECC"):
        loop.progress.settle(lambda: loop.parameter, 60.0)


@pytest.mark.clause("T199")
def test_a_device_that_does_not_answer(tmp_path: Path) -> None:
    """Its stream never comes to its end: an update that is not done, and a probe without one."""
    loop = Loop(tmp_path, update_s=0.05)
    loop.stream.synchronize()
    loop.stream.launch(threading.Event().wait)
    with pytest.raises(LostError, match="did not answer"):
        loop.progress.settle(lambda: loop.parameter, 0.05)
    loop.progress.launched()
    with pytest.raises(LostError, match="has not done an update"):
        loop.progress.settle(lambda: loop.parameter, 60.0)


@pytest.mark.clause("T200")
def test_an_abort_that_hangs_does_not_hold_up_another(tmp_path: Path) -> None:
    stream = Stream()
    group = AsynchronousGroup(dist.HashStore(), 0, 2, stream, tmp_path)
    never = threading.Event()
    hanging = SimpleNamespace(abort=never.wait, group_name="hanging")
    known: list[Any] = [hanging]
    aborts = Aborts(Double(stream), lambda: known)
    assert aborts.begin() == 1
    known.append(group)  # one that was being made
    assert aborts.begin() == 1
    assert aborts.begin() == 0
    group.allreduce([torch.ones(1)])
    stream.synchronize()
    assert not aborts.over(0.05)
    never.set()
    assert aborts.over(60.0)


class InterruptError(Exception):
    """What a signal's handler raises."""


@pytest.mark.clause("T200")
@pytest.mark.parametrize("runs", [False, True])
def test_an_abort_whose_start_was_interrupted_is_done_once(
    monkeypatch: pytest.MonkeyPatch, *, runs: bool
) -> None:
    """Nobody knew whether its thread runs: it was waited for as one that was never started, or
    never begun again.
    """
    start = threading.Thread.start
    interrupts = [True]

    def interrupted(thread: threading.Thread) -> None:
        if runs or not interrupts:
            start(thread)
        if interrupts:
            interrupts.clear()
            raise InterruptError

    aborted: list[str] = []
    group = SimpleNamespace(abort=lambda: aborted.append("once"), group_name="group")
    aborts = Aborts(Double(Stream()), lambda: [group])
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(InterruptError):
        aborts.begin()
    assert aborts.begin() == 0
    assert aborts.over(60.0)
    assert aborted == ["once"]


class DoubleOfNpu(Double):
    """Ends everything at once, as `stop_device` does."""

    ends_everything = True

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.calls: list[str] = []

    def end_collectives(self, group: Any) -> None:
        self.calls.append("stop")

    def restart(self) -> None:
        self.calls.append("restart")


@pytest.mark.clause("T200")
def test_what_ends_everything_waits_for_the_update_under_way() -> None:
    device = DoubleOfNpu(Stream())
    may = threading.Event()
    asked = threading.Event()

    def may_end() -> bool:
        asked.set()
        return may.is_set()

    aborts = Aborts(device, lambda: [object(), object()], may_end)
    assert aborts.begin() == 1  # for all groups
    asked.wait()
    assert device.calls == []
    may.set()
    assert aborts.over(60.0)
    assert device.calls == ["stop", "restart"]
    assert aborts.over(60.0)
    assert device.calls == ["stop", "restart"]


@pytest.mark.clause("T202")
def test_a_thread_that_spins_is_stuck_where_a_device_is_waited_for() -> None:
    """It uses processor time all the while, and is in C."""
    stream = Stream()
    let_go = threading.Event()
    stream.launch(let_go.wait)
    event = stream.record()
    waiting = threading.Thread(target=event.synchronize)
    waiting.start()
    assert waiting.ident is not None
    interrupter = Interrupter(
        *(waiting.ident, lambda: False, 1000.0, 1000.0, 0.2),
        spins=lambda: True,
    )
    interrupter.arm()
    while not interrupter.stuck:
        interrupter.tick()
        threading.Event().wait(LOOK_EVERY_S)
    let_go.set()
    waiting.join()
