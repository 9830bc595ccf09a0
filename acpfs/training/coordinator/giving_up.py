"""When a job whose ranks are replaced is given up: which faults count against its program, and what
begins their count anew.

It owns the causes of faults and their counts, and knows neither ranks nor tensors; `crew` asks it
once per fault. `launchers` counts deaths by the same idea: what does not get on counts, and an
update that was never done before is a new beginning. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum

from acpfs.training.coordinator.limits import Limits
from acpfs.training.messages import TroubleKind


class Cause(Enum):
    """What began a fault."""

    LOSS = "loss"
    """A process died, or was taken for lost."""
    CONSEQUENCE = "consequence"
    """A collective or the store failed: something is gone elsewhere, or a coordinator is."""
    MEMORY = "memory"
    """A device lost memory."""
    OWN = "own"
    """The program raised an error."""
    LATE = "late"
    """The generation did not come to its first update in time."""


CAUSES: Mapping[TroubleKind, Cause] = {
    TroubleKind.COLLECTIVE: Cause.CONSEQUENCE,
    TroubleKind.MEMORY: Cause.MEMORY,
    TroubleKind.ERROR: Cause.OWN,
    TroubleKind.SAVE: Cause.OWN,
}
"""What a rank says of itself → what it is to the job."""
_AGAINST_THE_PROGRAM = frozenset({Cause.OWN, Cause.LATE})
"""These come again where the same update is tried again."""


class GivingUp:
    """Of one coordinator; who takes over begins to count anew."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._furthest = -1
        """The newest update that any rank has done, ever: where the job goes on from (T10), unless
        its copies are lost.
        """
        self._cause: Cause | None = None
        """Of the fault that is under way."""
        self._faults = 0
        self._at_update: Counter[int] = Counter()
        """Faults of the program at each update. Both since the furthest was passed."""

    def reached(self, done: int) -> None:
        """A rank has done so many updates."""
        if done > self._furthest:
            self._furthest = done
            self._faults = 0
            self._at_update.clear()

    def note(self, cause: Cause) -> None:
        """A sign of a fault.

        The first that is no consequence is its cause: what others meet afterwards may come of it.
        """
        if self._cause in (None, Cause.CONSEQUENCE):
            self._cause = cause

    def verdict(self, done: int | None) -> str:
        """All that live are parked, at `done` updates (None: nobody lives): why the job is given
        up, or nothing. The fault is counted.
        """
        cause = self._cause
        self._cause = None
        if done is not None:
            self.reached(done)
        if cause is None:
            return ""
        self._faults += 1
        if done is not None and cause in _AGAINST_THE_PROGRAM:
            self._at_update[done + 1] += 1
            if self._at_update[done + 1] >= self._limits.fruitless_max:
                return f"update {done + 1} failed {self._at_update[done + 1]} times"
        if self._faults >= self._limits.faults_max:
            return f"{self._faults} faults, and update {self._furthest + 1} was never done"
        return ""
