"""Sees updates through the optimizers' own hooks, and does one alone when a fault has kept it from
being done with the others.

With several optimizers the first begins an update, and the last ends it. The end mark belongs
behind the *local* update: of a `ZeroRedundancyOptimizer` the inner optimizer is watched, since what
its `step` does afterwards is sending parameters round, which fails when a rank dies while the
update is done. Main thread only.

Which step of which optimizer begins and ends an update, and the collectives of the gate, belong to
all ranks: they go on when protection of this one is over, so that nobody waits for it. All else
goes through the guard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from acpfs.errors import ConfigError
from acpfs.training import messages
from acpfs.training.guard import Guard
from acpfs.training.held_signals import HeldSignals
from acpfs.training.marks import Marks
from acpfs.training.torch.gate import Gate, ImplicitGate, Passage
from acpfs.training.torch.progress import Progress, at_once


def local_optimizer(optimizer: Any) -> Any:
    """What updates this rank's own parameters.

    Raises:
        ConfigError: an optimizer whose update cannot be told from its communication.
    """
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ConfigError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates during the reduction: there "
            "is no gate between the two"
        )
    inner = getattr(optimizer, "optim", None)
    return (
        inner if inner is not None and hasattr(optimizer, "consolidate_state_dict") else optimizer
    )


class UpdateEnd(Protocol):
    """Knows what an update has left (`end_mark`)."""

    def note(self) -> None:
        """An update is complete, and its mark does not say so yet."""

    def skipping(self) -> None:
        """A step begins that changes nothing."""

    def skipped(self) -> None:
        """It has ended."""


class _NobodyAsks:
    """Where nothing is compared with the end of an update."""

    def note(self) -> None:
        """Nothing to do."""

    skipping = note
    skipped = note


@dataclass(frozen=True, slots=True)
class UpdateCalls:
    """What is called around an update."""

    at_ready: Callable[[int], None]
    """With its number when its gradients are complete, before the mark says so."""
    at: Callable[[str], object] = str
    """At points by name."""
    meet: Callable[[int], object] = int
    """What all ranks do together before the gate, whether they are protected or not."""
    update: Callable[[], None] | None = None
    """Does one that is ready and was not begun; None: the optimizers' steps do."""


