"""What is not a tensor of the update: random numbers, scheduler, scaler, buffers.

Kept for two steps, brought to the end of one.

It is taken when a rank is ready for an update: nothing random happens in an update, and the forward
pass of the next one moves what the checkpoint of this one needs. What the loop does between update
and next step (`scheduler.step()`) is done by `after_update`.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from acpfs.training.guard import theirs

KEPT = 2


class Part(Protocol):
    """Something with a state."""

    def take(self) -> Any:
        """The state; nobody changes it afterwards."""

    def give(self, value: Any) -> None:
        """Go back to a state that was taken."""


class PythonRandom:
    """Of the module `random`."""

    def take(self) -> Any:
        return random.getstate()

    def give(self, value: Any) -> None:
        random.setstate(value)


class NumpyRandom:
    """numpy's global state, where numpy is in use."""

    def take(self) -> Any:
        numpy = sys.modules.get("numpy")
        return numpy.random.get_state() if numpy is not None else None

    def give(self, value: Any) -> None:
        if value is not None:
            sys.modules["numpy"].random.set_state(value)


class Stateful:
    """Something with `state_dict` and `load_state_dict`."""

    def __init__(self, subject: Any) -> None:
        self._subject = subject

    def take(self) -> Any:
        own = type(self._subject).__module__.partition(".")[0] == __name__.partition(".")[0]
        state = self._subject.state_dict() if own else theirs(self._subject.state_dict)
        return copy.deepcopy(state)

    def give(self, value: Any) -> None:
        self._subject.load_state_dict(copy.deepcopy(value))


@dataclass(frozen=True)
class Taken:
    """What all parts were at one moment.

    `follows`: whether the step's end was still to come, which `after_update` brings.
    """

    values: Mapping[str, Any]
    follows: bool


class HostState:
    """Of one rank. Main thread only."""

    def __init__(self, parts: Mapping[str, Part], after_update: Callable[[], None]) -> None:
        """`after_update`: from the update to the end of its step; called after a state was given
        back.
        """
        self._parts = dict(parts)
        self._after_update = after_update
        self._kept: dict[int, Taken] = {}

    def take(self, step: int) -> None:
        """Gradients of update `step` are complete."""
        self.adopt(step, Taken(self.now(), follows=True))

    def begin(self, step: int) -> None:
        """Everything is as it is at the end of `step`."""
        self.adopt(step, Taken(self.now(), follows=False))

    def adopt(self, step: int, taken: Taken) -> None:
        """What was taken elsewhere."""
        self._kept[step] = taken
        for old in sorted(self._kept)[:-KEPT]:
            del self._kept[old]

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._kept))

    def taken(self, step: int) -> Taken:
        """What is kept of one of the last two."""
        return self._kept[step]

    def bring(self, step: int) -> None:
        """Everything as it is at the end of `step`. May be repeated.

        Raises:
            KeyError: it is not one of the last two.
        """
        self.bring_back(self._kept[step])

    def bring_back(self, taken: Taken) -> None:
        """The same with a state that was taken some steps ago."""
        self.give(taken.values)
        if taken.follows:
            self._after_update()

    def give(self, values: Mapping[str, Any]) -> None:
        """Each part what it has of it there."""
        for name, part in self._parts.items():
            if name in values:
                part.give(values[name])

    def now(self) -> dict[str, Any]:
        """State of all parts, for a checkpoint."""
        return {name: part.take() for name, part in self._parts.items()}
