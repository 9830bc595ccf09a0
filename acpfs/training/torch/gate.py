"""The point between complete gradients and the update that no rank passes before all have reached
it.

A gate is passed in the main thread, with the marks at `ready`. It raises where a rank is missing;
the rank then stays `ready`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training import messages


class Gate(Protocol):
    """What hooks ask before an update."""

    @property
    def kind(self) -> messages.Gate: ...

    @property
    def result(self) -> messages.GateResult | None:
        """What the last passage gave, where the update needs it."""

    def wait(self, step: int) -> None:
        """Until all ranks have the gradients of update `step`.

        Raises:
            RuntimeError: one of them cannot come any more.
        """


class NoGate:
    """Every rank has everything: whoever is ahead is a cover."""

    kind = messages.Gate.NONE
    result = None

    def wait(self, step: int) -> None:
        """Goes on at once."""


class Votes(Protocol):
    """What ranks tell each other at the gate, beside the number of the update."""

    def vote(self) -> bool:
        """This rank's, when it comes to the gate."""

    def voted(self, count: int) -> None:
        """So many have voted for it; called when the gate is passed."""


class ExplicitGate:
    """One all-reduce of a number or two, in a group of its own, so that it is in nobody's way."""

    kind = messages.Gate.EXPLICIT
    result = None

    def __init__(self, group: Any, device: str = "cpu", votes: Votes | None = None) -> None:
        """`group`: of all ranks. `device`: where its backend wants tensors.

        `votes`: all ranks have them, or none.
        """
        self._group = group
        self._votes = votes
        self._sum = torch.zeros(1 if votes is None else 2, dtype=torch.int64, device=device)

    def wait(self, step: int) -> None:
        self._sum.fill_(step)
        if self._votes is not None:
            self._sum[1] = int(self._votes.vote())
        dist.all_reduce(self._sum, group=self._group)
        found = int(self._sum[0].item())
        expected = step * dist.get_world_size(self._group)
        if found != expected:
            raise RuntimeError(
                f"ranks do not do the same update: the sum of their numbers is {found}, and "
                f"{expected} for update {step}"
            )
        if self._votes is not None:
            self._votes.voted(int(self._sum[1].item()))


@dataclass
class Passage:
    """What a loop says of its own gate, before it leaves the block of `protection.gate()`."""

    values: tuple[float, ...] = ()
    """What the collective gave, as far as the update depends on it."""
    skipped: bool = False
    """There is no update this time: an overflow."""


class ImplicitGate:
    """The loop's own collective over all ranks.

    What it gave is kept: who was not let through needs it to do the update alone.
    """

    kind = messages.Gate.IMPLICIT

    def __init__(self, use: Callable[[tuple[float, ...]], None]) -> None:
        """`use`: does with the values what the loop does between its collective and the update,
        such as clipping.
        """
        self.result: messages.GateResult | None = None
        self.use = use

    def passed(self, step: int, values: tuple[float, ...]) -> None:
        """All ranks have the gradients of update `step`."""
        self.result = messages.GateResult(step, values)

    def wait(self, step: int) -> None:
        """Called where an update begins outside of `protection.gate()`."""
        raise ConfigError(
            f"update {step} begins without its gate: put the collective into `with "
            "protection.gate():`"
        )