class UpdateHooks:
    """The hooks of one rank's optimizers."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        marks: Marks,
        gate: Gate,
        calls: UpdateCalls,
        *,
        end: UpdateEnd | None = None,
        guard: Guard | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`end`: told when an update is complete, before the mark says so, and of steps that an
        overflow has emptied. `progress`: of the device; None: it does all at once.
        """
        self._optimizers = [local_optimizer(optimizer) for optimizer in optimizers]
        self._whole = optimizers
        self._marks = marks
        self._gate = gate
        self._at_ready = calls.at_ready
        self._end_mark = end or _NobodyAsks()
        self._meet = calls.meet
        self._guard = guard or Guard()
        self._progress = progress or at_once(marks)
        self._is_skipped = False
        """Whether the step that is under way changes nothing."""
        self._passed = marks.now.done
        """The update whose gate was passed last, also where no mark moves any more."""
        self._under_way = False
        """Whether an update is, in the order of the optimizers' steps."""
        self._stepped: set[int] = set()
        self._current: int | None = None
        """The optimizer whose step is under way; what an exception left here is overwritten by the
        next step.
        """
        self._depth = 0
        """How many of the current optimizer's steps have begun and not ended; see `_before`."""
        self._between = False
        """Whether an update is under way, and no optimizer is."""
        self._handles: list[Any] = []
        self._alone = False
        self._at = calls.at
        self._update = calls.update or self._step_all
        self._signals = HeldSignals()

    def install(self) -> None:
        self._passed = self._marks.now.done
        for optimizer in self._optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                raise ConfigError(
                    f"{type(optimizer).__name__} has no hooks: call begin_update and end_update, "
                    "and give update="
                )
            _refuse_needed_closure(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._signals.drop()

    def _before(
        self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """Called by torch's wrapper around `step`.

        torch wraps the `step` of each class that it makes an optimizer of, so a subclass that calls
        `super().step()` comes here a second time, from inside its own step, where somebody has made
        one of the base class too.
        """
        if self._guard.is_off and self._gate.kind is messages.Gate.NONE:
            return None  # nobody waits for this rank
        # the wrapper around `step` hands on the optimizer itself as the first argument
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._is_skipped = self._has_overflowed(optimizer)
        if self._is_skipped:
            # the scaler lets a fused optimizer see the overflow itself: nothing is changed, and yet
            # torch counts a write of each parameter
            self._guard.ours(self._end_mark.skipping)
            return None
        is_under_way = self._alone or self._under_way
        if isinstance(closure, _Gradients) or (is_under_way and self._current == id(optimizer)):
            self._depth += 1
            return None
        if is_under_way:
            if closure is not None:
                raise ConfigError(
                    "step(closure) of a further optimizer computes gradients inside the update: "
                    "nobody could do it alone"
                )
            if id(optimizer) in self._stepped:
                raise ConfigError(
                    "an optimizer made two steps in one update: call begin_update and end_update "
                    "around what belongs together"
                )
        elif closure is None:
            self.begin()
        self._current = id(optimizer)
        self._depth = 1
        if closure is not None:
            return (args[0],), {**kwargs, "closure": _Gradients(closure, self.begin)}
        self._between = False
        return None

    def _after(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._guard.is_off and self._gate.kind is messages.Gate.NONE:
            return
        if self._is_skipped:
            self._guard.ours(self._end_mark.skipped)
            return
        self._depth -= 1
        if self._depth > 0:
            return  # of a base class: the subclass may change something yet
        self._current = None
        self._stepped.add(id(optimizer))
        self._between = len(self._stepped) < len(self._optimizers)
        if len(self._stepped) == len(self._optimizers) and not self._alone:
            self.end()

    def begin(self) -> None:
        """Gradients are complete; returns when the update may begin.

        Raises:
            RuntimeError: the gate failed; the mark stays at `ready`.
        """
        step = self._passed + 1
        self._guard.ours(self._make_ready, step)
        self._meet(step)
        self._gate.wait(step)
        self._begin(step)

    def _has_overflowed(self, optimizer: Any) -> bool:
        """Whether a loss scaler has told a fused optimizer that this step is to change nothing.

        `torch.amp.GradScaler.step` sets `found_inf` on optimizers with
        `_step_supports_amp_scaling`, and calls their step in any case; all ranks have the same,
        since gradients are reduced before. On a device it is there when the gradients are.
        """
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return False
        if not self._alone:  # behind an abort all has ended
            self._guard.ours(self._progress.read)
        return bool(found)

    def _make_ready(self, step: int) -> None:
        self._progress.gradients(step)
        self._at_ready(step)
        self._marks.ready()
        self._at("ready")

    @contextmanager
    def implicit_gate(self) -> Iterator[Passage]:
        """Around the loop's own collective.

        Behind it the update is under way, and with it what uses the values.

        Raises:
            ConfigError: protection was made with another gate.
        """
        if not isinstance(self._gate, ImplicitGate):
            raise ConfigError(
                "protect was not told what to do with the result of this gate: give gate="
            )
        step = self._passed + 1
        passage = Passage()
        self._guard.ours(self._make_ready, step)
        yield passage
        if not passage.skipped:
            self._guard.ours(self._gate.passed, step, tuple(passage.values))
            self._begin(step)

    def _begin(self, step: int) -> None:
        """The gate of update `step` is passed."""
        self._stepped.clear()
        self._under_way = True
        try:
            self._guard.ours(self._gated)
        except BaseException:  # there is to be none
            self._under_way = self._marks.updating
            raise
        self._passed = step
        if self._guard.is_off:
            self._signals.deliver()

    def _gated(self) -> None:
        self._at("gated")
        # before the mark, and given back behind it: no handler comes in between
        self._signals.hold()
        try:
            self._marks.begin()
        except BaseException:
            self._signals.release()
            raise
        self._at("updating")

    def end(self) -> None:
        """The local update is complete."""
        self._under_way = False
        self._guard.ours(self._end)
        self._guard.ours(self._signals.give_back)
        self._signals.deliver()  # what handlers raise is the program's
        self._guard.ours(self._at, "updated")

    def switch_off(self) -> None:
        """Protection of this rank is over; what came of signals is delivered by who began that."""
        self._signals.give_back()

    def finish_alone(self, values: tuple[float, ...] | None = None) -> None:
        """Do the update that is ready, without gate and without anybody else. For SETTLE.

        `values`: what an implicit gate gave to others.

        Raises:
            Exception: whatever the update raises; the mark then stays at `updating`: torn.
        """
        with self._uninterrupted():
            self._marks.begin(settling=True)
            with self._no_gate():
                self._current = None
                self._stepped.clear()
                if values is not None and isinstance(self._gate, ImplicitGate):
                    self._gate.use(values)
                self._update()
            self._end()

    def finish_begun(self) -> None:
        """Do the rest of an update that was left between two optimizers, where parameters of the
        first one were being sent round.

        Raises:
            Exception: whatever the update raises; the mark then stays at `updating`: torn.
        """
        if self._marks.updating and self._between:
            with self._uninterrupted(), self._no_gate():
                self._step_all()
                self._end()
        else:  # also behind one that is torn
            self._signals.drop()

    def wait_done(self) -> None:
        """Returns when the device has done the last update.

        Raises:
            DeviceFailedError: it does not.
        """
        self._progress.wait_updated()

    def _end(self) -> None:
        self._progress.launched()
        self._end_mark.note()
        self._marks.end()

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        self._signals.hold()
        try:
            yield
        finally:
            self._signals.release()

    @contextmanager
    def _no_gate(self) -> Iterator[None]:
        """Steps of optimizers in here are parts of an update that has begun, and do not end it."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def _step_all(self) -> None:
        for optimizer, local in zip(self._whole, self._optimizers, strict=True):
            if id(local) in self._stepped:
                continue
            if local is optimizer:
                optimizer.step()
            else:
                # the inner one alone does not know what a scheduler set in the outer one
                optimizer._local_step()  # noqa: SLF001


class _Gradients:
    """A closure behind whose first call the update begins.

    Gradients are complete when it returns, and an optimizer calls it before it changes anything.
    """

    def __init__(self, closure: Callable[[], Any], begin: Callable[[], None]) -> None:
        self._closure = closure
        self._begin = begin
        self._was_called = False

    def __call__(self) -> Any:
        if self._was_called:
            raise ConfigError(
                "an optimizer that calls its closure more than once computes gradients inside "
                "the update"
            )
        result = self._closure()
        self._begin()
        self._was_called = True
        return result


def _refuse_needed_closure(optimizer: Any) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes gradients inside the update, in its closure: "
            "nobody could do it alone"
        )


def refuse_several_with_scaler(optimizers: Sequence[Any], scaler: Any) -> None:
    """A scaler skips each optimizer by itself: nobody could say which one is an update's last.

    Raises:
        ConfigError: there are several, and a scaler.
    """
    if scaler is not None and len(optimizers) > 1:
        raise ConfigError(
            "a loss scaler may skip one of several optimizers: call begin_update and end_update, "
            "and give update="
        )
