"""What a supervisor does when it is told to end: the first time what is dirty is drained, the
second time it ends at once.

Only the supervisor counts. Its worker may get any number of signals from whoever signals all
processes of a mount, and drains; the supervisor itself may get the same order twice then, so what
comes together with the first signal is one order with it.

The signal comes at any moment: before there is a mount, while a worker is forked, starts, serves or
has just died, between two workers, while the mount is another supervisor's. Owns how often it came,
and the table of what is to be done. Does nothing itself. The supervisor's; standard library only,
no thread.
"""

from __future__ import annotations

import enum
from typing import Any

TOGETHER_S = 1.0
"""What comes within this after the first signal is one order with it: `timeout` signals its child
and then its group, a shell that has got a group's signal passes it on. Who means it waits longer,
or says it once more.
"""


class Stop(enum.Enum):
    """What the mount's end has come to."""

    NOT_TOLD = "it goes on"
    DRAIN = "told once: what is dirty is drained, then all ends"
    NOW = "told again: what is dirty stays in the RAM tier"


AGAIN = {Stop.NOT_TOLD: Stop.DRAIN, Stop.DRAIN: Stop.NOW, Stop.NOW: Stop.NOW}
"""Where each signal leads. Nothing leads back."""


class Owner(enum.Enum):
    """Whose the mount is."""

    NOBODY = "no worker has served yet: there is none"
    OURS = "this supervisor's: nobody else drains it"
    OTHERS = "others go on with it if no worker of this supervisor comes to serve"
    SUCCESSOR = "another supervisor was given it, and nothing was heard of that yet"


class Readiness(enum.Enum):
    """How far a worker is."""

    ORDERED = "the template has the order to fork it"
    STARTING = "it is a process, and does not serve yet"
    SERVING = "it serves"


class Act(enum.Enum):
    """What is done."""

    WAIT = "something is under way; it is asked again when that is over"
    START = "start the next worker now: it is to drain"
    TELL = "tell the worker to end: it drains, or the second time leaves what is dirty"
    KILL = "kill the worker"
    CANCEL = "kill the template: a worker that it has forked by then says so itself"
    FINISH = "end: nothing is this supervisor's to drain"
    ABANDON = "take the mount away without a worker, and end"


TABLE: dict[tuple[Owner, Readiness | None], tuple[Act, Act]] = {
    (Owner.NOBODY, None): (Act.FINISH, Act.FINISH),
    (Owner.NOBODY, Readiness.STARTING): (Act.TELL, Act.TELL),
    (Owner.OURS, None): (Act.START, Act.ABANDON),
    (Owner.OURS, Readiness.STARTING): (
        Act.WAIT,
        Act.KILL,
    ),  # a signal would end it before it can drain
    (Owner.OTHERS, None): (Act.FINISH, Act.FINISH),
    (Owner.OTHERS, Readiness.STARTING): (
        Act.KILL,
        Act.KILL,
    ),  # it must not unmount what others go on with
    # a process may come of it that lives on by itself: only when its number is known can it be told
    # anything
    (Owner.NOBODY, Readiness.ORDERED): (Act.CANCEL, Act.CANCEL),
    (Owner.OURS, Readiness.ORDERED): (Act.WAIT, Act.CANCEL),
    (Owner.OTHERS, Readiness.ORDERED): (Act.CANCEL, Act.CANCEL),
    **dict.fromkeys([(owner, Readiness.SERVING) for owner in Owner], (Act.TELL, Act.TELL)),
    **dict.fromkeys(
        [(Owner.SUCCESSOR, readiness) for readiness in (None, *Readiness)], (Act.WAIT, Act.WAIT)
    ),
}
"""Whose the mount is, and how far the worker is (None: there is none) → what is done with `DRAIN`,
and with `NOW`.
"""


class Stopping:
    """One per supervisor."""

    def __init__(self) -> None:
        self.stop = Stop.NOT_TOLD
        self.since: float | None = None
        """Monotonic, seconds: when the first signal came; None: it has not."""

    @property
    def is_told(self) -> bool:
        """Whether the end has begun."""
        return self.stop is not Stop.NOT_TOLD

    def told(self, now: float) -> None:
        """A signal has come."""
        if self.since is None:
            self.since = now
        elif now - self.since < TOGETHER_S:
            return
        self.stop = AGAIN[self.stop]

    def is_over(self, now: float, settings: dict[str, Any]) -> bool:
        """Whether the workers that drain have had their time, which they have together."""
        return self.since is not None and now - self.since >= float(settings["drain_timeout_s"])

    def go_on(self, since: float | None) -> None:
        """Where an earlier supervisor was told, at that time; None: it was not."""
        if since is not None:
            self.stop = Stop.DRAIN
            self.since = since

    def act(self, owner: Owner, readiness: Readiness | None) -> Act:
        """What is to be done now; nothing before the first signal."""
        if not self.is_told:
            return Act.WAIT
        drain, now = TABLE[owner, readiness]
        return now if self.stop is Stop.NOW else drain
