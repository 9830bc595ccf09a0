"""What goes wrong in a history: calls on the storage that fail, and where a life ends."""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass

from tests.sim.choices import (
    AIMED,
    HAVE_CREWS,
    HAVE_LANE,
    HAVE_MIRROR,
    HAVE_MIRRORED_LANE,
    Choices,
    Knobs,
    Profile,
)
from tests.sim.virtual import MACHINE

HANGS_S = (0.1, 1.0, 7.0, 40.0)
LANE_HANGS_S = (0.1, 0.3, 1.0, 7.0)
"""The same in the lane of the kernel, where writers are held meanwhile."""
KILLED_AT_A_CHANGE = 0.4
"""Share of lives of histories with habits that end as the storage has just been changed."""
KILLED_WITHIN = 0.2
"""Share of lives of several processes that end within a commit of the state."""
WITHIN_MAX = 20
KILLED_AT_A_MUST = 0.3
"""Share of lives of that lane that end as something is recorded before it is done."""


KILLED_AS_OUTDATED = 0.5
"""Share of lives of that lane with a mirror that end as a copy is outdated, or soon after."""
KILLED_AT_A_JOIN = 0.15
"""Share of lives with a mirror that end before what has joined the next transaction is recorded."""
JOINS_MAX = 8
JOINS_NUMBER = 357
"""With it, no life of a history that failed before there was this has such an end."""
LATER_TURNS = (0, 0, 5, 50, 500)
FLUSHES = frozenset({"fsync directory", "fsync entry", "sync file systems"})
SLOW_S = (0.05, 0.3, 1.0)
KILLED_AS_AIMED = 0.7
"""Share of lives of aimed profiles that end at what these aim at."""
LOSSES_LATER_TURNS = (2, 5, 20, 50, 500)


class FaultKind(enum.Enum):
    """How a call on the storage fails."""

    BEFORE = "not done"
    AFTER = "done"
    HANG = "late"


class Faults:
    """Those of one life."""

    def __init__(
        self,
        choices: Choices,
        life: tuple[object, ...],
        knobs: Knobs,
        outage_until_s: float,
        until_s: float = math.inf,
    ) -> None:
        """`outage_until_s`: of the machine's clock; before it each change is refused.

        `until_s`: from then on nothing fails.
        """
        self._error_rate = knobs.error_rate
        self._hang_rate = knobs.hang_rate
        self._forget_rate = knobs.forget_rate
        self._slow_rate = knobs.slow_rate
        self._outage_until_s = min(outage_until_s, until_s)
        self._until_s = until_s
        is_lane = choices.profile in HAVE_LANE
        self._hangs_s = LANE_HANGS_S if is_lane else HANGS_S
        self._stream = choices.stream("faults", *life)
        self._forgets = choices.stream("forgets", *life)
        self._slow = choices.stream("slow", *life)

    def loses(self) -> random.Random | None:
        """The chance of what a flush loses that fails now; None: it loses nothing."""
        if MACHINE.moment_s >= self._until_s:
            return None
        return self._forgets if self._forgets.random() < self._forget_rate else None

    def slow_s(self, *, changes: bool) -> float:
        """How late a question is answered."""
        is_slow = not changes and self._slow_rate and self._slow.random() < self._slow_rate
        return self._slow.choice(SLOW_S) if is_slow else 0.0

    def next(self, *, changes: bool) -> FaultKind | None:
        """Of the storage's next call."""
        if changes and MACHINE.moment_s < self._outage_until_s:
            return FaultKind.BEFORE
        if MACHINE.moment_s >= self._until_s:
            return None
        if self._hang_rate and self._stream.random() < self._hang_rate:
            return FaultKind.HANG
        if not changes or self._stream.random() >= self._error_rate:
            return None
        return self._stream.choice((FaultKind.BEFORE, FaultKind.AFTER))

    def hang_s(self) -> float:
        """For how long a late call is out."""
        return self._stream.choice(self._hangs_s)


