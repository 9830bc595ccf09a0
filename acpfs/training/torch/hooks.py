"""Sees updates through the optimizers' own hooks, and does one alone when a fault has kept it from being done with the others.

With several optimizers the first begins an update, and the last ends it. The end mark belongs behind the *local* update: of a
`ZeroRedundancyOptimizer` the inner optimizer is watched, since what its `step` does afterwards is sending parameters round, which fails
when a rank dies while the update is done. Main thread only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from acpfs.errors import ConfigError
from acpfs.training.held_signals import HeldSignals
from acpfs.training.marks import Marks
from acpfs.training.torch.gate import Gate, ImplicitGate, Passage


def local_optimizer(optimizer: Any) -> Any:
    """What updates this rank's own parameters.

    Raises:
        ConfigError: an optimizer whose update cannot be told from its communication.
    """
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ConfigError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates during the reduction: there is no gate between the two"
        )
    inner = getattr(optimizer, "optim", None)
    return (
        inner if inner is not None and hasattr(optimizer, "consolidate_state_dict") else optimizer
    )


class UpdateHooks:
    """The hooks of one rank's optimizers."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        marks: Marks,
        gate: Gate,
        at_ready: Callable[[int], None],
        *,
        at: Callable[[str], object] = str,
        update: Callable[[], None] | None = None,
    ) -> None:
        """`at_ready`: called with an update's number when its gradients are complete, before the mark says so.

        `at`: called at points by name. `update`: does an update that is ready and was not begun; None: the optimizers' steps do.
        """
        self._optimizers = [local_optimizer(optimizer) for optimizer in optimizers]
        self._whole = optimizers
        self._marks, self._gate, self._at_ready = marks, gate, at_ready
        self._stepped: set[int] = set()
        self._between = False
        """Whether an update is under way, and no optimizer is."""
        self._handles: list[Any] = []
        self._alone = False
        self._at, self._update = at, update or self._step_all
        self._signals = HeldSignals()

    def install(self) -> None:
        for optimizer in self._optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                raise ConfigError(
                    f"{type(optimizer).__name__} has no hooks: call begin_update and end_update, and give update="
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
        # the wrapper around `step` hands on the optimizer itself as the first argument
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._alone or self._marks.updating:
            if closure is not None:
                raise ConfigError(
                    "step(closure) of a further optimizer computes gradients inside the update: nobody could do it alone"
                )
            if id(optimizer) in self._stepped:
                raise ConfigError(
                    "an optimizer made two steps in one update: call begin_update and end_update around what belongs together"
                )
        elif closure is None:
            self.begin()
        else:
            return (args[0],), {**kwargs, "closure": self._beginning_behind(closure)}
        self._between = False
        return None

    def _beginning_behind(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Gradients are complete when the closure returns, which an optimizer calls before it changes anything."""

        def gradients() -> Any:
            if self._marks.updating:
                raise ConfigError(
                    "an optimizer that calls its closure more than once computes gradients inside the update"
                )
            result = closure()
            self.begin()
            return result

        return gradients

    def _after(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._stepped.add(id(optimizer))
        self._between = len(self._stepped) < len(self._optimizers)
        if len(self._stepped) == len(self._optimizers) and not self._alone:
            self.end()

    def begin(self) -> None:
        """Gradients are complete; returns when the update may begin.

        Raises:
            RuntimeError: the gate failed; the mark stays at `ready`.
        """
        self._at_ready(self._marks.now.done + 1)
        step = self._marks.ready()
        self._at("ready")
        self._gate.wait(step)
        self._gated()

    @contextmanager
    def implicit_gate(self) -> Iterator[Passage]:
        """Around the loop's own collective. Behind it the update is under way, and with it what uses the values.

        Raises:
            ConfigError: protection was made with another gate.
        """
        if not isinstance(self._gate, ImplicitGate):
            raise ConfigError(
                "protect was not told what to do with the result of this gate: give gate="
            )
        self._at_ready(self._marks.now.done + 1)
        step, passage = self._marks.ready(), Passage()
        self._at("ready")
        yield passage
        if not passage.skipped:
            self._gate.passed(step, tuple(passage.values))
            self._gated()

    def _gated(self) -> None:
        self._at("gated")
        self._stepped.clear()
        self._signals.hold()  # before the mark, and given back behind it: no handler comes in between
        try:
            self._marks.begin()
        except BaseException:
            self._signals.release()
            raise
        self._at("updating")

    def end(self) -> None:
        """The local update is complete."""
        self._marks.end()
        self._signals.release()
        self._at("updated")

    def finish_alone(self, values: tuple[float, ...] | None = None) -> None:
        """Do the update that is ready, without gate and without anybody else. For SETTLE.

        `values`: what an implicit gate gave to others.

        Raises:
            Exception: whatever the update raises; the mark then stays at `updating`: torn.
        """
        with self._uninterrupted():
            self._marks.begin(settling=True)
            with self._no_gate():
                self._stepped.clear()
                if values is not None and isinstance(self._gate, ImplicitGate):
                    self._gate.use(values)
                self._update()
            self._marks.end()

    def finish_begun(self) -> None:
        """Do the rest of an update that was left between two optimizers, where parameters of the first one were being sent round.

        Raises:
            Exception: whatever the update raises; the mark then stays at `updating`: torn.
        """
        if self._marks.updating and self._between:
            with self._uninterrupted(), self._no_gate():
                self._step_all()
                self._marks.end()
        else:  # also behind one that is torn
            self._signals.drop()

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
                optimizer._local_step()  # noqa: SLF001  # the inner one alone does not know what a scheduler set in the outer one


def _refuse_needed_closure(optimizer: Any) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes gradients inside the update, in its closure: nobody could do it alone"
        )


def refuse_several_with_scaler(optimizers: Sequence[Any], scaler: Any) -> None:
    """A scaler skips each optimizer by itself: nobody could say which one is an update's last.

    Raises:
        ConfigError: there are several, and a scaler.
    """
    if scaler is not None and len(optimizers) > 1:
        raise ConfigError(
            "a loss scaler may skip one of several optimizers: call begin_update and end_update, and give update="
        )
