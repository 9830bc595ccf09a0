"""The point between complete gradients and the update that no rank passes before all have reached it.

A gate is passed in the main thread, with the marks at `ready`. It raises where a rank is missing; the rank then stays `ready`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from acpfs.training import messages


class Gate(Protocol):
    """What hooks ask before an update. An implicit gate is its framework's own collective: its adapter makes one of these."""

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


class ExplicitGate:
    """One all-reduce of one number, in a group of its own, so that it is in nobody's way."""

    kind = messages.Gate.EXPLICIT
    result = None

    def __init__(self, group: Any, device: str = "cpu") -> None:
        """`group`: of all ranks. `device`: where its backend wants tensors."""
        self._group = group
        self._sum = torch.zeros(1, dtype=torch.int64, device=device)

    def wait(self, step: int) -> None:
        self._sum.fill_(step)
        dist.all_reduce(self._sum, group=self._group)
        found, expected = int(self._sum.item()), step * dist.get_world_size(self._group)
        if found != expected:
            raise RuntimeError(f"ranks do not do the same update: the sum of their numbers is {found}, and {expected} for update {step}")