@dataclass(slots=True)
class Death:
    """Where a life ends by kill -9; the first of these that comes."""

    turn: float = math.inf
    commit: float = math.inf
    is_after: bool = False
    """After that commit, or that change."""
    tier_change: float = math.inf
    """Of the files in RAM: one is made, or removed."""
    must: float = math.inf
    """Of those commits that have to be there before what follows is done."""
    within: float = math.inf
    """Of those commits after which something is taken away: what goes with it is written, and the
    state is not.
    """
    change: float = math.inf
    """Of the storage: before the life hears of it."""
    outdated: float = math.inf
    """Of the copies beside whose versions the kernel has gone on writing."""
    join: float = math.inf
    """Of the steps that join the next transaction, of which people are told meanwhile: that one
    does not come any more.
    """
    calls: float = math.inf
    """Calls of programs that were answered in this life."""
    rename: float = math.inf
    """Of those renames that are not of staging files: as it is done."""
    losses: float = math.inf
    """Of names, by flushes that failed."""
    pause_s: float = 0.0
    turns_later: int = 0
    """Than that copy, or what is the last of others that count so."""

    @classmethod
    def drawn(cls, choices: Choices, *life: object) -> Death:
        if choices.profile in AIMED and (aimed := cls._aimed(choices, *life)) is not None:
            return aimed
        change = choices.stream("change", *life)
        if choices.has_habits and change.random() < KILLED_AT_A_CHANGE:
            return cls(change=change.randrange(1, 120))
        must = choices.stream("must", *life)
        if choices.profile in HAVE_LANE and must.random() < KILLED_AT_A_MUST:
            return cls(must=must.randrange(1, 30), is_after=must.random() < 0.5)
        outdated = choices.stream("outdated", *life)
        if choices.profile in HAVE_MIRRORED_LANE and outdated.random() < KILLED_AS_OUTDATED:
            return cls(
                outdated=outdated.choice((1, 1, 1, 2, 3)), turns_later=outdated.choice(LATER_TURNS)
            )
        join = choices.stream("join", JOINS_NUMBER, *life)
        if choices.profile in HAVE_MIRROR and join.random() < KILLED_AT_A_JOIN:
            return cls(join=join.randrange(1, JOINS_MAX))
        within = choices.stream("within", *life)
        if choices.profile in HAVE_CREWS and within.random() < KILLED_WITHIN:
            return cls(within=within.randrange(1, WITHIN_MAX))
        chance = choices.stream("death", *life)
        kind = chance.choice(("turn", "turn", "commit", "commit", "tier", "calls"))
        if kind == "turn":
            return cls(turn=chance.randrange(20, 1500))
        if kind == "commit":
            return cls(commit=chance.randrange(1, 200), is_after=chance.random() < 0.5)
        if kind == "tier":
            return cls(tier_change=chance.randrange(1, 40), is_after=chance.random() < 0.5)
        return cls(calls=chance.randrange(1, 25), pause_s=chance.choice((0.0, 0.01, 0.5)))

    @classmethod
    def _aimed(cls, choices: Choices, *life: object) -> Death | None:
        """At what the profile is about; None: as any other."""
        chance = choices.stream("aimed", *life)
        if chance.random() >= KILLED_AS_AIMED:
            return None
        if choices.profile is Profile.FORGETTING:
            later = chance.choice(LOSSES_LATER_TURNS)
            return cls(losses=chance.choice((1, 1, 2, 3)), turns_later=later)
        if choices.profile is Profile.RETURNING:
            return cls(rename=chance.choice((1, 1, 2, 3)))
        if choices.profile is Profile.NARROW:
            return cls(change=chance.randrange(1, 120))
        if choices.profile is Profile.OUTDATED:
            later = chance.choice(LATER_TURNS)
            return cls(outdated=chance.choice((1, 1, 2)), turns_later=later)
        if choices.profile is Profile.HANDED_ON:
            return cls(calls=chance.randrange(2, 15), pause_s=0.0)
        return None
